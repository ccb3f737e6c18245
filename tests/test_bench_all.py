"""One call for all benchmarks of a card: whatever becomes of one, the others are run, and their results are kept."""

import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from benches import BENCH, bench_module

every = bench_module("all")


@pytest.mark.parametrize("name", every.BENCHMARKS)
def test_every_benchmark_is_a_script_that_takes_its_options(name: str) -> None:
    _, script, *options = every.arguments_of(name, "h100", Path("questions.jsonl"))
    source = Path(script).read_text(encoding="utf-8")
    assert Path(script).parent == BENCH
    assert [option for option in options if option.startswith("--") and f'"{option}"' not in source] == []
    assert options[-2:] == ["--out", "h100"] and every.TEXT not in options


def test_text_is_needed_where_it_is_read() -> None:
    with pytest.raises(ValueError, match="groups needs --questions"):
        every.arguments_of("groups", "h100", None)


def test_one_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    def python(code: str, seconds: int = 60) -> tuple[list[str], int]:
        return [sys.executable, "-c", code], seconds

    count = tmp_path / "count"
    commands = {
        "broken": python("print('reason'); raise SystemExit(3)"),
        "slow": python("import time; time.sleep(60)", 1),
        "good": python(f"open({str(count)!r}, 'a').write('x')"),
    }
    first = every.run_all(commands, tmp_path / "logs", again=False)
    assert first == {"broken": "failed with exit code 3", "slow": "took more than 1 s", "good": "done"}
    assert (tmp_path / "logs" / "broken.log").read_text() == "reason\n"
    assert every.run_all({"good": commands["good"]}, tmp_path / "logs", again=False) == {"good": "done before"}
    assert count.read_text() == "x"
    every.run_all({"good": commands["good"]}, tmp_path / "logs", again=True)
    assert count.read_text() == "xx"


def test_none_is_started_when_the_time_is_over(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    commands = {name: ([sys.executable, "-c", "import time; time.sleep(0.3)"], 60) for name in ("first", "second")}
    assert every.run_all(commands, logs, False, minutes=0.2 / 60) == {"first": "done", "second": "not started"}
    assert every.run_all(commands, logs, False, minutes=0.2 / 60) == {"first": "done before", "second": "done"}


def test_nothing_that_a_benchmark_starts_outlives_its_limit(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = f"""
import subprocess, sys
process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(child)!r}, "w").write(str(process.pid))
process.wait()
"""
    assert every.run([sys.executable, "-c", code], 3, tmp_path / "log") == "took more than 3 s"
    state = Path(f"/proc/{child.read_text()}/stat")

    def is_over() -> bool:
        with suppress(FileNotFoundError, ProcessLookupError):
            return state.read_text().rpartition(")")[2].split()[0] == "Z"
        return True

    # a killed process may need a moment on a busy machine, though much less than the minute it would have slept
    end = time.monotonic() + 20
    while not is_over() and time.monotonic() < end:
        time.sleep(0.05)
    assert is_over()


def test_the_summary_has_figures_and_outcomes(tmp_path: Path) -> None:
    text = every.summary({"step": "done", "tail": "not started"}, ["peers needs --questions"], tmp_path / "none")
    assert text.splitlines()[-3:] == ["peers needs --questions", "step: done", "tail: not started"]
    rows = every.summary({}, [], BENCH / "results" / "h100").splitlines()
    assert any(row.startswith("| h100 | plain step, 8B shape |") for row in rows)
