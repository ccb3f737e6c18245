"""`pad train pivot`: its files, the engine that loads them, and what it refuses."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from labelled import LAYER, TOKENS, make_labels, separable, write_labels
from tiny import Make, some_ids, tiny_decoder, tiny_engine
from typer.testing import CliRunner, Result

from pad_engine import SamplingParams
from pad_engine.drafters.scripted import Scripted
from pad_engine.rules.classifier import LINEAR_JUDGE, PIVOT_MLP, load_classifier
from pad_engine.serving.cli import app
from pad_engine.training.apart import trained_on
from pad_engine.training.features import extract_features
from pad_engine.training.fit import Inputs, log_odds
from pad_engine.training.label_file import Label
from pad_engine.training.metrics import THRESHOLDS

ROW = Label("", 0, [1], [], 2, 3, 0.5, 1.0, True)


@pytest.fixture(scope="module")
def file(make_model: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    decoder = tiny_decoder(make_model("llama"))
    return write_labels(
        tmp_path_factory.mktemp("labels") / "labels.jsonl", separable(decoder, make_labels(decoder, 110, 9))
    )


def train(make: Make, labels: Path, out: Path, *arguments: str) -> Result:
    options = ["train", "pivot", str(labels), "--model", str(make("llama")), "--device", "cpu", "--out", str(out)]
    return CliRunner().invoke(app, [*options, *arguments])


def test_the_engine_judges_as_the_training_does(make_model: Make, file: Path, tmp_path: Path) -> None:
    arguments = ("--tap-layer", str(LAYER), "--scalars", "margin,entropy", "--epochs", "40")
    result = train(make_model, file, tmp_path / "pad", *arguments)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pad.json", "pad.md", "pad.safetensors"]
    assert "| margin |" in result.stdout and "On the test side it beats the best score" in result.stdout
    above = json.loads((tmp_path / "pad.json").read_text())["training"]["above_floor"]
    line = f"below 0.0001 unless it has `floor=0`: of these harmless tokens {above:.1%} are not below."
    assert line in (tmp_path / "pad.md").read_text()
    assert "features: 110 of 110 questions" in result.stderr and "pad.safetensors" in result.stderr
    path = tmp_path / "pad.safetensors"
    drafter, prompt = Scripted(lambda ids: some_ids(5, seed=len(ids))), some_ids(9)
    engine = tiny_engine(make_model("llama"), drafter, rule=f"pivot:model={path},sigma=1,floor=0", budget=6)
    rounds, ids = [], list(prompt)
    engine.generate(ids, SamplingParams(30, ignore_eos=True), on_round=rounds.append)
    labels, probabilities = [], []
    for commit in (played.commit for played in rounds):
        for one in commit.overridden:
            *answer, draft = [*ids[len(prompt) :], *commit.tree.paths[one.node]]
            labels.append(replace(ROW, step=len(labels), prompt_ids=prompt, prefix_ids=answer, draft_id=draft))
            probabilities.append(one.pivot_prob)
        ids += commit.tokens
    assert len(labels) > 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pad_engine.training.features.SAME_CHOICE", 0.0)
        features = extract_features(engine.target, labels, [LAYER], TOKENS)
    scalars = torch.stack([features.scalars[name] for name in ("margin", "entropy")], 1)
    weights = load_classifier(path, PIVOT_MLP).weights
    expected = log_odds(weights, Inputs(features.hidden[LAYER], scalars)).sigmoid()
    assert probabilities == pytest.approx(expected.tolist(), abs=1e-4)
    assert max(probabilities) - min(probabilities) > 0.2


def test_the_card_and_the_json_say_how_it_came_about(make_model: Make, file: Path, tmp_path: Path) -> None:
    arguments = ("--kind", "linear-judge", "--tap-layers", "0,1,2", "--epochs", "30", "--seed", "3", "--json")
    result = train(make_model, file, tmp_path / "judge.safetensors", *arguments)
    assert result.exit_code == 0, result.output
    out = json.loads(result.stdout)
    found, facts = out["training"], json.loads((tmp_path / "judge.json").read_text())
    assert out["out"] == str(tmp_path / "judge.safetensors") and facts["training"] == found
    assert trained_on(tmp_path / "judge.safetensors") == {f"q{number}" for number in range(110)}
    assert (facts["kind"], facts["target"], facts["scalars"]) == (LINEAR_JUDGE, str(make_model("llama")), [])
    tried = {run["tap_layer"]: run["validation_auc"] for run in found["tap_layers"]}
    assert list(tried) == [0, 1, 2] and tried[facts["tap_layer"]] == max(tried.values())
    assert (found["settings"]["seed"], found["labels"]["header"]) == (3, {"task": "none", "seed": 0})
    sides = found["counts"]
    assert sum(side["questions"] for side in sides.values()) == 110
    assert sum(side["pivots"] + side["harmless"] for side in sides.values()) == 990
    assert len(found["curve"]) <= 30 and [row["threshold"] for row in found["thresholds"]] == list(THRESHOLDS)
    card = (tmp_path / "judge.md").read_text()
    assert "--rule judge:model=judge.safetensors,delta=0.5" in card and found["labels"]["sha256"] in card
    assert "floor" not in card, "rule judge has none"
    for score in ("margin", "entropy", "probability", "scalar-mlp", "linear-judge"):
        auc = found["rankings"]["test"][score]["auc"]
        assert re.search(rf"^\| {score} \|.*\| {auc:.3f} \|", card, re.MULTILINE), score
    best = found["curve"][found["best_epoch"] - 1]
    assert f"| {best['epoch']} | {best['train_loss']:.4f} | {best['validation_loss']:.4f} |" in card
    rows = [line for line in card.splitlines() if re.match(r"\| \d+ \| [\d.]+ \| [\d.]+ \|", line)]
    assert 1 < len(rows) < 30


def test_the_card_says_when_the_margin_is_better(make_model: Make, tmp_path: Path) -> None:
    """Pivots by the margin alone, with a judge that does not see it."""
    decoder = tiny_decoder(make_model("llama"))
    labels = make_labels(decoder, 60, 6)
    margin = extract_features(decoder, labels, [0], TOKENS).scalars["margin"]
    labels = [
        replace(label, pivot=bool(value > margin.median()))
        for label, value in zip(labels, margin.tolist(), strict=True)
    ]
    file = write_labels(tmp_path / "labels.jsonl", labels)
    result = train(make_model, file, tmp_path / "pad", "--kind", "linear-judge", "--tap-layer", "0")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "pad.json").read_text())["training"]["rankings"]["test"]
    assert found["margin"]["auc"] == 1.0 > found["linear-judge"]["auc"]
    for text in (result.stdout, (tmp_path / "pad.md").read_text()):
        assert "On the test side it is beaten by the best score without training, margin: AUC" in text


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (("--scalars", "entropy,length"), "scalars must be some of entropy, probability, margin", 2),
        (("--kind", "tree"), "kind must be pivot-mlp or linear-judge", 2),
        (("--epochs", "0"), "epochs must be at least 1", 2),
        (("--tap-layers", "last"), "--tap-layers must be whole numbers", 2),
        (("--tap-layer", "3"), "tap layer 3: this model has layers 0 to 2", 1),
        (("--device", "tpu"), "device", 2),
        (("--out", "no/such/folder/pad"), "there is no folder", 2),
        (("--pivot-utility", "-1"), "of utility at most -1, the train side has 0 pivots", 1),
    ],
)
def test_bad_options_are_one_line(
    arguments: tuple[str, ...], words: str, code: int, make_model: Make, file: Path, tmp_path: Path
) -> None:
    result = train(make_model, file, tmp_path / "pad", *arguments)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.exit_code == code and len(errors) == 1 and words in errors[0]
    assert not list(tmp_path.iterdir()) and not result.stdout


def test_labels_that_teach_nothing_are_refused(make_model: Make, file: Path, tmp_path: Path) -> None:
    one = write_labels(tmp_path / "one.jsonl", [replace(ROW, question=f"q{i}", pivot=False) for i in range(50)])
    other = make_model("llama", seed=1)
    cases = [
        (one, (), "the train side has 0 pivots"),
        (tmp_path / "none.jsonl", (), "cannot be read"),
        (file, ("--model", str(other)), "the labels were made with another target"),
    ]
    for labels, arguments, words in cases:
        result = train(make_model, labels, tmp_path / "pad", *arguments)
        assert result.exit_code in (1, 2) and words in result.stderr, result.output
        assert not list(tmp_path.glob("*pad*"))


def test_nothing_half_written_is_left(
    make_model: Make, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    result = train(make_model, file, tmp_path / "pad", "--epochs", "1")
    assert result.exit_code == 1 and "cannot be written: No space left on device" in result.stderr
    assert not list(tmp_path.iterdir())
