"""How much is drafted: the choice by expected rate, and the bound on what drafting may lose."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tiny import Make, some_ids, tiny_engine

from pad_engine import SamplingParams
from pad_engine.controller import (
    CAPTURED_BUDGETS,
    FEW,
    FLOOR,
    LEAST_ALLOWANCE,
    LEAST_CARRIED,
    MAX_CREDIT,
    MOST_ALLOWANCE,
    MOST_CARRIED,
    STALE,
    TRIAL,
    Controller,
    RoundPlan,
)
from pad_engine.tree import DraftTree


@pytest.mark.parametrize("part", ["verify", "draft"])
@pytest.mark.parametrize(("times", "requests"), [(1, 1), (FEW, STALE + 1)])
def test_slow_rounds_are_not_the_last_word(part: str, times: int, requests: int) -> None:
    """Fifty times as slow as others will be: one is believed by nobody, some are for a while."""
    controller = Controller(8, 7, budgets=())
    controller.verify_cost.add(1, 10.0, FEW)
    controller.draft_cost.add(7, 1.0, FEW)
    if part == "verify":
        controller.verify_cost.add(8, 500.0, times)
    else:
        controller.draft_cost.token.seen = 0
        controller.draft_cost.add(7, 5000.0, times)
    found = []
    for _ in range(requests + 3):
        time, tokens, _ = simulate(controller, 30, lambda step: 7, row=0.02)
        found.append(10 * tokens / time)
    assert all(one == pytest.approx(1.0) for one in found[: requests - 1]) and all(one > 4 for one in found[requests:])


@pytest.mark.parametrize("max_budget", [1, 2, 7, 16])
@pytest.mark.parametrize("remaining", [1, 2, 5, 100])
def test_a_plan_leaves_room_for_the_token_after_the_draft(max_budget: int, remaining: int) -> None:
    fixed = Controller(max_budget, 20, fixed=True).decide(0, remaining)
    assert fixed.depth <= min(remaining - 1, max_budget - 1)
    assert fixed.depth == max(0, min(remaining - 1, max_budget - 1))
    assert Controller(max_budget, 20, fixed=True).decide(-1, remaining) == RoundPlan()


def simulate(
    controller: Controller,
    steps: int,
    right: Callable[[int], int],
    *,
    row: float = 0.05,
    draft: float = 0.02,
    noise: float = 0.0,
    evidence: Callable[[int], int] = lambda step: 0,
) -> tuple[float, int, list[RoundPlan]]:
    """Rounds on a clock of which a plain step takes 10 ms. right: accepted tokens of a round, at most what was drafted.
    Returns the time, the tokens, and the plans."""
    rng, time, tokens, plans = random.Random(0), 0.0, 0, []
    controller.begin()
    for step in range(steps):
        kind = evidence(step)
        plan = controller.decide(kind, 10_000)
        tree = DraftTree.chain(list(range(plan.depth + 1)), kind)
        accepted = min(plan.depth, right(step))
        verify_ms = 10 * (1 + row * plan.depth) * (1 + noise * rng.random())
        draft_ms = 10 * draft * plan.depth
        controller.observe(tree, accepted, accepted + 1, draft_ms, verify_ms, plan.budget)
        time, tokens = time + draft_ms + verify_ms, tokens + accepted + 1
        plans.append(plan)
    return time, tokens, plans


# one row of 64 may cost a third of a step or much more, and drafting itself may be dear
@pytest.mark.parametrize("draft", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("row", [0.01, 0.1, 0.5])
def test_drafts_that_are_always_wrong_lose_no_more_than_stated(row: float, draft: float) -> None:
    controller = Controller(16, 15)
    time, tokens, plans = simulate(controller, 500, lambda step: 0, row=row, draft=draft)
    plain = 10 * tokens
    assert time <= plain / FLOOR + MOST_ALLOWANCE * 10 + 1e-6
    if row + draft > 0.1:
        assert sum(plan.depth > 0 for plan in plans) < 100


@pytest.mark.parametrize("draft", [0.0, 0.1])
@pytest.mark.parametrize("row", [0.01, 0.1])
def test_a_good_start_does_not_pay_for_a_slow_end(row: float, draft: float) -> None:
    """From the moment at which drafts go wrong, what is lost is the credit, the allowance and the floor."""
    controller = Controller(16, 15)
    good, good_tokens, _ = simulate(controller, 200, lambda step: 15, row=row, draft=draft)
    assert good < 0.6 * 10 * good_tokens
    begin, controller.begin = controller.begin, lambda: None  # type: ignore[method-assign]
    time, tokens, _ = simulate(controller, 500, lambda step: 0, row=row, draft=draft)
    controller.begin = begin  # type: ignore[method-assign]
    assert time <= 10 * tokens / FLOOR + 10 * (MOST_ALLOWANCE + MAX_CREDIT) + 1e-6


@pytest.mark.parametrize("max_budget", [2, 7, 8, 16, 20])
def test_drafts_that_are_always_right_reach_the_whole_budget(max_budget: int) -> None:
    _, _, plans = simulate(Controller(max_budget, 63), 200, lambda step: 63, row=0.01, draft=0.0)
    assert plans[0] == RoundPlan()
    assert {plan.budget for plan in plans[-50:]} == {max_budget}


def test_the_length_that_pays_is_found() -> None:
    """Two tokens are right in each round: longer drafts cost and bring nothing."""
    _, _, plans = simulate(Controller(16, 15), 300, lambda step: 2, row=0.1, draft=0.05)
    late = [plan.depth for plan in plans[-100:]]
    assert sorted(late)[50] in (2, 3)


def test_one_class_of_evidence_does_not_spoil_another() -> None:
    """Weak matches are always wrong, strong ones always right: strong ones go on being drafted."""
    kinds = lambda step: 1 if step % 4 else 8  # noqa: E731
    _, _, plans = simulate(Controller(16, 15), 400, lambda s: 0 if s % 4 else 15, evidence=kinds)
    weak = [plan.depth for step, plan in enumerate(plans) if step % 4 and step > 200]
    strong = [plan.depth for step, plan in enumerate(plans) if not step % 4 and step > 200]
    assert min(strong) >= 7
    # it may be tried again now and then, and no more than that
    assert max(weak) <= 1


def test_drafting_is_tried_again_when_times_change() -> None:
    _, _, plans = simulate(Controller(8, 7), 1500, lambda step: 0 if step < 500 else 7, row=0.02, draft=0.02)
    assert sum(plan.depth == 7 for plan in plans[-200:]) > 150


def test_noise_of_plain_rounds_is_not_counted_as_loss() -> None:
    controller = Controller(8, 7)
    simulate(controller, 300, lambda step: 0, noise=0.5, evidence=lambda step: -1)
    assert controller.lost == 0.0


def test_a_new_request_keeps_costs_and_forgets_acceptance() -> None:
    controller = Controller(8, 7)
    simulate(controller, 100, lambda step: 0)
    known = {rows for rows, cost in controller.verify_cost.costs.items() if cost.seen >= FEW or rows == 1}
    costs = {rows: values for rows, values in controller.verify_cost.samples.items() if rows in known}
    controller.begin()
    assert controller.verify_cost.samples == costs and len(costs) > 1
    assert (controller.lost, controller.allowed) == (0.0, 0.0)
    assert controller.decide(0, 100).depth > 0


# the first: a cheap draft stays one after a request that measured deep drafts only; the second: the draft model reads
# the prompt once, for the whole request, and that is not what a draft costs
@pytest.mark.parametrize("prompts", [(5, 5), (800,), (5, 800)], ids=["second-request", "long-prompt", "both"])
def test_a_draft_model_that_pays_is_used(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, prompts: tuple[int, ...]
) -> None:
    """The target as its own drafter, said to cost three tenths of a step: eight tokens for 3.3 steps."""
    folder, now = make_model("llama", max_position_embeddings=1024), 0.0
    engine = tiny_engine(folder, "draft-model", draft_model="self:layers=0,1,2", budget=8, controller=True)

    def timed(decoder: Any, share: float) -> None:
        forward = decoder.forward

        def slow(placement: Any, *rest: Any) -> Any:
            nonlocal now
            now += share * (10 + 0.3 * len(placement.tokens))
            return forward(placement, *rest)

        decoder.forward = slow

    class Clock:
        def __init__(self) -> None:
            self.last = now

        def lap(self) -> float:
            elapsed, self.last = now - self.last, now
            return elapsed

    timed(engine.target, 1.0)
    timed(engine.drafter.decoder, 0.3)  # type: ignore[attr-defined]
    monkeypatch.setattr("pad_engine.engine.Stopwatch", Clock)
    monkeypatch.setattr("pad_engine.captured.Stopwatch", Clock)
    for prompt in prompts:
        stats = engine.generate(some_ids(prompt), SamplingParams(70, ignore_eos=True)).stats
        # ten or so, a few plain or short ones at the start among them
        assert stats.rounds < 20, f"prompt of {prompt}: {stats.rounds} rounds"


def test_a_round_that_made_something_costs_nothing_to_later_ones() -> None:
    """Its time is not typical; what was accepted in it is."""
    controller = Controller(4, 3)
    plain, drafted = DraftTree.chain([1]), DraftTree.chain([1, 2, 3, 4])
    controller.observe(plain, 0, 1, 0.0, 500.0, 1, typical=False)
    assert controller.verify_cost(1) == 0.0
    controller.observe(plain, 0, 1, 0.0, 10.0, 1)
    controller.observe(drafted, 3, 4, 0.0, 900.0, 4, typical=False)
    assert controller.verify_cost(1) == 10.0 and controller.lost == 0.0 and 4 not in controller.verify_cost.samples
    assert (
        controller.acceptance.expected_lengths((0, 0), 3)[3]
        > Controller(4, 3).acceptance.expected_lengths((0, 0), 3)[3]
    )


def test_drafts_at_work_are_lost_until_they_are_known() -> None:
    """Two of them may be queued before the first has failed."""
    controller = Controller(16, 15, budgets=())
    controller.verify_cost.add(1, 10.0, FEW)
    controller.verify_cost.add(16, 10.0 + 0.7 * LEAST_ALLOWANCE * 10.0)
    first = controller.decide(3, 100)
    assert first == RoundPlan(16, 15)
    assert controller.decide(3, 100, at_work=[RoundPlan()]) == first
    assert controller.decide(3, 100, at_work=[first]) == RoundPlan()
    assert controller.decide(3, 100, pinned=True, at_work=[first]) == first


def test_what_a_draft_was_made_for_counts_where_it_found_less() -> None:
    controller, root = Controller(16, 15), DraftTree.chain([1], evidence=2)
    controller.observe(root, 0, 1, 0.0, 10.0, 1)
    controller.observe(root, 0, 1, 0.0, 15.0, 16, depth=1, rows=16)
    assert (controller.verify_cost(1), controller.verify_cost(16)) == (10.0, 15.0)
    assert controller.lost == pytest.approx(5.0)
    assert controller.acceptance.expected_lengths((2, 0), 1)[1] < 0.5


@pytest.mark.parametrize(("extra", "drafts"), [(0.5, 1), (0.8, 1), (1.2, 0)])
def test_one_draft_of_the_smallest_kind_is_allowed(extra: float, drafts: int) -> None:
    """If it costs less than a plain step besides; a request that is too short to make up for more tries none."""
    controller = Controller(4, 3, budgets=())
    controller.verify_cost.add(1, 10.0, FEW)
    controller.verify_cost.add(4, 10.0 * (1 + extra), FEW)
    controller.begin()
    plans = []
    for _ in range(15):
        plans.append(controller.decide(0, 100))
        tree = DraftTree.chain([0] * (plans[-1].depth + 1))
        controller.observe(tree, 0, 1, 0.0, controller.cost(plans[-1]), plans[-1].budget)
    assert sum(plan.depth > 0 for plan in plans) == drafts


def test_what_a_plain_round_waited_for_is_lost_by_the_draft_before_it() -> None:
    controller, plain = Controller(16, 15), DraftTree.chain([1])
    controller.observe(plain, 0, 1, 0.0, 10.0, 1)
    controller.observe(plain, 0, 1, 0.0, 13.0, 1)
    assert controller.lost == 0.0
    before = list(controller.verify_cost.samples[1])
    controller.observe(plain, 0, 1, 0.0, 14.5, 1, waited=True)
    assert controller.lost == pytest.approx(3.0) and list(controller.verify_cost.samples[1]) == before


def test_what_a_request_has_won_the_next_one_may_lose_in_part() -> None:
    controller = Controller(16, 15)
    simulate(controller, 100, lambda step: 15)
    time, tokens, _ = simulate(controller, 300, lambda step: 0)
    assert time <= 10 * tokens / FLOOR + (MOST_ALLOWANCE + LEAST_CARRIED) * 10 + 1e-6
    time, tokens, _ = simulate(controller, 300, lambda step: 0)
    assert time <= 10 * tokens / FLOOR + MOST_ALLOWANCE * 10 + 1e-6, "that one has left nothing"


def test_what_was_won_with_dear_drafts_pays_for_trying_them_again() -> None:
    """Four tokens for 2.8 steps, in requests of 64 tokens; once nothing is right any more, the loss is bounded."""
    draw, controller = random.Random(0), Controller(5, 4, budgets=CAPTURED_BUDGETS, prior=0.8)
    right = lambda step: next((n for n in range(4) if draw.random() > 0.88), 4)  # noqa: E731
    dear = {"row": 0.06, "draft": 0.4}
    found = [simulate(controller, 20, right, **dear) for _ in range(30)]
    assert sum(10 * tokens for _, tokens, _ in found) > 1.2 * sum(time for time, _, _ in found)
    for _ in range(3):
        time, tokens, plans = simulate(controller, 64, lambda step: 0, **dear)
        assert time <= 10 * tokens / FLOOR + (MOST_ALLOWANCE + MOST_CARRIED) * 10 + 1e-6
    assert sum(plan.depth > 0 for plan in plans) <= 1


def test_a_first_draft_that_fails_is_not_the_last() -> None:
    """Costs are known, the first token of every draft after the first is right: a dear draft is tried again at once, by
    what an engine may lose once in its life, and not in every request."""
    found = []
    for everywhere in (False, True):
        controller = Controller(5, 4, budgets=CAPTURED_BUDGETS, prior=0.8, everywhere=everywhere)
        for _ in range(FEW):
            controller.verify_cost.add(1, 10.0)
        _, _, plans = simulate(controller, 48, lambda step: 4 if step else 0, row=0.06, draft=0.4)
        found.append(sum(plan.depth > 0 for plan in plans))
    assert found[1] > 5 > found[0]


def test_one_that_always_drafts_does_so_from_the_first_token_whatever_came_before() -> None:
    controller = Controller(5, 4, fixed=True, everywhere=True)
    for _ in range(3):
        _, _, plans = simulate(controller, 6, lambda step: 0)
        assert plans == [RoundPlan(5, 4)] * 6


def test_what_a_draft_reads_first_is_a_cost_of_its_own() -> None:
    """It is told from the round's, foretold, and weighed against what may be lost; a round of a size that nobody knows
    is believed to cost all of it."""
    controller, drafted = Controller(5, 4, budgets=(), prior=0.8), DraftTree.chain([0] * 5)
    for cost in (10.0, 10.0, 10.0):
        controller.observe(DraftTree.chain([0]), 0, 1, 0.0, cost, 1)
    controller.observe(drafted, 4, 5, 0.0, 40.0, 5, readings=2)
    assert controller.verify_cost(5) == 40 and controller.read_cost.milliseconds == 0
    for _ in range(FEW):
        controller.observe(drafted, 4, 5, 0.0, 14.0, 5)
    controller.observe(drafted, 4, 5, 0.0, 24.0, 5, readings=2)
    assert controller.verify_cost(5) == 14 and controller.read_cost.milliseconds == 5
    for readings in (0, 2):
        plan = controller.decide(0, 100, readings=readings)
        assert plan == RoundPlan(5, 4, readings) and controller.cost(plan) == 14 + 5 * readings
    controller.lost = controller.allowed  # no credit is left but for one draft, of at most a plain step
    assert controller.decide(0, 100).depth == 4 and controller.decide(0, 100, readings=2) == RoundPlan()
    assert controller.decide(0, 100, at_work=[RoundPlan(5, 4, 2)]) == RoundPlan()


def test_useless_dear_drafts_cost_their_trial_once() -> None:
    controller = Controller(5, 4, budgets=CAPTURED_BUDGETS, prior=0.8, everywhere=True)
    steps = []  # lost beyond plain decoding
    for _ in range(20):
        time, tokens, _ = simulate(controller, 64, lambda step: 0, row=0.06, draft=0.4)
        steps.append(time / 10 - tokens)
    most = 64 * (1 / FLOOR - 1) + MOST_ALLOWANCE
    assert max(steps) <= most + TRIAL + MOST_CARRIED + 1e-6
    assert sum(steps) <= len(steps) * most + TRIAL + 1e-6 and sum(steps[4:]) <= 16 * most + 1e-6


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_drafter_that_is_wrong_at_the_start_is_tried_later(everywhere: bool) -> None:
    """The first six tokens of every answer of 48 it words in its own way. A request can pay for one try: at the same
    place in each of them it would never be seen to pay."""
    controller = Controller(9, 8, budgets=CAPTURED_BUDGETS, prior=0.8, everywhere=everywhere)
    found = []
    for _ in range(24):
        controller.begin()
        time, emitted = 0.0, 0
        while emitted < 48:
            plan = controller.decide(0, 49 - emitted)
            accepted = 0 if emitted < 6 else plan.depth
            cost = 10 * (1.16 + 0.19 * plan.depth if plan.depth else 1.0)
            tree = DraftTree.chain(list(range(plan.depth + 1)), 0)
            controller.observe(tree, accepted, accepted + 1, 0.0, cost, plan.budget)
            time, emitted = time + cost, emitted + accepted + 1
        found.append(10 * emitted / time)
    assert all(one > 0.92 for one in found)
    assert (sum(one > 1.5 for one in found[8:]) >= 12) == everywhere


def test_a_dear_draft_that_is_mostly_right_is_found_to_pay(make_model: Make) -> None:
    """Four tokens for 2.8 steps: more than may be lost at first, and no less than plain if three tokens in five were
    right, as is thought of a lookup."""
    folder = make_model("llama")
    engines = [tiny_engine(folder, "ngram"), tiny_engine(folder, "draft-model", draft_model="self:layers=0")]
    priors = [engine.controller.prior for engine in engines]
    tokens_a_step = []
    for prior in priors:
        draw, controller = random.Random(0), Controller(5, 4, budgets=CAPTURED_BUDGETS, prior=prior)
        right = lambda step: next((n for n in range(4) if draw.random() > 0.8), 4)  # noqa: E731, B023
        found = [simulate(controller, 100, right, row=0.06, draft=0.38) for _ in range(20)]
        tokens_a_step.append(10 * sum(tokens for _, tokens, _ in found) / sum(time for time, _, _ in found))
    assert tokens_a_step[0] > 0.99 and tokens_a_step[1] > 1.1
