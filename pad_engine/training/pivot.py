"""Train a classifier of drafted tokens from labels, and compare it with scores that need no training.

Questions, never tokens, are shared out to training, validation and test: tokens of one question are alike. Validation
ends the fit and chooses the tap layer; test has no say in anything. Next to read: fit.py, model_card.py.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pad_engine.errors import RequestError
from pad_engine.rules.classifier import LINEAR_JUDGE, PIVOT_MLP, SCALARS, Classifier
from pad_engine.rules.pivot import FLOOR
from pad_engine.training.features import Features
from pad_engine.training.fit import Fitted, Inputs, Settings, fit, log_odds
from pad_engine.training.label_file import Label
from pad_engine.training.metrics import AtThreshold, Ranking, Scores, at_thresholds, auc, auc_lead, rank, training_free

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SHARES = {TRAIN: 0.7, VALIDATION: 0.15, TEST: 0.15}  # of the questions
CLEARLY_HARMLESS = 0.8  # least draft utility of a harmless token, where only clear labels are trained on
SCALAR_MLP = "scalar-mlp"  # what the scalars tell without a hidden state
RELATIVE_DEPTH = 28 / 36  # of the tap in the released code: the 8th layer from the end of 36


@dataclass(frozen=True)
class Count:
    """What a side has, or what is used of it."""

    questions: int
    pivots: int
    harmless: int


@dataclass(frozen=True)
class LayerRun:
    """A tap layer that was tried. auc: on the validation side. scores: the pivot probability of every label."""

    tap_layer: int
    auc: float
    fitted: Fitted
    scores: Scores


@dataclass(frozen=True)
class Trained:
    """The classifier, and how it came about. counts: by side; fitted_on: what is used of the training side. runs: by
    tap layer; best: the one chosen. rankings: by side (validation, test) and score, the classifier's under its kind.
    free: the score without training of the best AUC on test; lead: by how much the classifier's exceeds it there, as
    metrics.auc_lead. thresholds: of the classifier on test. above_floor: share of the harmless tokens there that the
    rule's own floor lets pass."""

    classifier: Classifier
    counts: dict[str, Count]
    fitted_on: Count
    runs: list[LayerRun]
    best: LayerRun
    rankings: dict[str, dict[str, Ranking]]
    free: str
    lead: tuple[float, float]
    thresholds: list[AtThreshold]
    above_floor: float


def default_layer(num_layers: int) -> int:
    """The tap layer at the paper's relative depth: 28 of 36 layers, 23 of 30."""
    return min(round(RELATIVE_DEPTH * num_layers), num_layers - 1)


def train_pivot(
    labels: Sequence[Label], features: Features, settings: Settings, target: str, device: torch.device
) -> Trained:
    """Fit a classifier behind each tap layer of the features and keep the one of the best validation AUC, the first of
    equals.

    target: the model's name. device: where to fit. RequestError when a side lacks one of the classes.
    """
    sides = split(labels, settings.seed)
    rows = clear(labels, sides[TRAIN], settings.pivot_utility)
    pivot = torch.tensor([label.pivot for label in labels])

    def run(layer: int | None, scalars: Sequence[str], kind: str) -> tuple[Fitted, Scores]:
        inputs, validation = inputs_of(features, layer, scalars, device), sides[VALIDATION].to(device)
        fitted = fit(inputs, pivot.to(device), rows.to(device), validation, replace(settings, kind=kind))
        return fitted, log_odds(fitted.weights, inputs).sigmoid().double().cpu().numpy()

    at, flags = {side: places.numpy() for side, places in sides.items()}, pivot.numpy()
    runs = []
    for layer in features.hidden:
        fitted, found = run(layer, settings.scalars, settings.kind)
        runs.append(LayerRun(layer, auc(found[at[VALIDATION]], flags[at[VALIDATION]]), fitted, found))
    best = max(runs, key=lambda one: one.auc)
    free = training_free({name: values.double().numpy() for name, values in features.scalars.items()})
    scores = free | {SCALAR_MLP: run(None, SCALARS, PIVOT_MLP)[1], settings.kind: best.scores}
    rankings = {
        side: {name: rank(values[at[side]], flags[at[side]]) for name, values in scores.items()}
        for side in (VALIDATION, TEST)
    }
    rival, test = max(free, key=lambda name: rankings[TEST][name].auc), at[TEST]
    questions = [labels[row].question for row in test]
    harmless = features.scalars["probability"][sides[TEST]][~pivot[sides[TEST]]]
    return Trained(
        as_classifier(best, settings, target), {side: count(labels, places) for side, places in sides.items()},
        count(labels, rows), runs, best, rankings, rival,
        auc_lead(best.scores[test], free[rival][test], flags[test], questions),
        at_thresholds(best.scores[test], flags[test]), float((harmless >= FLOOR).double().mean()),
    )  # fmt: skip


def split(labels: Sequence[Label], seed: int) -> dict[str, Tensor]:
    """int64 `[n]`, the indices of each side's labels. RequestError if a side has no pivot, or nothing else."""
    placed = [side_of(label.question, seed) for label in labels]
    sides = {side: torch.tensor([i for i, at in enumerate(placed) if at == side], dtype=torch.int64) for side in SHARES}
    for side, rows in sides.items():
        check_both(f"the {side} side has", count(labels, rows))
    return sides


def side_of(question: str, seed: int) -> str:
    """Where a question belongs, whatever other questions there are."""
    digest = hashlib.sha256(f"{seed}:{question}".encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    if place < SHARES[TRAIN]:
        return TRAIN
    return VALIDATION if place < SHARES[TRAIN] + SHARES[VALIDATION] else TEST


def clear(labels: Sequence[Label], rows: Tensor, pivot_utility: float | None) -> Tensor:
    """Of training rows those whose labels leave no doubt, as in the released code: target utility above 0, draft
    utility of pivots at most this, and of others at least CLEARLY_HARMLESS. All of them if no utility is given."""
    if pivot_utility is None:
        return rows

    def is_clear(label: Label) -> bool:
        low, high = (0.0, pivot_utility) if label.pivot else (CLEARLY_HARMLESS, 1.0)
        return label.target_utility > 0 and low <= label.draft_utility <= high

    kept = torch.tensor([row for row in rows.tolist() if is_clear(labels[row])], dtype=torch.int64)
    check_both(
        f"of clear labels, with pivots of utility at most {pivot_utility:g}, the {TRAIN} side has", count(labels, kept)
    )
    return kept


def count(labels: Sequence[Label], rows: Tensor) -> Count:
    """Of some of the labels."""
    chosen = [labels[row] for row in rows.tolist()]
    pivots = sum(label.pivot for label in chosen)
    return Count(len({label.question for label in chosen}), pivots, len(chosen) - pivots)


def check_both(what: str, found: Count) -> None:
    """RequestError unless both classes are there."""
    if not found.pivots or not found.harmless:
        raise RequestError(
            f"{what} {found.pivots} pivots and {found.harmless} harmless tokens of {found.questions} questions; "
            "both kinds are needed",
            "label more questions",
        )


def inputs_of(features: Features, layer: int | None, scalars: Sequence[str], device: torch.device) -> Inputs:
    """A layer's states (None: without any) and the scalars named, on a device."""
    hidden = None if layer is None else features.hidden[layer].to(device)
    return Inputs(hidden, torch.stack([features.scalars[name] for name in scalars], 1).to(device))


def as_classifier(run: LayerRun, settings: Settings, target: str) -> Classifier:
    """What was fitted behind a layer, as rules take it, on the CPU."""
    weights = {name: weight.cpu().contiguous() for name, weight in run.fitted.weights.items()}
    hidden_size = weights["weight" if settings.kind == LINEAR_JUDGE else "hidden.weight"].shape[1]
    scalars = () if settings.kind == LINEAR_JUDGE else settings.scalars
    return Classifier(settings.kind, run.tap_layer, hidden_size, scalars, weights, target)
