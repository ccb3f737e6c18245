"""Which runs may go on from a file of answers or labels: those with the same models and questions, whatever their names
are."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from evaluating import Parity
from test_eval_commands import TASK, check_error, pad
from test_lora import write_adapter
from tiny import Make, make_tiny_model

from pad_engine.serving import info
from pad_engine.training.tasks.task import Question

RUN = ("--questions", "6", "--out")
EVAL = ("--rules", "greedy", *RUN)
ADAPTED = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def models(make_model: Make, tmp_path: Path) -> list[str]:
    """A pair with an adapter, in folders of its own."""
    places = [tmp_path / name for name in ("target", "draft", "adapter")]
    for place, noise in zip(places, (0.0, 0.1), strict=False):
        shutil.copytree(make_model("llama", noise=noise) if noise else make_model("llama"), place)
    adapt(places[2], 0.0)
    return ["--model", str(places[0]), "--draft-model", str(places[1]), "--adapter", str(places[2])]


def adapt(folder: Path, value: float) -> None:
    tensors = {f"{ADAPTED}.lora_A.weight": torch.ones(2, 48), f"{ADAPTED}.lora_B.weight": torch.full((48, 2), value)}
    write_adapter(folder, tensors)


CHANGES: dict[str, Callable[[Path], object]] = {
    "model_digest": lambda folder: make_tiny_model(folder / "target", noise=0.05),
    "draft_model_digest": lambda folder: make_tiny_model(folder / "draft", noise=0.05),
    "adapter_digests": lambda folder: adapt(folder / "adapter", 0.5),
}


@pytest.mark.parametrize("key", CHANGES)
def test_other_weights_in_the_same_place_are_refused(key: str, models: list[str], tmp_path: Path) -> None:
    """By every command that goes on from a file, and by the one that takes answers over."""
    out, labels, calibrated = (tmp_path / f"{name}.jsonl" for name in ("r", "labels", "c"))
    assert pad("eval", models, *EVAL, out, "--split", "calibration").exit_code == 0
    assert pad("label", models, *RUN, labels, "--labeller", "greedy").exit_code == 0
    held = out.read_bytes(), labels.read_bytes()
    CHANGES[key](tmp_path)
    words = f"was begun with {key} "
    check_error(pad("eval", models, *EVAL, out, "--split", "calibration"), 1, words)
    check_error(pad("label", models, *RUN, labels, "--labeller", "greedy"), 1, words)
    limits = ("--max-loss", "0.6", "--confidence", "0.8", "--rule", "topk")
    check_error(pad("calibrate", models, *RUN, calibrated, *limits, "--answers", out), 2, words)
    assert (out.read_bytes(), labels.read_bytes()) == held and not calibrated.exists()


@pytest.mark.parametrize("change", [{"prompt": "other"}, {"answer": 1}, {"id": "other"}])
def test_other_questions_of_the_same_task_are_refused(
    change: dict, models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, questions = tmp_path / "r.jsonl", Parity.questions
    assert pad("eval", models, *EVAL, out).exit_code == 0
    held = out.read_bytes()

    def changed(self: Parity, split: str, count: int | None = None, seed: int = 0) -> Iterator[Question]:
        first, *rest = questions(self, split, count, seed)
        yield from (replace(first, **change), *rest)

    monkeypatch.setattr(Parity, "questions", changed)
    check_error(pad("eval", models, *EVAL, out), 1, "was begun with questions_digest ")
    assert out.read_bytes() == held


def test_a_header_says_what_was_loaded(models: list[str], tmp_path: Path) -> None:
    """A draft model that is part of the target has no files; a file of a version that kept no digests is refused."""
    out = tmp_path / "r.jsonl"
    models[3] = "self:drop=1"
    for _ in range(2):
        assert pad("eval", models, *EVAL, out).exit_code == 0
    first, *lines = out.read_text().splitlines(keepends=True)
    header = json.loads(first)["header"]
    assert header["task"] == TASK and header["draft_model_digest"] is None
    assert len(header["model_digest"]) == len(header["adapter_digests"][0]) == len(header["questions_digest"]) == 64
    old = {key: value for key, value in header.items() if "digest" not in key}
    out.write_text("".join([json.dumps({"header": old}) + "\n", *lines]))
    result = pad("eval", models, *EVAL, out)
    check_error(result, 1, f"was begun without model_digest, and this run has '{header['model_digest']}'")
    assert "hint: give another --out, or the same options, models and questions as before" in result.stderr


def test_another_machine_times_again(models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting that it is asked for, so that speeds which are compared are of one machine; answers are kept."""
    out = tmp_path / "r.jsonl"

    def timed(rules: str) -> dict[str, str]:
        result = pad("eval", models, "--rules", rules, *RUN, out, "--time", "1", "--json")
        assert result.exit_code == 0, result.output
        return {name: one["machine"] for name, one in json.loads(result.stdout)["speeds"].items()}

    own = timed("topk:k=2")
    assert own.keys() == {"target", "draft", "greedy", "topk:k=2"}
    assert set(own.values()) == {f"{info.cpu_name()}, {torch.get_num_threads()} threads"}
    held = out.read_bytes()
    assert timed("topk:k=2") == own and out.read_bytes() == held
    monkeypatch.setattr(info, "cpu_name", lambda: "another")
    there = f"another, {torch.get_num_threads()} threads"
    compared = dict.fromkeys(("target", "draft", "greedy", "topk:k=3"), there)
    assert timed("topk:k=3") == own | compared
    added = [json.loads(line) for line in out.read_bytes()[len(held) :].splitlines()]
    assert {line["setting"] for line in added if "question" in line} == {"topk:k=3"}
