"""Commands, of `pad` for the most part, as processes of their own: several at a time, that may be stopped and gone on
with.

A job has a log, and a mark once it is done. What fails or runs out of time is a line, and the others go on; the same
call later does what is left. Next to read: pivot_study.py, pairs.py.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired

from pad_engine.files import write_json

# no empty entry of sys.path: in the repository's root kernels/ would hide another package
PAD = [
    sys.executable,
    "-c",
    "import sys; sys.path = [place for place in sys.path if place]; from pad_engine.serving.cli import main; main()",
]
GRACE = 10.0  # seconds from SIGTERM to SIGKILL
DONE, AGAIN = "done", "not done yet"


@dataclass(frozen=True)
class Job:
    """name: of its log and its mark. command: what follows the program, or in one text why there is nothing to run; it
    is asked for when all that the job needs is done. needs: names of jobs. verdict: a line of the log that makes of a
    failure a result. alone: whether nothing may run beside it."""

    name: str
    command: Callable[[], Sequence[str] | str]
    needs: tuple[str, ...] = ()
    verdict: re.Pattern[str] | None = None
    alone: bool = False


@dataclass(frozen=True)
class Mark:
    """What became of a job that is done: DONE, or why it has no result. command: that it was done with."""

    outcome: str
    command: list[str]


def mark_place(folder: Path, name: str) -> Path:
    """Where the mark of a job lies."""
    return folder / f"{name}.done"


def read_mark(folder: Path, name: str) -> Mark | None:
    """The mark of a job, if it is done."""
    place = mark_place(folder, name)
    return Mark(**json.loads(place.read_text(encoding="utf-8"))) if place.is_file() else None


def write_mark(folder: Path, name: str, mark: Mark) -> str:
    """Leave a mark, and return its outcome."""
    write_json(mark_place(folder, name), {"outcome": mark.outcome, "command": mark.command})
    return mark.outcome


class Queue:
    """Jobs on their way. folder: of logs and marks. at_once: how many run at the same time at most. program: that they
    are commands of, `pad` if none is named. found: what became of each by its name."""

    def __init__(self, jobs: Sequence[Job], folder: Path, at_once: int, program: Sequence[str] = ()) -> None:
        self.waiting, self.folder, self.at_once = list(jobs), folder, at_once
        self.program = list(program or PAD)
        # several processes share the processor's cores
        threads = str(max(1, len(os.sched_getaffinity(0)) // at_once))
        self.environment = {"OMP_NUM_THREADS": threads, **os.environ}
        self.running: dict[str, tuple[Job, Popen[bytes], list[str]]] = {}
        self.found: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, seconds: float) -> dict[str, str]:
        """Run what can be run in so many seconds; then, or on an error or Ctrl-C, stop what still runs."""
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end and (self.start_ready() or self.running):
                self.collect()
                time.sleep(0.05)
        finally:
            self.collect()
            self.stop()
        for job in self.waiting:
            missing = [need for need in job.needs if self.unfinished(need)]
            self.found[job.name] = f"{AGAIN}: needs {', '.join(missing)}" if missing else AGAIN
        return self.found

    def unfinished(self, name: str) -> bool:
        """Whether a job is at work or to come, or has never been done."""
        at_work = name in self.running or any(job.name == name for job in self.waiting)
        return at_work or read_mark(self.folder, name) is None

    def start_ready(self) -> bool:
        """Start jobs as far as there is room, in their order; whether anything began, or turned out to be done."""
        began = False
        for job in list(self.waiting):
            if self.has_room(job) and not any(self.unfinished(need) for need in job.needs):
                self.waiting.remove(job)
                self.begin(job)
                began = True
        return began

    def has_room(self, job: Job) -> bool:
        """Whether a job may start beside what runs."""
        limit = 1 if job.alone or any(other.alone for other, _, _ in self.running.values()) else self.at_once
        return len(self.running) < limit

    def begin(self, job: Job) -> None:
        """Start a job, unless it was done by the same command before or has nothing to run."""
        command, mark = job.command(), read_mark(self.folder, job.name)
        words = [] if isinstance(command, str) else list(command)
        if mark is not None and words and mark.command == words:
            self.settle(job.name, mark.outcome if mark.outcome != DONE else "done before")
            return
        mark_place(self.folder, job.name).unlink(missing_ok=True)
        if isinstance(command, str):
            self.settle(job.name, write_mark(self.folder, job.name, Mark(command, [])))
            return
        with self.log_of(job.name).open("wb") as log:
            process = Popen([*self.program, *words], stdin=DEVNULL, stdout=log, stderr=STDOUT, env=self.environment)
        self.running[job.name] = job, process, words

    def log_of(self, name: str) -> Path:
        """Where a job's output goes."""
        return self.folder / f"{name}.log"

    def collect(self) -> None:
        """Take note of what has ended."""
        for name, (job, process, words) in list(self.running.items()):
            if (code := process.poll()) is None:
                continue
            del self.running[name]
            log = self.log_of(name).read_text(encoding="utf-8", errors="replace")
            outcome = DONE if not code else reason if (reason := verdict_of(job, log)) else None
            if outcome is None:
                self.settle(name, f"failed with exit code {code}: {last_error(log)}")
            else:
                self.settle(name, write_mark(self.folder, name, Mark(outcome, words)))

    def stop(self) -> None:
        """End what runs, by force what does not end by itself."""
        for _, process, _ in self.running.values():
            process.terminate()
        end = time.monotonic() + GRACE
        for name, (_, process, _) in self.running.items():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except TimeoutExpired:
                process.kill()
                process.wait()
            self.settle(name, f"{AGAIN}: stopped")
        self.running.clear()

    def settle(self, name: str, outcome: str) -> None:
        """Keep what became of a job, and say it."""
        self.found[name] = outcome
        print(f"{name}: {outcome}", flush=True)


def stop_on_sigterm() -> None:
    """Leave as on Ctrl-C, so that what runs is stopped too; it is gone on with the next time."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def verdict_of(job: Job, log: str) -> str | None:
    """The line that says why a job has no result, if it says so."""
    match = job.verdict.search(log) if job.verdict else None
    return match[0] if match else None


def last_error(log: str) -> str:
    """The last line of a log that begins with "error:", or else the last one."""
    lines = [line for line in log.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("error:")), lines[-1] if lines else "no output")
