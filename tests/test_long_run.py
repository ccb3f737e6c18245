"""bench/long_run.py: what it says of memory, acceptance and the card is what there was."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benches import bench_module

bench = bench_module("long_run")


def test_a_shape_runs_long_with_the_acceptance_that_was_asked_for(tmp_path: Path) -> None:
    arguments = ["--model", "shape:tiny", "--draft-model", "shape:tiny", "--drafter", "draft-model", "--device", "cpu"]
    sizes = ["--requests", "10", "--request-tokens", "14", "--tokens", "80", "--dtype", "float32"]
    bench.main([*arguments, *sizes, "--out", str(tmp_path)])
    found: dict[str, Any] = json.loads((tmp_path / "long-shape-tiny-draft-model.json").read_text())
    requests, answer = found["requests"]["tenths"], found["answer"]["tenths"]
    assert [one["tokens"] for one in requests] == [14] * 10
    assert sum(one["tokens"] for one in answer) == 80 and len(answer) == 10
    # 3.5 tokens a round; a tenth of the answer has a round more or less
    assert all(one["mean_accept_length"] == 2.5 and one["ms_per_token"] > 0 for one in requests)
    assert all(2 <= one["mean_accept_length"] <= 3 for one in answer)
    assert set(found["card"]) == {"start", "middle", "end"}
    assert found["requests"]["growth_mb"].keys() == requests[0]["memory_mb"].keys() >= {"host", "host_peak"}


def test_growth_leaves_the_first_tenth_out() -> None:
    tenths = [{"memory_mb": {"host": value}} for value in (5.0, 80.0, 81.0, 82.5)]
    assert bench.growth(tenths) == {"host": 2.5}


def test_memory_is_what_the_process_has() -> None:
    before = bench.memory_mb()["host"]
    held = bytearray(64_000_000)
    held[::4096] = b"x" * len(held[::4096])
    assert 50 < bench.memory_mb()["host"] - before < 90
    # the system counts in batches of pages, each thread its own
    now = bench.memory_mb()
    assert now["host_peak"] >= now["host"] - 10


def test_the_card_is_asked_by_either_name_of_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    def old_driver(query: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if "clocks_event_reasons" in query[1]:
            raise subprocess.CalledProcessError(2, query)
        return subprocess.CompletedProcess(query, 0, "1980 MHz, 2619 MHz, 41, 310.5 W, P0, 0x0000000000000000\n", "")

    monkeypatch.setattr(subprocess, "run", old_driver)
    state = bench.card_state()
    assert state["temperature.gpu"] == "41" and state["clocks_event_reasons.active"] == "0x0000000000000000"

    def none(query: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", none)
    assert bench.card_state() is None


def test_requests_come_in_tenths(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--requests", "15", "--out", "x"])
    assert "multiple of 10, got 15" in capsys.readouterr().err
