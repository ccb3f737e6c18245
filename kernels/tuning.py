"""Launch parameters: measured ones, from `configs/<card>.json` (bench/tune.py writes it), or a rule that always works.

Nothing is tuned while a request runs: a table look-up when a graph is captured, and no more.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from pad_engine.kernels.quantise import NAMES

CONFIGS = Path(__file__).parent / "configs"
# tokens; a cache with room for more has launch parameters of its own, where they were measured: what is best for its
# tens of thousands of keys costs a little at a few hundred
LONG_CONTEXT = 16_384
# cards with the H100's chip beside other memory
HOPPER, MEASURED_HOPPER = ("nvidia-h100", "nvidia-h200", "nvidia-gh200"), "nvidia-h100-80gb-hbm3"


@dataclass(frozen=True)
class TileConfig:
    """block: output columns of a program. block_k: elements of the reduction a step. split_k: programs that share one
    reduction. stages: depth of the software pipeline; at one row, of the unrolling. warps: of a program. per_core:
    programs that the persistent LM head starts on each multiprocessor. prefetch: columns of the weights that a program
    asks for before it waits for its input, 16 bytes a thread at least; rows of K elements are then multiples of 16
    bytes. lanes: parts of a step's columns that warps multiply side by side, for products of several rows whose step is
    most of their reduction (stages then follows from the steps); 1 for a pipeline of steps."""

    block: int
    block_k: int
    split_k: int = 1
    stages: int = 3
    warps: int = 4
    per_core: int = 1
    prefetch: int = 0
    lanes: int = 1
    group: int = 1

    def arguments(self, k: int) -> dict[str, int | bool]:
        """The arguments of a launch over k columns."""
        return {
            "BLOCK": self.block,
            "BLOCK_K": self.block_k,
            "EVEN_K": k % (self.block_k * self.split_k) == 0,
            "SPLIT_K": self.split_k,
            "GROUP": self.group,
            "STAGES": self.stages if self.lanes == 1 else -(-k // (self.block_k * self.split_k)),
            "PREFETCH": self.prefetch,
            "THREADS": 32 * self.warps,
            "num_warps": self.warps,
        }


@dataclass(frozen=True)
class AttentionConfig:
    """splits: programs that share the prefix of one head, a power of two. chunk: keys of the prefix below which one
    more program does not pay. block_s: keys a step. warps: of a program. block_m: queries of a program at most, a power
    of two from 16 on; where there are more of a key's head, so many more programs read its keys. stages: one more than
    the tiles of keys that are on their way by bulk copies; 0 for tiles that come through registers, as those do in
    strict mode, and of heads whose size is no power of two from 32 on. own: whether the rows of a pass of several have
    programs to themselves, beside those that share the prefix; not in strict mode."""

    splits: int
    chunk: int = 256
    block_s: int = 64
    warps: int = 4
    block_m: int = 64
    stages: int = 0
    own: bool = False


def card_name(device: torch.device) -> str:
    """The card's name as a file name: `nvidia-h100-80gb-hbm3`; `cpu` where there is none."""
    if device.type != "cuda":
        return device.type
    return torch.cuda.get_device_name(device).lower().replace(" ", "-").replace("/", "-")


@cache
def table(card: str) -> dict[str, dict[str, Any]]:
    """The measured parameters of a card, by `op/rows/MxK`, the same with `/int8` or `/fp8`, `attention/rows/HxH_kvxD`,
    and the same with `/long`; empty for a card that nobody has measured, unless its chip is one that somebody has."""
    path = CONFIGS / f"{card}.json"
    if not path.is_file() and card.startswith(HOPPER):
        path = CONFIGS / f"{MEASURED_HOPPER}.json"
    tuned: dict[str, dict[str, Any]] = json.loads(path.read_text())["parameters"] if path.is_file() else {}
    return tuned


def key(op: str, rows: int, m: int, k: int, dtype: torch.dtype) -> str:
    """The name of a launch in a table. dtype: of the weights, of which those of two bytes share a name."""
    name = f"{op}/{rows}/{m}x{k}"
    return f"{name}/{NAMES[dtype]}" if dtype in NAMES else name


def tuned_for(device: torch.device, rows: int, name: Callable[[int], str]) -> dict[str, Any] | None:
    """The measured parameters of this card for a pass of so many rows, or where nobody has measured 32 those for 64,
    which have room for fewer. name: the key of a number of rows."""
    tuned = table(card_name(device))
    return tuned.get(name(rows), tuned.get(name(64)) if rows == 32 else None)


def tile_config(op: str, rows: int, m: int, k: int, device: torch.device, dtype: torch.dtype) -> TileConfig:
    """Parameters of a product of `rows` rows with weights `[m, k]`. op: qkv, out, gate_up, down or lm_head. dtype: of
    the weights, as they are stored. On a CPU the kernels are interpreted, which costs by the program."""
    if device.type == "cpu":
        return TileConfig(block=64, block_k=64, split_k=2 if rows > 1 and op in ("qkv", "out", "down") else 1)
    # what was measured fits weights of two bytes, and may be too large for wider ones
    tuned = None if dtype.itemsize > 2 else tuned_for(device, rows, lambda n: key(op, n, m, k, dtype))
    return TileConfig(**tuned) if tuned else default_config(op, rows, m, k, dtype.itemsize)


def attention_key(rows: int, heads: int, kv_heads: int, head_dim: int, long: bool = False) -> str:
    """The name of an attention launch in a table. long: in a cache of more than LONG_CONTEXT tokens."""
    return f"attention/{rows}/{heads}x{kv_heads}x{head_dim}" + ("/long" if long else "")


def attention_config(
    rows: int, heads: int, kv_heads: int, head_dim: int, device: torch.device, itemsize: int = 2, capacity: int = 0
) -> AttentionConfig:
    """Parameters of the attention of `rows` rows. The number of splits gives two programs a multiprocessor at long
    contexts; how many of them have work at a short one follows from its length. itemsize: bytes of a key's number;
    what was measured is of two. capacity: tokens that the cache has room for."""
    if device.type == "cpu":
        return AttentionConfig(splits=2)  # each program is interpreted, whether or not it has work
    for long in (True, False) if capacity > LONG_CONTEXT else (False,):
        name = partial(attention_key, heads=heads, kv_heads=kv_heads, head_dim=head_dim, long=long)
        tuned = tuned_for(device, rows, name)
        if tuned and itemsize == 2:
            return AttentionConfig(**tuned)
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    splits = min(64, max(4, next_power(2 * cores // kv_heads)))
    return AttentionConfig(splits, 128, *attention_tiles(head_dim, itemsize))


def attention_tiles(head_dim: int, itemsize: int) -> tuple[int, int, int]:
    """Keys a step, warps, and queries a program, whose tiles a thread's registers hold: larger ones spill, and take the
    compiler long in fp32, whose products do not run on the tensor core."""
    size = head_dim * itemsize * (1 if itemsize == 2 else 2)
    if size <= 256:
        return 64, 4, 64
    return (32, 8, 32) if size <= 512 else (16, 8, 16)


def release_key(rows: int, hidden_size: int) -> str:
    """The name of a pass in a table."""
    return f"pass/{rows}/{hidden_size}"


def release_mode(rows: int, hidden_size: int, device: torch.device) -> int:
    """When the kernels of a pass let the next one start (row_tiles.py), for cards that can: measured on whole passes,
    since a kernel alone does not show it."""
    measured = tuned_for(device, rows, lambda n: release_key(n, hidden_size))
    return int(measured["release"]) if measured else 1


def default_config(op: str, rows: int, m: int, k: int, itemsize: int = 2) -> TileConfig:
    """Right for every shape, and near the best for those that were tried. At one row a program takes few columns and
    wide steps; at more, tiles that the tensor core takes, and the reduction is split where columns are few. itemsize:
    bytes of a weight. Those of one take steps of twice the width, so that as many bytes are on their way, unless 64
    rows take the room, and at several rows tiles as high as a whole warp group multiplies, whose bytes stay in
    registers; those of four at several rows half the width, for the same room."""
    wide = 2 if itemsize == 1 and rows < 64 else 1
    if rows == 1:
        width, group = next_power(min(k, 1024 * wide)), 8 if itemsize == 1 else 1
        if op == "lm_head":
            # in registers lie running bests besides
            return TileConfig(block=8 // wide, block_k=width, warps=4, per_core=8, group=group)
        return TileConfig(block=2 if op == "gate_up" else 4, block_k=width, warps=4, group=group)
    block_k = 64 if itemsize > 2 else next(step for step in (128 * wide, 128, 64) if step == 64 or k % step == 0)
    if op == "lm_head":
        return TileConfig(block=64, block_k=block_k, stages=3, warps=4, per_core=2)
    if op == "gate_up":
        return TileConfig(block=32, block_k=block_k, stages=3, warps=4)
    block = 64 if m >= 4096 or itemsize == 1 else 32 if m >= 2048 else 16
    split_k = 1
    if op in ("qkv", "out", "down"):
        while m // block * split_k < 128 and k // (2 * split_k) >= 4 * block_k:
            split_k *= 2
    return TileConfig(block=block, block_k=block_k, split_k=split_k, stages=3, warps=4)


def next_power(n: int) -> int:
    """The smallest power of two that is at least n, and at least 16, the least that a tensor core takes."""
    return max(16, 1 << (n - 1).bit_length())
