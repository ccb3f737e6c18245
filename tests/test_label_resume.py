"""A labelling run that is killed anywhere and started again: the same labels as of one that was not, and nothing that
the file holds is decoded twice."""

import json
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from test_labels import PROMPTS, Ids, as_text, even, folders
from tiny import Make

from pad_engine.forest import Forest, Pair, make_pair
from pad_engine.training.label_file import read_labels
from pad_engine.training.label_store import LabelStore, merge_labels
from pad_engine.training.labels import Labeller, LabelSettings, Walked
from pad_engine.training.mismatches import MismatchReader
from pad_engine.training.rollouts import Scheduler

HEADER = {"task": "ids", "shard": "1/1"}
SETTINGS = {
    "pad": LabelSettings(rollouts=3, temperature=1.0, min_utility=0.1),
    "greedy": LabelSettings("greedy"),
}


class Killed(Exception):
    """In the place of SIGKILL."""


@pytest.fixture(scope="module")
def pair(make_model: Make) -> Pair:
    return make_pair(*folders(make_model), device="cpu")


@dataclass
class Run:
    """A run over what a file lacks, as label_run.py does it. writes: after how many it is killed. asked: the seeds of
    what was decoded, in order. ends: how long the file was after each write, and how much had been decoded by then."""

    pair: Pair
    path: Path
    settings: LabelSettings
    writes: int | None = None
    batch: int = 1
    parallel: int = 1
    asked: list[int] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)

    def go(self) -> dict[str, Walked]:
        self.store = LabelStore(self.path, HEADER)
        self.write, self.store.keep = self.store.keep, self.keep  # type: ignore[method-assign]
        task = Ids(even)
        labeller = Labeller(task, self.settings, as_text, frozenset(self.pair.target.eos_token_ids), 64)
        questions = [
            (q, p) for q, p in zip(task.questions("train"), PROMPTS, strict=True) if q.id not in self.store.done
        ]
        scheduler = Scheduler(self.forest(), MismatchReader(self.pair, 64), self.parallel)
        found = {}
        lines = self.store.begun
        walks = ((q.id, labeller.walk(q, prompt, lines.get(q.id, ()), self.store.keep)) for q, prompt in questions)
        for name, walked in scheduler.run(walks):
            self.store.finish(name, walked.reason, len(walked.records))
            found[name] = walked
        return found

    def keep(self, lines: Any) -> None:
        self.write(lines)
        self.ends.append((self.path.stat().st_size, len(self.asked)))
        if len(self.ends) == self.writes:
            raise Killed

    def forest(self) -> Forest:
        forest = Forest(self.pair, batch=self.batch, max_length=64)
        add = forest.add

        def watched(request: Any) -> None:
            self.asked.append(request.params.seed)
            add(request)

        forest.add = watched  # type: ignore[method-assign]
        return forest


@pytest.mark.parametrize("labeller", ["pad", "greedy"])
def test_a_killed_run_goes_on_at_the_very_place(pair: Pair, tmp_path: Path, labeller: str) -> None:
    """One question after another, so that the file is the same to the byte; killed after every other of its writes, and
    after each question's last label."""
    whole = Run(pair, tmp_path / "whole.jsonl", SETTINGS[labeller])
    walked, data = whole.go(), (tmp_path / "whole.jsonl").read_bytes()
    reasons = {one.reason.partition(":")[0] for one in walked.values()}
    assert len(whole.ends) > 20 and reasons >= ({"finished", "stopped"} if labeller == "pad" else {"finished"})
    assert len(set(whole.asked)) == len(whole.asked)
    path = tmp_path / "killed.jsonl"
    for number, (end, asked) in enumerate(whole.ends, 1):
        if number % 2 and not data[end:].partition(b"\n")[0].count(b'"done"'):
            continue
        path.write_bytes(data[:end])
        resumed = Run(pair, path, SETTINGS[labeller])
        found = resumed.go()
        assert path.read_bytes() == data, number
        assert resumed.asked == whole.asked[asked:], number
        assert found == {name: walked[name] for name in found}


@pytest.mark.parametrize("labeller", ["pad", "greedy"])
def test_a_write_that_was_cut_is_made_good(pair: Pair, tmp_path: Path, labeller: str) -> None:
    """Also between two lines that are written at once."""
    Run(pair, tmp_path / "whole.jsonl", SETTINGS[labeller]).go()
    data, path = (tmp_path / "whole.jsonl").read_bytes(), tmp_path / "killed.jsonl"
    ends = [at + 1 for at, byte in enumerate(data) if byte == 10]
    for end in ends[1::4]:
        path.write_bytes(data[: end + 30])
        Run(pair, path, SETTINGS[labeller]).go()
        assert path.read_bytes() == data


@pytest.mark.parametrize("labeller", ["pad", "greedy"])
def test_questions_at_work_at_once_all_keep_their_labels(pair: Pair, tmp_path: Path, labeller: str) -> None:
    """Their lines alternate. A kill in the middle costs what was being decoded: of each question one place at most."""
    options = dict(settings=SETTINGS[labeller], batch=8, parallel=4)
    whole = Run(pair, tmp_path / "whole.jsonl", **options)  # type: ignore[arg-type]
    whole.go()
    expected = by_question(whole.path)
    a_place = 2 * SETTINGS[labeller].rollouts if labeller == "pad" else 1
    for writes in range(3, len(whole.ends), 7):
        path = tmp_path / f"killed-{writes}.jsonl"
        killed = Run(pair, path, writes=writes, **options)  # type: ignore[arg-type]
        with pytest.raises(Killed):
            killed.go()
        held = lines_of(path)
        assert {label.question for label in read_labels(path)[1]} <= killed.store.done
        resumed = Run(pair, path, **options)  # type: ignore[arg-type]
        resumed.go()
        assert lines_of(path)[: len(held)] == held and by_question(path) == expected
        assert sorted(read_labels(path)[1], key=repr) == sorted(read_labels(whole.path)[1], key=repr)
        twice = set(killed.asked) & set(resumed.asked)
        assert len(twice) <= 4 * a_place and not twice & kept_seeds(held)
        assert set(killed.asked) | set(resumed.asked) == set(whole.asked)
    changes = len(list(groupby(line["question"] for line in lines_of(whole.path)[1:])))
    assert changes > 2 * len(PROMPTS)
    merge_labels(tmp_path / "merged.jsonl", [whole.path])
    merged = [line["question"] for line in lines_of(tmp_path / "merged.jsonl")[1:]]
    assert len(list(groupby(merged))) == len(PROMPTS) and by_question(tmp_path / "merged.jsonl") == expected


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_question(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines without the numbers that rounding reaches."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines_of(path)[1:]:
        kept = {key: value for key, value in line.items() if key not in ("margin", "entropy", "probability")}
        found.setdefault(line["question"], []).append(kept)
    return found


def kept_seeds(lines: list[dict[str, Any]]) -> set[int]:
    """Of the rollouts that lines hold."""
    rollouts = [one for line in lines for side in ("draft", "target") for one in line.get(f"{side}_rollouts", [])]
    rollouts += [line["rollout"] for line in lines if line.get("note") == "greedy"]
    return {one["seed"] for one in rollouts if one["seed"] is not None}
