"""The memory estimate, and the refusal of what cannot fit."""

from pathlib import Path

import pytest

from pad_engine.errors import ModelError
from pad_engine.models import memory
from pad_engine.models.memory import Estimate, available_memory, check, estimate

NUMBERS = {
    "weights": 4 * 134_515_008,
    "kv_rows": [8192] * 30,
    "num_kv_heads": 3,
    "head_dim": 64,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_rows": 128,
    "scratch_rows": 64,
    "logit_rows": 64,
    "kv_bytes": 4,
}


def test_estimate_counts_every_part() -> None:
    got = estimate(**NUMBERS)
    assert got.weights == 538_060_032
    assert got.kv_cache == 30 * 8192 * 2 * 3 * 64 * 4
    assert got.scratch == 30 * 64 * 2 * 3 * 64 * 4 + 128 * 4 * (4 * 576 + 2 * 1536) + 64 * 49152 * 4
    assert got.total == got.weights + got.kv_cache + got.scratch
    assert estimate(**NUMBERS, matrix=1000).scratch == got.scratch + 1000
    assert estimate(**(NUMBERS | {"sequences": 3})).kv_cache == 3 * got.kv_cache
    assert estimate(**(NUMBERS | {"kv_rows": [512] * 29 + [8192]})).kv_cache < got.kv_cache / 8


def test_text_is_one_line() -> None:
    text = str(Estimate(1_500_000_000, 200_000_000, 3_000_000))
    assert text == "memory: 1.70 GB (weights 1.50 GB, KV cache 200 MB, scratch 3 MB)"


def test_what_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1_000_000_000)
    check(Estimate(1_000_000_000, 0, 0), "cpu")
    with pytest.raises(ModelError, match=r"1\.20 GB needed on cpu, 1\.00 GB available"):
        check(Estimate(1_000_000_000, 200_000_000, 0), "cpu")
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    check(Estimate(10**15, 0, 0), "cpu")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_available_is_the_least_of_system_and_cgroups(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    assert available_memory(proc, cgroups) is None
    write(proc / "meminfo", "MemTotal: 9000000 kB\nMemAvailable:    8000000 kB\n")
    assert available_memory(proc, cgroups) == 8_192_000_000
    write(proc / "self" / "cgroup", "0::/user/job\n")
    write(cgroups / "user" / "job" / "memory.max", "max\n")
    assert available_memory(proc, cgroups) == 8_192_000_000
    # the limit of a group around ours counts; its file pages can be given back
    write(cgroups / "user" / "memory.max", "5000000000\n")
    write(cgroups / "user" / "memory.current", "3000000000\n")
    write(cgroups / "user" / "memory.stat", "anon 1\ninactive_file 1000000000\n")
    assert available_memory(proc, cgroups) == 3_000_000_000


def test_first_version_of_cgroups(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "self" / "cgroup", "5:cpu,cpuacct:/\n4:memory:/docker/x\n")
    write(cgroups / "memory" / "memory.limit_in_bytes", "2000\n")
    write(cgroups / "memory" / "memory.usage_in_bytes", "1500\n")
    write(cgroups / "memory" / "memory.stat", "total_inactive_file 100\n")
    assert available_memory(proc, cgroups) == 600


def test_this_machine_has_some_memory() -> None:
    available = available_memory()
    assert available is None or available > 10_000_000
