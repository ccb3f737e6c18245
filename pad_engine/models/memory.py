"""What a run will need in memory, from plain numbers, and whether the machine has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pad_engine.errors import ModelError


@dataclass(frozen=True)
class Estimate:
    """Bytes by purpose."""

    weights: int
    kv_cache: int
    scratch: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.scratch

    def __str__(self) -> str:
        parts = f"weights {_size(self.weights)}, KV cache {_size(self.kv_cache)}, scratch {_size(self.scratch)}"
        return f"memory: {_size(self.total)} ({parts})"


def estimate(
    *,
    weights: int,
    matrix: int = 0,
    kv_rows: Sequence[int],
    num_kv_heads: int,
    head_dim: int,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    max_rows: int,
    scratch_rows: int,
    logit_rows: int,
    kv_bytes: int,
    sequences: int = 1,
) -> Estimate:
    """Bytes of weights, KV cache and the buffers of one forward.

    weights: bytes of all. matrix: bytes of the largest one that is written out for its product. kv_rows: slots of each
    layer (its window on sliding layers), one sequence. max_rows: rows of the largest forward (a prefill chunk, or the
    tree). scratch_rows: those that the cache holds besides. logit_rows: rows that get logits at once. kv_bytes: bytes
    an element. Logits and the widest activations count as fp32.
    """
    row = 2 * num_kv_heads * head_dim * kv_bytes
    activations = max_rows * 4 * (4 * hidden_size + 2 * intermediate_size)
    return Estimate(
        weights=weights,
        kv_cache=sequences * row * sum(kv_rows),
        scratch=row * scratch_rows * len(kv_rows) + activations + 4 * logit_rows * vocab_size + matrix,
    )


def check(need: Estimate, device: torch.device | str) -> None:
    """ModelError, with need and available, when `need` cannot fit on `device`. Passes where the size is unknown."""
    device = torch.device(device)
    if device.type == "cuda":
        available: int | None = torch.cuda.mem_get_info(device)[0]
    else:
        available = available_memory()
    if available is not None and need.total > available:
        raise ModelError(
            f"{_size(need.total)} needed on {device}, {_size(available)} available ({need})",
            "choose a smaller max_length, bfloat16, int8 weights, or a smaller model",
        )


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process can still take on the CPU side, or None where the system does not say."""
    values = [value for value in (_mem_available(proc), _cgroup_room(proc, cgroups)) if value is not None]
    return min(values) if values else None


def _mem_available(proc: Path) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_room(proc: Path, cgroups: Path) -> int | None:
    """The least room of our cgroup and those around it, version 2 or 1; None without a limit."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    rooms: list[int] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # inside a container the path may be the host's, so the root counts too
        folders = [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
        rooms += [room for folder in folders if (room := _room(folder, *names)) is not None]
    return min(rooms) if rooms else None


def _room(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    try:
        limit, usage = (folder / limit_name).read_text().strip(), int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # the kernel gives file pages back before it fails
    return None if limit == "max" else max(0, int(limit) - usage + int(stat.get(cache_name, 0)))


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
