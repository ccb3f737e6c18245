"""A queue of commands: what runs when, what is left when time is over; the pairs' stages and the study of
pivots in it."""

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benches import bench_module

jobs, pairs, study = (bench_module(name) for name in ("jobs", "pairs", "pivot_study"))


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Makes jobs of Python code that note their names when they begin."""
    monkeypatch.setattr(jobs, "PAD", [sys.executable, "-c"])
    begin = f"import signal, sys, time; open({str(tmp_path / 'order')!r}, 'a').write(sys.argv[1]); "

    def make(name: str, code: str = "", *needs: str, **more: Any) -> Any:
        return jobs.Job(name, lambda: [begin + code, name], needs, **more)

    return make


def test_jobs_run_when_all_they_need_is_done(python: Callable[..., Any], tmp_path: Path) -> None:
    """Failures, results without a figure, what must run alone; done is done, until the command is another one."""
    every = [
        python("1", "", "b", alone=True),
        python("b", "", "a"),
        python("a", "time.sleep(0.3)"),
        python("l", "", "x"),
        python("x", "print('error: reason'); print('more'); sys.exit(3)"),
        python("v", "print('error: it is refused'); sys.exit(1)", verdict=re.compile("it is .*")),
        jobs.Job("e", lambda: "nothing to run", ("v",)),
    ]
    found = jobs.Queue(every, tmp_path, 2).run(60)
    assert found == {
        "a": "done", "b": "done", "1": "done", "x": "failed with exit code 3: error: reason", "v": "it is refused",
        "e": "nothing to run", "l": "not done yet: needs x",
    }  # fmt: skip
    order = tmp_path / "order"
    assert sorted(order.read_text()) == sorted("ab1xv") and order.read_text().index("b") > order.read_text().index("a")
    order.unlink()
    again = jobs.Queue([*every, python("a", "pass", "v")], tmp_path, 1).run(60)
    assert again["b"] == again["1"] == "done before" and again["v"] == "it is refused" and again["a"] == "done"
    assert sorted(order.read_text()) == ["a", "x"]


def test_time_ends_what_runs(python: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not end by itself is killed, and one that has not begun does not begin."""
    monkeypatch.setattr(jobs, "GRACE", 0.5)
    stubborn = python("a", "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    start = time.monotonic()
    found = jobs.Queue([stubborn, python("b")], tmp_path, 1).run(1.5)
    assert found == {"a": "not done yet: stopped", "b": "not done yet"} and time.monotonic() - start < 10
    assert (tmp_path / "order").read_text() == "a"


def test_pairs_are_trained_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage as a command of its own with the options of all; one that is not done is run again, and no other."""
    seen, short = list[tuple[str, Any]](), ["drafter-hard"]

    def run(name: str, args: Any) -> bool:
        seen.append((name, args))
        return name not in short

    class Stage:
        def __init__(self, command: Sequence[str], stdout: Any, **_: Any) -> None:
            assert command[:2] == [sys.executable, pairs.__file__]
            monkeypatch.setattr("sys.argv", command[1:])
            self.code = main()
            stdout.write(b"not done yet" if self.code else b"")

        def poll(self) -> int:
            return self.code

    def main() -> int:
        try:
            pairs.main()
        except SystemExit as error:
            assert error.code == "not done yet: run the same command again"
            return 1
        return 0

    def all_of_them() -> int:
        monkeypatch.setattr("sys.argv", ["pairs.py", "all", "--out", str(tmp_path), "--layers", "0,2", "--jobs", "2"])
        return main()

    monkeypatch.setattr(pairs, "run", run)
    monkeypatch.setattr(jobs, "Popen", Stage)
    assert all_of_them() == 1 and [name for name, _ in seen] == list(pairs.STAGES)
    given = [{**vars(args), "stage": None} for _, args in seen]
    assert given == [given[0]] * 4 and (given[0]["layers"], given[0]["out"]) == ([0, 2], tmp_path)
    assert (tmp_path / "drafter-hard.log").read_text() == "not done yet"
    seen.clear(), short.clear()
    assert all_of_them() == 0 and [name for name, _ in seen] == ["drafter-hard"]


MINUTES = {"label": 2.0, "train": 1.0, "base": 5.0, "calibrate": 9.0, "eval": 3.0, "sweep": 50.0, "speed": 1.0}


class Simulated:
    """Processes that only take their time, which passes when the queue sleeps and nothing has ended. began, ended:
    when, by job."""

    def __init__(self) -> None:
        self.now = 0.0
        self.news = False
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}

    def start(self, command: Sequence[str], **_: Any) -> Any:
        name = command[-1]
        self.began[name] = self.now
        # no two end at once
        self.ended[name] = self.now + MINUTES[name.partition("-")[0]] + len(self.began) / 1024
        return SimpleNamespace(poll=lambda: self.poll(name))

    def poll(self, name: str) -> int | None:
        over = self.ended[name] <= self.now
        self.news |= over
        return 0 if over else None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if not self.news:
            self.now = min(end for end in self.ended.values() if end > self.now)
        self.news = False


@pytest.mark.parametrize("at_once", [1, 2, 6, 7])
def test_the_classifiers_chain_waits_for_nothing_but_itself(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three pairs with long sweeps: from a pair's merged labels to its tested rule each job begins in the moment that
    what it needs is done, or but for others of the chains would. Sweeps take the places that nobody else wants."""
    args = study.parse(["all", "--pairs-dir", "p", "--out", "r"])
    every = study.in_order([study.Study(pair, args) for pair in args.only], study.STAGES)
    every = [replace(job, command=partial(list, [job.name])) for job in every]
    time = Simulated()
    monkeypatch.setattr(jobs, "Popen", time.start)
    monkeypatch.setattr(jobs, "time", time)
    found = jobs.Queue(every, tmp_path, at_once).run(1e6)
    assert set(found.values()) == {"done"} and len(found) == len(every)
    needs = {job.name: job.needs for job in every}
    ready = {name: max((time.ended[need] for need in needs[name]), default=0.0) for name in needs}
    order = [job.name for job in every]
    for pair in study.TASKS:
        for name in (f"label-{pair}", f"train-{pair}", f"calibrate-{pair}-unfloored", f"eval-{pair}-unfloored"):
            waited = [other for other in order if ready[name] <= time.began[other] < time.began[name]]
            assert all(order.index(other) < order.index(name) for other in waited), (name, waited)
            assert at_once < 6 or time.began[name] == ready[name], name
    for name in [name for name in order if name.startswith("sweep")]:
        idle = [other for other in order[: order.index(name)] if time.began[other] > time.began[name]]
        assert all(ready[other] > time.began[name] for other in idle), (name, idle)
