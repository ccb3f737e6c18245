"""All that a card is judged by, one benchmark after another in one call, and a line of each figure last.

    python bench/all.py --out h100 --questions spec_bench.jsonl
    python bench/all.py --out h100 --only step tail round          # those that name so

Each benchmark is a process of its own with a limit of time, and its output a file of the log folder: one that fails or
takes too long is a line of the summary, and the others go on. What one has measured, only --again measures anew.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from table import card_rows

HERE = Path(__file__).parent
TEXT = "QUESTIONS"  # stands for the file of --questions; a benchmark that has it needs one
# name: seconds that it may take, and the script with its arguments, --out apart
BENCHMARKS: dict[str, tuple[int, tuple[str, ...]]] = {
    "step": (240, ("bench_step.py", "--shapes", "135m", "1b", "8b", "--nodes", "16", "64")),
    "tail": (200, ("bench_tail.py", "--shapes", "1b", "8b")),
    "round": (400, ("bench_round.py", "--pairs", "8b+1b", "1b+1b:4")),
    "prefill": (120, ("bench_prefill.py",)),
    "int8": (120, ("bench_step.py", "--shapes", "8b", "--nodes", "16", "--weights", "int8")),
    "fp8": (120, ("bench_step.py", "--shapes", "8b", "--nodes", "16", "--weights", "fp8")),
    "cold-8b": (180, ("bench_cold.py", "--model", "shape:8b")),
    "cold-smollm2": (180, ("bench_cold.py", "--model", "smollm2-135m")),
    "context": (240, ("bench_context.py", "--shape", "8b")),
    "groups": (
        400,
        ("bench_generate.py", "--questions", TEXT, "--device", "cuda", "--dtype", "bfloat16",
         "--drafters", "ngram", "ngram-device", "draft-model:depth=4"),
    ),
    "peers": (600, ("bench_peers.py", "--questions", TEXT, "--shapes", "1b+1b:4")),
    "widened": (400, ("widened.py", "--questions", TEXT)),
    "long": (400, ("long_run.py", "--questions", TEXT)),
    "long-shapes": (
        400, ("long_run.py", "--model", "shape:1b", "--draft-model", "shape:1b:4", "--drafter", "draft-model"),
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
    """Run a benchmark; returns "done", or what became of it."""
    with log.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            return f"took more than {seconds} s"
    return "done" if not code else f"failed with exit code {code}"


def run_all(commands: Mapping[str, tuple[Sequence[str], int]], logs: Path, again: bool) -> dict[str, str]:
    """Run benchmarks by name. One whose log says that it was done is not run again, unless that is asked for."""
    logs.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, (command, seconds) in commands.items():
        log, mark = logs / f"{name}.log", logs / f"{name}.done"
        if mark.exists() and not again:
            found[name] = "done before"
            continue
        start = time.monotonic()
        found[name] = run(command, seconds, log)
        if found[name] == "done":
            mark.touch()
        print(f"{name}: {found[name]}, {time.monotonic() - start:.0f} s, {log}", flush=True)
    return found


def main() -> int:
    """0 if every benchmark was done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", required=True, help="folder of results/ for this card, h100 for instance, or a path")
    parser.add_argument("--questions", type=Path, help="Spec-Bench; without it what needs real text is left out")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), help="these, in the order above")
    parser.add_argument("--logs", type=Path, default=Path("bench-logs"), help="folder of outputs")
    parser.add_argument("--again", action="store_true", help="also what was done before")
    args = parser.parse_args()
    commands, left = {}, []
    for name, (seconds, _) in BENCHMARKS.items():
        if args.only and name not in args.only:
            continue
        try:
            commands[name] = arguments_of(name, args.out, args.questions), seconds
        except ValueError as error:
            left.append(str(error))
    found = run_all(commands, args.logs, args.again)
    print(
        "\n".join(
            [*card_rows(HERE / "results" / args.out), *left, *(f"{name}: {what}" for name, what in found.items())]
        )
    )
    return int(any(not what.startswith("done") for what in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
