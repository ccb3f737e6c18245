"""Figures of scores against their definitions: pairs, and every threshold there is."""

import numpy as np
import pytest
from scipy.stats import mannwhitneyu

from pad_engine.training.metrics import (
    THRESHOLDS,
    at_thresholds,
    auc,
    auc_lead,
    average_precision,
    harmless_accepted,
    rank,
    training_free,
)


def cases() -> list[tuple[np.ndarray, np.ndarray]]:
    """Scores with and without ties, and both classes."""
    rng = np.random.default_rng(0)
    found = []
    for size in (2, 3, 10, 60):
        for decimals in (0, 1, 9):
            pivot = rng.random(size) < 0.4
            pivot[:2] = True, False
            found.append((np.round(rng.normal(pivot, 1.0), decimals), pivot))
    return found


@pytest.mark.parametrize(("scores", "pivot"), cases())
def test_they_are_what_counting_gives(scores: np.ndarray, pivot: np.ndarray) -> None:
    wins = [(a > b) + (a == b) / 2 for a in scores[pivot] for b in scores[~pivot]]
    assert auc(scores, pivot) == pytest.approx(np.mean(wins), abs=1e-12)
    pairs = pivot.sum() * (~pivot).sum()
    assert auc(scores, pivot) == pytest.approx(mannwhitneyu(scores[pivot], scores[~pivot])[0] / pairs, abs=1e-12)
    area, before = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        recall, precision = (scores[pivot] >= threshold).mean(), pivot[scores >= threshold].mean()
        area, before = area + (recall - before) * precision, recall
    assert average_precision(scores, pivot) == pytest.approx(area, abs=1e-12)
    for recall in (0.95, 0.5, 1.0):
        # a rule keeps scores up to its threshold, and below all of them it keeps nothing
        kept = [scores <= threshold for threshold in [-np.inf, *scores]]
        shares = [one[~pivot].mean() for one in kept if (~one)[pivot].mean() >= recall]
        assert harmless_accepted(scores, pivot, recall) == pytest.approx(max(shares), abs=1e-12)
    for row in at_thresholds(scores, pivot):
        rejected = scores > row.threshold
        assert row.pivot_recall == rejected[pivot].mean() and row.harmless_accepted == (~rejected)[~pivot].mean()
        assert row.pivot_precision == (pivot[rejected].mean() if rejected.any() else None)


def test_known_values() -> None:
    pivot = np.array([False, True, False, True])
    found = rank(np.array([0.1, 0.4, 0.35, 0.8]), pivot)
    assert (found.auc, found.average_precision, found.harmless_accepted) == (1.0, 1.0, 1.0)
    found = rank(np.array([0.1, 0.35, 0.4, 0.8]), pivot)
    assert (found.auc, found.harmless_accepted) == (0.75, 0.5)
    assert found.average_precision == pytest.approx(0.5 + 0.5 * 2 / 3)
    found = rank(np.zeros(4), pivot)
    assert (found.auc, found.average_precision, found.harmless_accepted) == (0.5, 0.5, 0.0)


def test_one_pivot_of_twenty_may_be_lost() -> None:
    """At 95 % of 20 or of 39, but not of 19."""
    for pivots, lost in ((19, 0), (20, 1), (39, 1), (40, 2)):
        scores = np.concatenate((np.arange(pivots) + 0.5, np.arange(10.0)))
        pivot = np.arange(pivots + 10) < pivots
        assert harmless_accepted(scores, pivot) == pytest.approx((lost + 1) / 10)


def test_the_last_threshold_keeps_all_that_the_rule_keeps() -> None:
    """sigma = 0.9 keeps a probability of 0.9 itself."""
    rows = at_thresholds(np.array([0.9, 0.95, 0.2]), np.array([False, True, True]))
    assert [row.threshold for row in rows] == list(THRESHOLDS)
    assert (rows[-1].harmless_accepted, rows[-1].pivot_recall, rows[-1].pivot_precision) == (1.0, 0.5, 1.0)


def test_a_sure_target_scores_high_without_training() -> None:
    sure, unsure = (5.0, 0.1, 0.001), (0.1, 3.0, 0.4)
    margin, entropy, probability = (np.array(pair) for pair in zip(sure, unsure, strict=True))
    for scores in training_free({"margin": margin, "entropy": entropy, "probability": probability}).values():
        assert scores[0] > scores[1]


def test_a_lead_counts_by_question() -> None:
    """Against the spread of the difference over new questions; copies of a token tell nothing new."""
    rng = np.random.default_rng(1)

    def made(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        pivot = np.arange(count) % 2 == 0
        return rng.normal(1.5 * pivot, 1.0), rng.normal(0.5 * pivot, 1.0), pivot

    leads = [auc(good, pivot) - auc(weak, pivot) for good, weak, pivot in (made(200) for _ in range(400))]
    good, weak, pivot = made(200)
    low, high = auc_lead(good, weak, pivot, [f"q{i}" for i in range(200)])
    spread = np.quantile(leads, 0.975) - np.quantile(leads, 0.025)
    assert 0 < low < auc(good, pivot) - auc(weak, pivot) < high and high - low == pytest.approx(spread, rel=0.25)
    fewer = [f"q{i // 20}" for i in range(200)]
    four = auc_lead(np.tile(good, 4), np.tile(weak, 4), np.tile(pivot, 4), [f"q{i}" for i in range(200)] * 4)
    assert four[1] - four[0] == pytest.approx(high - low, rel=0.25)
    assert auc_lead(good, good, pivot, fewer) == (0.0, 0.0)
    low, high = auc_lead(weak, rng.permutation(weak), pivot[rng.permutation(200)], fewer)
    assert low < 0 < high
