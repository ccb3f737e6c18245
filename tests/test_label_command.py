"""`pad label`: its file, going on after a kill, shards, and what is refused."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from test_cli import check_error, pad
from tiny import Make
from typer.testing import Result

from pad_engine.errors import RequestError
from pad_engine.files import held
from pad_engine.training.label_file import read_labels
from pad_engine.training.label_store import LabelStore, merge_labels
from pad_engine.training.tasks.task import Question

QUESTIONS = 6


class Vowels:
    """The length of a text decides, so about every third answer is wrong."""

    name = "vowels"
    max_tokens = 8

    def questions(self, split: str, count: int | None = None, seed: int = 0) -> Iterator[Question]:
        texts = ["an owl", "the barn", "dusk", "12 + 7 =", "a", "mice", "spare"][:count]
        return (Question(f"{split}-{i}", text, i) for i, text in enumerate(texts))

    def extract(self, text: str) -> str | None:
        return text[-1:]

    def utility(self, question: Question, text: str) -> int:
        return int(len(text) % 3 > 0)


@pytest.fixture(scope="module")
def models(make_model: Make) -> tuple[Path, Path]:
    return make_model("llama"), make_model("llama", noise=0.12)


@pytest.fixture(scope="module")
def run(models: tuple[Path, Path]) -> Callable[..., Result]:
    def label(out: Path, *options: str) -> Result:
        task = ("--task", f"{__name__}:Vowels", "--questions", str(QUESTIONS), "--rollouts", "2")
        return pad("label", *task, "--model", models[0], "--draft-model", models[1], "--out", out, *options)

    return label


@pytest.fixture(scope="module")
def whole(run: Callable[..., Result], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an undisturbed run."""
    out = tmp_path_factory.mktemp("labels") / "labels.jsonl"
    result = run(out)
    assert result.exit_code == 0, result.output
    assert not result.stdout
    return out


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_question(path: Path) -> list[str]:
    """The lines without the numbers that rounding reaches, in an order of their own."""
    lines = [{k: v for k, v in r.items() if k not in ("margin", "entropy", "probability")} for r in records(path)[1:]]
    return sorted(json.dumps(line) for line in lines)


def test_the_file(whole: Path, models: tuple[Path, Path]) -> None:
    header, *lines = records(whole)
    settings = header["header"]
    assert settings["task"] == f"{__name__}:Vowels" and settings["split"] == "train"
    assert (settings["model"], settings["draft_model"]) == tuple(map(str, models))
    assert (settings["labeller"], settings["rollouts"], settings["drop"], settings["seed"]) == (
        "pad",
        2,
        "ratio:0.9",
        0,
    )
    assert settings["shard"] == "1/1" and "torch" in json.dumps(settings["machine"])
    done = [line for line in lines if "done" in line]
    assert sorted(line["question"] for line in done) == [f"train-{i}" for i in range(QUESTIONS)]
    judged = [line for line in lines if "draft_id" in line]
    assert lines[-1] is done[-1] and sum(line["labels"] for line in done) == len(judged) > 5
    for line in judged:
        assert line["draft_id"] != line["target_id"] and len(line["prefix_ids"]) == line["step"]
        rollout = line["draft_rollouts"][0]
        assert set(rollout) == {"seed", "answer", "finish_reason", "utility", "tokens"}
        assert isinstance(line["pivot"], bool) and line["sound"] is None
    notes = [line for line in lines if "note" in line]
    assert {line["note"] for line in notes} == {"base", "greedy"} and len(lines) == len(done + judged + notes)
    _, labels = read_labels(whole)
    assert len(labels) == len(judged)


@pytest.mark.parametrize("labeller", ["pad", "greedy"])
def test_drafting_changes_no_label(run: Callable[..., Result], whole: Path, tmp_path: Path, labeller: str) -> None:
    """Continuations are the target's, drawn or not, whatever is drafted of them."""
    plain = tmp_path / "plain.jsonl"
    assert run(plain, "--labeller", labeller, "--depth", "0").exit_code == 0
    if labeller == "pad":
        drafted = whole
    else:
        drafted = tmp_path / "drafted.jsonl"
        assert run(drafted, "--labeller", labeller).exit_code == 0
    assert by_question(plain) == by_question(drafted)


def test_a_file_that_was_cut_anywhere_keeps_its_whole_lines(whole: Path, tmp_path: Path) -> None:
    """At every byte of the last two lines, and many more of the last two questions and of the header."""
    data, out = whole.read_bytes(), tmp_path / "labels.jsonl"
    header = records(whole)[0]["header"]
    ends = [at + 1 for at, byte in enumerate(data) if byte == 10]
    lines = data.splitlines(keepends=True)
    finished = [end for end, line in zip(ends, lines, strict=True) if b'"done"' in line]
    names = [json.loads(line)["question"] for line in lines if b'"done"' in line]
    for cut in (
        *range(0, ends[0] + 1, 7),
        ends[0],
        *range(finished[-3], len(data), 41),
        *range(ends[-3], len(data) + 1),
    ):
        out.write_bytes(data[:cut])
        store = LabelStore(out, header)
        assert store.done == set(names[: sum(end <= cut for end in finished)])
        kept = data[: max((end for end in ends if end <= cut), default=ends[0])]
        assert out.read_bytes() == kept
        begun: dict[str, list[Any]] = {}
        for line in map(json.loads, kept.splitlines()[1:]):
            if line["question"] not in store.done:
                begun.setdefault(line["question"], []).append(line)
        assert store.begun == begun
        assert list(tmp_path.iterdir()) == [out]


def test_a_killed_run_goes_on_where_it_was(run: Callable[..., Result], whole: Path, tmp_path: Path) -> None:
    data, out = whole.read_bytes(), tmp_path / "labels.jsonl"
    before = by_question(whole)
    for cut in (0, len(data) // 2, len(data) - 3, len(data)):
        out.write_bytes(data[:cut])
        kept = out.read_bytes()[: cut // 2]
        assert run(out, "--batch", "3", "--parallel", "2").exit_code == 0
        assert by_question(out) == before and out.read_bytes().startswith(kept)
    assert out.read_bytes() == data


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--drop", "difference:0.1"), "was begun with drop 'ratio:0.9', and this run has 'difference:0.1'"),
        (("--seed", "1"), "was begun with seed 0, and this run has 1"),
        (("--labeller", "greedy"), "was begun with labeller 'pad', and this run has 'greedy'"),
        (("--shard", "1/2"), "was begun with shard '1/1', and this run has '1/2'"),
    ],
)
def test_other_settings_are_refused(
    run: Callable[..., Result], whole: Path, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    out = tmp_path / "labels.jsonl"
    shutil.copy(whole, out)
    check_error(run(out, *options), 1, words)
    assert out.read_bytes() == whole.read_bytes()


def test_a_file_that_another_process_writes_to_is_refused(
    run: Callable[..., Result], whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "labels.jsonl"
    shutil.copy(whole, out)
    with held(out):
        check_error(run(out), 1, f"another process writes to {out}")
    assert run(out).exit_code == 0 and list(tmp_path.iterdir()) == [out]


def test_shards_together_are_the_whole(run: Callable[..., Result], whole: Path, tmp_path: Path) -> None:
    parts = [tmp_path / f"{k}.jsonl" for k in (1, 2, 3, 4)]
    for k, part in enumerate(parts, 1):
        assert run(part, "--shard", f"{k}/4").exit_code == 0
    out = tmp_path / "labels.jsonl"
    result = pad("merge-labels", out, *parts)
    assert result.exit_code == 0, result.output
    assert by_question(out) == by_question(whole)
    asked = [line["question"] for line in records(out)[1:]]
    assert len([name for name, _ in groupby(asked)]) == QUESTIONS  # one after another
    before = out.read_bytes()
    check_error(pad("merge-labels", out, parts[3], parts[1]), 1, "of the run's shards 1/4, 3/4 are not given")
    assert out.read_bytes() == before
    check_error(pad("merge-labels", out, parts[0], parts[0]), 1, "question train-0 is in")
    other = tmp_path / "other.jsonl"
    other.write_text(parts[1].read_text().replace('"seed": 0, "shard"', '"seed": 5, "shard"'))
    check_error(pad("merge-labels", out, parts[0], other), 1, "was begun with seed 0")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--labeller", "best"), "labeller must be pad or greedy"),
        (("--drop", "half"), "drop must be ratio:A"),
        (("--shard", "3/2"), "--shard must be K/N"),
        (("--task", "no_such_module:thing"), "there is no task"),
        (("--questions", "99"), "has 7 questions in its train split, and 99 are asked for"),
        (("--out", "/no/such/folder/a.jsonl"), "there is no folder"),
    ],
)
def test_bad_options_are_refused_before_models_are_loaded(
    run: Callable[..., Result], tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    check_error(run(tmp_path / "a.jsonl", "--model", "/no/such/model", *options), 2, words)


def test_files_that_are_none_of_labels(whole: Path, tmp_path: Path) -> None:
    header, out = records(whole)[0]["header"], tmp_path / "labels.jsonl"
    for content, words in (
        (b"a shopping list", "holds no labels"),
        (b"eggs\nmilk\n", "line 1 is no line of labels"),
        (b'{"header": {}}\nmilk\n', "line 2 is no line of labels"),
    ):
        out.write_bytes(content)
        with pytest.raises(RequestError, match=words):
            LabelStore(out, header)
        with pytest.raises(RequestError, match=words):
            merge_labels(tmp_path / "merged.jsonl", [out])
        assert out.read_bytes() == content and os.listdir(tmp_path) == [out.name]


@pytest.mark.slow
def test_shards_on_a_ray_cluster(
    run: Callable[..., Result], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="ray is not installed, so shards on a cluster were NOT tested")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the task is a file of the tests
    result = run(out := tmp_path / "labels.jsonl", "--ray", "2", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert by_question(out) == by_question(whole)
    assert {path.name for path in tmp_path.iterdir()} == {"labels.jsonl", "labels-1-of-2.jsonl", "labels-2-of-2.jsonl"}


def test_shards_on_a_cluster_are_made_by_one_option(run: Callable[..., Result], tmp_path: Path) -> None:
    check_error(run(tmp_path / "a.jsonl", "--ray", "2", "--shard", "1/2"), 2, "--ray makes shards of its own")
