"""All that a card is judged by, one benchmark after another in one call, and a line of each figure last.

    python bench/all.py --out h100 --questions spec_bench.jsonl
    python bench/all.py --out h100 --only step tail round          # those that name so
    python bench/all.py --out h100 --minutes 9                     # none is started later; the next call goes on

Each benchmark is a process of its own with a limit of time, and its output a file of the log folder: one that fails or
takes too long is a line of the summary, and the others go on. What one has measured, only --again measures anew.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from table import card_rows

HERE = Path(__file__).parent
TEXT = "QUESTIONS"  # stands for the file of --questions; a benchmark that has it needs one
# name: seconds that it may take, about twice what it needs, and the script with its arguments, --out apart; what a card
# is judged by most comes first
BENCHMARKS: dict[str, tuple[int, tuple[str, ...]]] = {
    "step": (240, ("bench_step.py", "--shapes", "135m", "1b", "8b", "--nodes", "16", "64")),
    "tail": (200, ("bench_tail.py", "--shapes", "1b", "8b")),
    "round": (260, ("bench_round.py", "--pairs", "8b+1b", "1b+1b:4", "--draft-vocab", "32768")),
    "groups": (
        240,
        ("bench_generate.py", "--questions", TEXT, "--device", "cuda", "--dtype", "bfloat16", "--turns", "3",
         "--drafters", "ngram", "draft-model:depth=4"),
    ),
    "int8": (120, ("bench_step.py", "--shapes", "8b", "--nodes", "16", "--weights", "int8")),
    "fp8": (120, ("bench_step.py", "--shapes", "8b", "--nodes", "16", "--weights", "fp8")),
    "cold-8b": (120, ("bench_cold.py", "--model", "shape:8b", "--repeats", "2")),
    "cold-smollm2": (120, ("bench_cold.py", "--model", "smollm2-135m", "--repeats", "2")),
    "context": (180, ("bench_context.py", "--shape", "8b")),
    "prefill": (120, ("bench_prefill.py",)),
    "peers": (900, ("bench_peers.py", "--questions", TEXT)),
    "peers-shapes": (600, ("bench_peers.py", "--shapes", "1b+1b:4")),
    "widened": (360, ("widened.py", "--questions", TEXT)),
    "long": (180, ("long_run.py", "--questions", TEXT)),
    "long-shapes": (
        180, ("long_run.py", "--model", "shape:1b", "--draft-model", "shape:1b:4", "--drafter", "draft-model"),
    ),
}  # fmt: skip


def arguments_of(name: str, out: str, questions: Path | None) -> list[str]:
    """The command line of a benchmark. ValueError if it needs questions and there are none."""
    script, *options = BENCHMARKS[name][1]
    if TEXT in options and questions is None:
        raise ValueError(f"{name} needs --questions")
    filled = [str(questions) if option == TEXT else option for option in options]
    return [sys.executable, str(HERE / script), *filled, "--out", out]


def run(command: Sequence[str], seconds: int, log: Path) -> str:
    """Run a benchmark; returns "done", or what became of it. Nothing that it has started outlives it: a process that
    still held the card would slow down the next one."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"took more than {seconds} s"
        finally:
            end_group(process)
    return "done" if not code else f"failed with exit code {code}"


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a group, with all that it has started and left."""
    with suppress(ProcessLookupError):  # nothing is left of the group
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(
    commands: Mapping[str, tuple[Sequence[str], int]], logs: Path, again: bool, minutes: float | None = None
) -> dict[str, str]:
    """Run benchmarks by name. One whose log says that it was done is not run again, unless that is asked for. minutes:
    after which none is started."""
    logs.mkdir(parents=True, exist_ok=True)
    found, begun = {}, time.monotonic()
    for name, (command, seconds) in commands.items():
        log, mark = logs / f"{name}.log", logs / f"{name}.done"
        if mark.exists() and not again:
            found[name] = "done before"
            continue
        start = time.monotonic()
        if minutes is not None and start - begun >= 60 * minutes:
            found[name] = "not started"
            continue
        mark.unlink(missing_ok=True)
        found[name] = run(command, seconds, log)
        if found[name] == "done":
            mark.touch()
        print(f"{name}: {found[name]}, {time.monotonic() - start:.0f} s, {log}", flush=True)
    return found


def summary(found: Mapping[str, str], left: Sequence[str], results: Path) -> str:
    """The figures of the card's folder as the README's table has them, and what became of each benchmark."""
    figures = list(card_rows(results)) if results.is_dir() else []
    outcomes = [*left, *(f"{name}: {what}" for name, what in found.items())]
    return "\n".join(["| card | figure | measured | target | |", "|---|---|---|---|---|", *figures, "", *outcomes])


def main() -> int:
    """0 if every benchmark was done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", required=True, help="folder of results/ for this card, h100 for instance, or a path")
    parser.add_argument("--questions", type=Path, help="Spec-Bench; without it what needs real text is left out")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), help="these, in the order above")
    parser.add_argument("--minutes", type=float, help="no benchmark is started after so many")
    parser.add_argument("--logs", type=Path, default=Path("bench-logs"), help="folder of outputs")
    parser.add_argument("--again", action="store_true", help="also what was done before")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # with the benchmark that runs
    commands, left = {}, []
    for name, (seconds, _) in BENCHMARKS.items():
        if args.only and name not in args.only:
            continue
        try:
            commands[name] = arguments_of(name, args.out, args.questions), seconds
        except ValueError as error:
            left.append(str(error))
    found = run_all(commands, args.logs, args.again, args.minutes)
    print(summary(found, left, HERE / "results" / args.out))
    return int(any(not what.startswith("done") for what in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
