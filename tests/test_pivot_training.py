"""Training a classifier: what it learns, what it must not see, and that its file computes what was trained."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from labelled import LAYER, TOKENS, make_labels, separable
from tiny import Make, tiny_decoder

from pad_engine.errors import RequestError
from pad_engine.rules.classifier import LINEAR_JUDGE, PIVOT_MLP, SCALARS, expected_shapes
from pad_engine.rules.pivot import FLOOR
from pad_engine.training.features import Features, extract_features
from pad_engine.training.fit import Inputs, Settings, class_weights, descend, fit, log_odds, scale_of
from pad_engine.training.label_file import Label
from pad_engine.training.metrics import auc
from pad_engine.training.pivot import (
    SCALAR_MLP,
    SHARES,
    TEST,
    TRAIN,
    VALIDATION,
    clear,
    default_layer,
    side_of,
    split,
    train_pivot,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def learnable(make_model: Make) -> tuple[list[Label], Features]:
    decoder = tiny_decoder(make_model("llama"))
    labels = separable(decoder, make_labels(decoder, 120, 9), harmless=0.7)
    return labels, extract_features(decoder, labels, [0, LAYER], TOKENS)


def test_how_many_harmless_tokens_the_floor_lets_pass(learnable: tuple[list[Label], Features]) -> None:
    """Of the test side; those at the floor pass, as the rule compares."""
    labels, features = learnable
    rows = split(labels, 0)[TEST].tolist()
    harmless = [row for row in rows if not labels[row].pivot]
    probability = torch.full((len(labels),), 1e-9)
    probability[harmless[::3]] = FLOOR
    changed = replace(features, scalars=features.scalars | {"probability": probability})
    trained = train_pivot(labels, changed, Settings(epochs=1), "tiny", CPU)
    assert trained.above_floor == len(harmless[::3]) / len(harmless)


@pytest.mark.parametrize("kind", [PIVOT_MLP, LINEAR_JUDGE])
def test_it_learns_what_the_margin_cannot_tell(kind: str, learnable: tuple[list[Label], Features]) -> None:
    labels, features = learnable
    trained = train_pivot(labels, features, Settings(kind, rate=3e-3), "tiny", CPU)
    test = trained.rankings[TEST]
    assert test[kind].auc > 0.95 and test[kind].average_precision > 0.9
    for name in ("margin", "entropy", "probability", SCALAR_MLP):
        assert abs(test[name].auc - 0.5) < 0.15, name
    assert test[kind].harmless_accepted > test["margin"].harmless_accepted + 0.3
    assert set(trained.rankings[VALIDATION]) == set(test)
    assert 0 < trained.lead[0] < test[kind].auc - test[trained.free].auc < trained.lead[1]
    assert test[trained.free].auc == max(test[name].auc for name in ("margin", "entropy", "probability"))
    # of the layers tried, the one with the best validation AUC
    aucs = {run.tap_layer: run.auc for run in trained.runs}
    assert list(aucs) == [0, LAYER] and aucs[trained.classifier.tap_layer] == max(aucs.values())
    assert trained.best.auc == trained.rankings[VALIDATION][kind].auc
    # the classifier is the one whose figures these are, on raw states and scalars
    layer = trained.classifier.tap_layer
    found = trained.classifier.pivot_prob(features.hidden[layer], features.scalars)
    np.testing.assert_allclose(found.numpy(), trained.best.scores, atol=1e-5)
    rows = split(labels, 0)[TEST].numpy()
    assert auc(found.double().numpy()[rows], np.array([label.pivot for label in labels])[rows]) == test[kind].auc
    shapes = {name: tuple(weight.shape) for name, weight in trained.classifier.weights.items()}
    scalars = ("entropy", "probability") if kind == PIVOT_MLP else ()
    assert shapes == expected_shapes(kind, 48, len(scalars)) and trained.classifier.scalars == scalars


@pytest.mark.parametrize("kind", [PIVOT_MLP, LINEAR_JUDGE])
def test_folding_changes_nothing(kind: str) -> None:
    """Columns of all sizes, one that never changes and one that is 0: raw inputs give what standardised ones gave."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(300, 20, generator=generator) * torch.logspace(-2, 2, 20) + torch.linspace(-300, 300, 20)
    hidden[:, 3], hidden[:, 4] = 7.0, 0.0
    inputs = Inputs(hidden, torch.rand(300, 2, generator=generator) * torch.tensor([5.0, 0.01]))
    pivot, rows = torch.rand(300, generator=generator) < 0.4, torch.arange(300)
    settings = Settings(kind, epochs=5, rate=1e-2)
    fitted = fit(inputs, pivot, rows[:200], rows[200:], settings)
    scales = [scale_of(x[:200]) for x in (inputs.hidden, inputs.scalars) if x is not None]
    standard = Inputs(scales[0].apply(hidden), scales[1].apply(inputs.scalars))
    weights, curve, best = descend(standard, pivot, rows[:200], rows[200:], settings)
    expected = log_odds(weights, standard).sigmoid()
    assert float(expected.std()) > 0.01 and (curve, best) == (fitted.curve, fitted.best)
    torch.testing.assert_close(log_odds(fitted.weights, inputs).sigmoid(), expected, rtol=0, atol=1e-5)


def test_noise_below_what_bf16_resolves_is_not_blown_up() -> None:
    x = 100 + 0.01 * torch.randn(500, 1)
    assert float(scale_of(x).apply(x).abs().max()) < 0.2
    torch.testing.assert_close(scale_of(x - 100).apply(x - 100).std(correction=0), torch.tensor(1.0))


def test_both_classes_weigh_the_same() -> None:
    weights = class_weights(torch.tensor([True, False, False, False]))
    assert weights.tolist() == pytest.approx([4 / 6, 2.0])


def test_a_fit_ends_where_validation_does() -> None:
    """Random classes: nothing can be learnt, so the first epochs are the best, and those weights are kept."""
    hidden, pivot = torch.randn(200, 30), torch.rand(200) < 0.5
    inputs, rows = Inputs(hidden, torch.rand(200, 2)), torch.arange(200)
    settings = Settings(epochs=100, patience=4, rate=1e-2)
    weights, curve, best = descend(inputs, pivot, rows[:100], rows[100:], settings)
    assert len(curve) == best + 4 < 100
    assert curve[best - 1].validation_loss == min(epoch.validation_loss for epoch in curve)
    assert curve[-1].train_loss < curve[0].train_loss
    again, shorter, _ = descend(inputs, pivot, rows[:100], rows[100:], replace(settings, epochs=best))
    assert shorter == curve[:best] and all(torch.equal(weight, again[name]) for name, weight in weights.items())
    assert [epoch.epoch for epoch in curve] == list(range(1, len(curve) + 1))


def test_a_seed_gives_the_same_again(learnable: tuple[list[Label], Features]) -> None:
    labels, features = learnable
    runs = [train_pivot(labels, features, Settings(epochs=2, seed=seed), "tiny", CPU) for seed in (1, 1, 2)]
    same = [
        all(torch.equal(weight, run.classifier.weights[name]) for name, weight in runs[0].classifier.weights.items())
        for run in runs
    ]
    assert same == [True, True, False]
    assert runs[0].rankings == runs[1].rankings and runs[0].counts != runs[2].counts


def some(questions: int, pivots: Sequence[bool], **fields: Any) -> list[Label]:
    """Labels without text: those given for each question."""
    label = Label("", 0, [1], [], 2, 3, 0.5, 1.0, False)
    return [
        replace(label, question=f"q{number}", step=step, pivot=pivot, **fields)
        for number in range(questions)
        for step, pivot in enumerate(pivots)
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_question_is_on_two_sides(seed: int) -> None:
    labels = some(400, [True, False, True])
    sides = split(labels, seed)
    questions = {side: {labels[row].question for row in rows.tolist()} for side, rows in sides.items()}
    assert sorted(row for rows in sides.values() for row in rows.tolist()) == list(range(len(labels)))
    assert sum(map(len, questions.values())) == 400
    for side, share in SHARES.items():
        assert abs(len(questions[side]) / 400 - share) < 0.06
    # a question stays where it is when others come
    assert all(side_of(name, seed) == side for side, names in questions.items() for name in names)
    assert split(labels[:900], seed)[TEST].tolist() == [row for row in sides[TEST].tolist() if row < 900]


def test_sides_need_both_classes() -> None:
    for pivots, words in (([False], "0 pivots and"), ([True], "pivots and 0 harmless")):
        with pytest.raises(RequestError, match=rf"the train side has .*{words}.*both kinds are needed"):
            split(some(100, pivots), 0)
    with pytest.raises(RequestError, match=r"the (validation|test) side has"):
        split(some(2, [True, False]), 0)


def test_clear_labels_alone_are_trained_on() -> None:
    labels = [
        *some(1, [True], draft_utility=0.2), *some(1, [True], draft_utility=0.3), *some(1, [False], draft_utility=0.8),
        *some(1, [False], draft_utility=0.7), *some(1, [True], draft_utility=0.0, target_utility=0.0),
    ]  # fmt: skip
    rows = torch.arange(5)
    assert clear(labels, rows, None).tolist() == [0, 1, 2, 3, 4]
    assert clear(labels, rows, 0.25).tolist() == [0, 2]
    assert clear(labels, rows, 1.0).tolist() == [0, 1, 2]
    with pytest.raises(RequestError, match=r"of utility at most 0.1, the train side has 0 pivots"):
        clear(labels, rows, 0.1)


def test_what_is_filtered_is_still_counted(learnable: tuple[list[Label], Features]) -> None:
    """Validation and test are of all labels."""
    labels, features = learnable
    doubtful = [replace(label, draft_utility=0.5) if label.step == 4 else label for label in labels]
    settings = Settings(epochs=2)
    whole = train_pivot(doubtful, features, settings, "tiny", CPU)
    part = train_pivot(doubtful, features, replace(settings, pivot_utility=0.4), "tiny", CPU)
    assert whole.counts == part.counts and whole.fitted_on == whole.counts[TRAIN]
    assert part.fitted_on.pivots < whole.fitted_on.pivots and part.fitted_on.harmless < whole.fitted_on.harmless
    assert whole.rankings[TEST]["margin"] == part.rankings[TEST]["margin"]
    assert whole.rankings[TEST][PIVOT_MLP] != part.rankings[TEST][PIVOT_MLP]


def test_the_default_layer_is_that_of_the_paper() -> None:
    assert [default_layer(layers) for layers in (36, 30, 16, 3, 1)] == [28, 23, 12, 2, 0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "tree"}, "kind must be pivot-mlp or linear-judge, got 'tree'"),
        ({"scalars": ("entropy", "length")}, "scalars must be some of entropy, probability, margin, got"),
        ({"scalars": ()}, "scalars must be some of"),
        ({"scalars": ("margin", "margin")}, "scalars must be some of"),
        ({"epochs": 0}, "epochs must be at least 1"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Settings(**fields)
    assert Settings(scalars=SCALARS).scalars == SCALARS
