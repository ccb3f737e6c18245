"""Classifiers of drafted tokens: their files, their mathematics, and the models that they fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import Make, random_classifier, some_ids, tiny_engine
from torch import nn

from pad_engine import SamplingParams
from pad_engine.errors import ModelError, RequestError
from pad_engine.rules.classifier import LINEAR_JUDGE, PIVOT_MLP, SCALARS, load_classifier

D = 24


def features(count: int) -> dict[str, torch.Tensor]:
    return {name: torch.rand(count) for name in SCALARS}


@pytest.mark.parametrize("scalars", [SCALARS, ("margin", "entropy"), ("probability",)])
def test_the_mlp_is_what_torch_makes_of_it(tmp_path: Path, scalars: tuple[str, ...]) -> None:
    found = load_classifier(random_classifier(tmp_path, PIVOT_MLP, D, 2, scalars), PIVOT_MLP)
    hidden, units = nn.Linear(D, 64), nn.Linear(len(scalars), 16)
    head = nn.Sequential(nn.Linear(80, 128), nn.ReLU(), nn.Linear(128, 2), nn.Softmax(-1))
    layers = {"hidden": hidden, "scalars": units, "layer1": head[0], "layer2": head[2]}
    for name, layer in layers.items():
        layer.load_state_dict({part: found.weights[f"{name}.{part}"] for part in ("weight", "bias")})
    h, known = torch.randn(50, D), features(50)
    with torch.no_grad():
        x = torch.stack([known[name] for name in scalars], 1)
        expected = head(torch.cat((hidden(h), units(x)), 1))[:, 1]
        low = head(torch.cat((hidden(h.bfloat16().float()), units(x)), 1))[:, 1]
    got = found.pivot_prob(h, known)
    torch.testing.assert_close(got, expected)
    assert got.dtype == torch.float32 and float(got.std()) > 0.02
    torch.testing.assert_close(found.pivot_prob(h.bfloat16(), known), low)


def test_the_judge_is_one_less_a_logistic_head(tmp_path: Path) -> None:
    found = load_classifier(random_classifier(tmp_path, LINEAR_JUDGE, D, 2), LINEAR_JUDGE)
    head, h = nn.Linear(D, 1), torch.randn(50, D)
    head.load_state_dict(found.weights)
    with torch.no_grad():
        torch.testing.assert_close(found.pivot_prob(h, {}), 1 - head(h)[:, 0].sigmoid())


@pytest.mark.parametrize("kind", [PIVOT_MLP, LINEAR_JUDGE])
def test_a_file_comes_back_as_it_was(tmp_path: Path, kind: str) -> None:
    first = load_classifier(random_classifier(tmp_path, kind, D, 2, ("margin", "probability")), kind)
    first.save(tmp_path / "again.safetensors", trained_on="nothing")
    second = load_classifier(tmp_path / "again.safetensors", kind)
    assert (second.kind, second.tap_layer, second.hidden_size, second.scalars, second.target) == (
        kind, 2, D, ("margin", "probability") if kind == PIVOT_MLP else (), "tiny"
    )  # fmt: skip
    assert all(torch.equal(weight, second.weights[name]) for name, weight in first.weights.items())
    assert json.loads((tmp_path / "again.json").read_text())["trained_on"] == "nothing"


def edit(path: Path, **facts: Any) -> None:
    beside = path.with_suffix(".json")
    beside.write_text(json.dumps(json.loads(beside.read_text()) | facts))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda path: path.with_suffix(".json").unlink(), "cannot be read"),
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: path.with_suffix(".json").write_text("{"), "cannot be read"),
        (lambda path: path.with_suffix(".json").write_text("[]"), "cannot be read"),
        (lambda path: path.with_suffix(".json").write_text("{}"), "cannot be read.*kind"),
        (lambda path: path.write_bytes(b"no tensors"), "cannot be read"),
        (lambda path: edit(path, kind="linear-judge"), "is of kind 'linear-judge', and this rule needs pivot-mlp"),
        (lambda path: edit(path, tap_layer="last"), "cannot be read"),
        (lambda path: edit(path, scalars=["entropy", "length"]), r"unknown scalars \['length'\]"),
        (lambda path: edit(path, scalars=["entropy"]), "has tensors .*expected"),
        (lambda path: edit(path, hidden_size=D + 1), "has tensors .*expected"),
        (lambda path: save_file({"weight": torch.zeros(1, D)}, path), "has tensors .*expected"),
        (lambda path: save_file(load_file(path) | {"more": torch.zeros(1)}, path), "has tensors .*expected"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, break_it: Any, words: str) -> None:
    path = random_classifier(tmp_path, PIVOT_MLP, D, 2)
    break_it(path)
    with pytest.raises(ModelError, match=words) as caught:
        load_classifier(path, PIVOT_MLP)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("hidden_size", "tap_layer"), [(47, 1), (48, 3), (48, -1)])
def test_other_models_are_refused(make_model: Make, tmp_path: Path, hidden_size: int, tap_layer: int) -> None:
    path = random_classifier(tmp_path, PIVOT_MLP, hidden_size, tap_layer)
    with pytest.raises(RequestError, match=rf"reads {hidden_size} numbers .* {tap_layer}, and this model has 48 and 3"):
        tiny_engine(make_model("llama"), rule=f"pivot:model={path}")


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_it_reads_the_state_behind_its_layer(make_model: Make, tmp_path: Path, layer: int) -> None:
    """Of the drafted token's own row, as transformers gives it before the final norm."""
    from transformers import AutoModelForCausalLM

    folder, rounds = make_model("llama"), []
    path = random_classifier(tmp_path, PIVOT_MLP, 48, layer)
    engine = tiny_engine(folder, "ngram:min=1", rule=f"pivot:sigma=1,floor=0,model={path}", budget=6)
    out = engine.generate(some_ids(4) * 5, SamplingParams(30, ignore_eos=True), on_round=rounds.append)
    assert out.stats.overrides > 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    states: list[torch.Tensor] = []
    model.model.layers[layer].register_forward_hook(
        lambda module, args, result: states.append(result if isinstance(result, torch.Tensor) else result[0])
    )
    ids, classifier = some_ids(4) * 5, load_classifier(path, PIVOT_MLP)
    for commit in (played.commit for played in rounds):
        for one in commit.overridden:
            whole = [*ids, *commit.tree.paths[one.node]]
            with torch.no_grad():
                row = model(torch.tensor([whole])).logits[0, -2]
            top, p = row.topk(2).values, row.softmax(-1)
            known = {"entropy": -(p * p.log()).sum(), "probability": p[whole[-1]], "margin": top[0] - top[1]}
            known = {name: value[None] for name, value in known.items()}
            expected = float(classifier.pivot_prob(states[-1].reshape(-1, 48)[-1:], known))
            assert one.pivot_prob == pytest.approx(expected, abs=1e-4)
        ids += commit.tokens
