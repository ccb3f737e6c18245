"""How well a score tells pivots from harmless tokens. A higher score says pivot; a rule keeps a token whose score is at
most its threshold. Next to read: pivot.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

THRESHOLDS = tuple(step / 10 for step in range(1, 10))
PIVOT_RECALL = 0.95
DRAWS = 500  # of the questions, for an interval

Scores = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Ranking:
    """auc: chance that a pivot scores above a harmless token, ties counting one half. average_precision: mean precision
    over the pivots found. harmless_accepted: share of harmless tokens kept by the loosest threshold that still rejects
    PIVOT_RECALL of the pivots."""

    auc: float
    average_precision: float
    harmless_accepted: float


@dataclass(frozen=True)
class AtThreshold:
    """A score above the threshold counts as a pivot. precision: None where nothing does."""

    threshold: float
    pivot_recall: float
    pivot_precision: float | None
    harmless_accepted: float


def rank(scores: Scores, pivot: Flags) -> Ranking:
    """All of a score's figures that need no threshold. scores, pivot: `[N]`."""
    return Ranking(auc(scores, pivot), average_precision(scores, pivot), harmless_accepted(scores, pivot))


def auc(scores: Scores, pivot: Flags) -> float:
    """Area under the ROC curve by the rank sum (Mann and Whitney 1947), equal scores sharing the middle of their
    ranks."""
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    middle = np.cumsum(count) - (count - 1) / 2
    positives = int(pivot.sum())
    above = middle[place][pivot].sum() - positives * (positives + 1) / 2
    return float(above / (positives * (len(pivot) - positives)))


def average_precision(scores: Scores, pivot: Flags) -> float:
    """Sum over the thresholds, from the highest score down, of precision times the recall gained; equal scores are one
    threshold."""
    values, place = np.unique(-scores, return_inverse=True)
    found = np.cumsum(np.bincount(place, pivot, len(values)))
    called = np.cumsum(np.bincount(place, minlength=len(values)))
    gained = np.diff(found, prepend=0.0) / pivot.sum()
    return float((gained * found / called).sum())


def harmless_accepted(scores: Scores, pivot: Flags, recall: float = PIVOT_RECALL) -> float:
    """Share of harmless tokens below the first pivot that may not be lost."""
    lost = int(np.floor((1 - recall) * pivot.sum() + 1e-9))
    return float((scores[~pivot] < np.sort(scores[pivot])[lost]).mean())


def at_thresholds(scores: Scores, pivot: Flags) -> list[AtThreshold]:
    """Figures at each of THRESHOLDS, as a rule with this sigma would have them."""
    found = []
    for threshold in THRESHOLDS:
        called = scores > threshold
        precision = float(pivot[called].mean()) if called.any() else None
        found.append(AtThreshold(threshold, float(called[pivot].mean()), precision, float((~called)[~pivot].mean())))
    return found


def auc_lead(
    scores: Scores, others: Scores, pivot: Flags, questions: Sequence[str], seed: int = 0
) -> tuple[float, float]:
    """A 95 % interval of by how much one score's AUC exceeds another's, by drawing questions with replacement (the
    paired bootstrap, Efron and Tibshirani 1993): tokens of one question are alike. Draws that lack a class are
    passed over."""
    rng, names = np.random.default_rng(seed), np.unique(np.array(questions), return_inverse=True)[1]
    rows = [np.flatnonzero(names == number) for number in range(names.max() + 1)]
    leads = []
    for _ in range(DRAWS):
        drawn = np.concatenate([rows[number] for number in rng.integers(len(rows), size=len(rows))])
        flags = pivot[drawn]
        if flags.any() and not flags.all():
            leads.append(auc(scores[drawn], flags) - auc(others[drawn], flags))
    low, high = np.quantile(leads, (0.025, 0.975))
    return float(low), float(high)


def training_free(scalars: Mapping[str, Scores]) -> dict[str, Scores]:
    """The scores that need no classifier: the target is sure of another token by margin, entropy or probability."""
    signs = {"margin": 1.0, "entropy": -1.0, "probability": -1.0}
    return {name: sign * scalars[name] for name, sign in signs.items()}
