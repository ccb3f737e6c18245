"""What the controller goes by: what rounds cost, and how much of a draft is kept."""

import random
from itertools import pairwise

import pytest

from pad_engine.controller import FEW, STALE, Acceptance, CostTable


def table(**costs: float) -> CostTable:
    made = CostTable()
    for rows, cost in costs.items():
        made.add(int(rows[1:]), cost)
    return made


def test_costs_between_measured_counts_lie_on_a_line() -> None:
    costs = table(r1=10.0, r5=14.0, r9=30.0)
    assert [costs(rows) for rows in (1, 3, 5, 7, 9)] == [10.0, 12.0, 14.0, 22.0, 30.0]
    assert costs(18) > 30.0
    assert table(r4=10.0)(1) < 10.0
    assert CostTable()(7) == 0.0


def test_costs_are_medians_of_the_last_few() -> None:
    costs = CostTable()
    for value in (10.0, 10.0, 900.0, 11.0, 12.0):
        costs.add(1, value)
    assert costs(1) == 11.0
    for _ in range(5):
        costs.add(1, 20.0)
    assert costs(1) == 20.0


def test_costs_that_are_known_stay_while_they_are_used() -> None:
    costs = table(r1=10.0, r5=14.0)
    costs.add(9, 30.0, FEW)
    for _ in range(STALE + 1):
        assert costs.samples.keys() >= {1, 9}
        costs.begin()
    assert costs.samples.keys() == {1}


def test_acceptance_by_class_and_depth() -> None:
    seen = Acceptance()
    for _ in range(400):
        seen.add(kind=1, depth=3, accepted=3)
        seen.add(kind=2, depth=3, accepted=1)
    assert seen.expected_lengths(1, 3) == pytest.approx([0, 1, 2, 3], abs=0.02)
    assert seen.expected_lengths(2, 3) == pytest.approx([0, 1, 1, 1], abs=0.02)
    # a class that was never seen is not touched by the others
    assert seen.expected_lengths(3, 3) == Acceptance().expected_lengths(3, 3)
    # a depth that was never reached leans on the one before it
    assert seen.expected_lengths(1, 5)[5] > 4.9
    seen.add(kind=5, depth=0, accepted=0)
    assert seen.expected_lengths(5, 1) == Acceptance().expected_lengths(5, 1)


def test_expected_lengths_grow_by_less_and_less() -> None:
    rng, seen = random.Random(0), Acceptance()
    for _ in range(200):
        seen.add(0, 6, rng.randint(0, 6))
        seen.decay()
        lengths = seen.expected_lengths(0, 8)
        steps = [b - a for a, b in pairwise(lengths)]
        assert lengths[0] == 0
        assert all(0 <= after <= before <= 1 for before, after in pairwise(steps))
