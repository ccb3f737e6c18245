"""A benchmark that is stopped keeps what it has measured, and the next one measures the rest."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benches import bench_module

resume = bench_module("resume")


def parts(called: list[str], stop: bool = False) -> dict[tuple[str, ...], Callable[[dict[str, Any]], Any]]:
    """Three parts, of which the last reads the first, and may fail."""

    def last(found: dict[str, Any]) -> float:
        called.append("last")
        if stop:
            raise RuntimeError("stopped")
        return found["first"] + 0.5

    def counted(name: str, value: int) -> Callable[[dict[str, Any]], int]:
        def measure(_: dict[str, Any]) -> int:
            called.append(name)
            return value

        return measure

    return {("first",): counted("first", 1), ("all", "second"): counted("second", 2), ("all", "last"): last}


def test_a_stopped_run_is_gone_on_with(tmp_path: Path) -> None:
    called: list[str] = []
    with pytest.raises(RuntimeError, match="stopped"):
        resume.measure_parts("x", {"model": "m"}, parts(called, stop=True), str(tmp_path))
    kept = json.loads((tmp_path / "x.json").read_text())
    assert (kept["model"], kept["first"], kept["all"], kept["unfinished"]) == ("m", 1, {"second": 2}, ["all/last"])
    called.clear()
    found = resume.measure_parts("x", {"model": "m"}, parts(called), str(tmp_path))
    assert called == ["last"] and found == {"model": "m", "first": 1, "all": {"second": 2, "last": 1.5}}
    whole = json.loads((tmp_path / "x.json").read_text())
    assert "unfinished" not in whole and whole["all"] == found["all"]
    # a file that is whole is measured anew
    resume.measure_parts("x", {"model": "m"}, parts(called), str(tmp_path))
    assert called == ["last", "first", "second", "last"]


@pytest.mark.parametrize("changed", ["commit", "card", "command"])
def test_what_was_measured_otherwise_is_measured_again(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError):
        resume.measure_parts("x", {}, parts([], stop=True), str(tmp_path))
    if changed == "command":
        monkeypatch.setattr(resume.harness, "command", lambda: "python bench/x.py --more")
    else:
        machine = resume.harness.environment() | {changed: "another"}
        monkeypatch.setattr(resume.harness, "environment", lambda: machine)
    called: list[str] = []
    resume.measure_parts("x", {}, parts(called), str(tmp_path))
    assert called == ["first", "second", "last"]


def test_a_file_that_is_cut_off_is_none(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"command": "pyth')
    assert resume.measure_parts("x", {}, parts([]), str(tmp_path))["all"] == {"second": 2, "last": 1.5}
