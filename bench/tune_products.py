"""The products' part of tune.py: which there are in a pass, and the launch parameters that may be good for them."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from shapes import shape_config
from torch import Tensor

from pad_engine.kernels import tuning
from pad_engine.kernels.quantise import QUANTISED
from pad_engine.kernels.tuning import TileConfig

OPS = ("qkv", "out", "gate_up", "down", "lm_head")
SHARED = 227 * 1024  # bytes of a multiprocessor's shared memory that a program may have


@dataclass(frozen=True)
class Product:
    """One product of a pass: weights `[m, k]`, `rows` rows. quantised: the weights' type of one byte, or None."""

    op: str
    rows: int
    m: int
    k: int
    quantised: torch.dtype | None = None

    @property
    def item(self) -> int:
        """Bytes of a weight."""
        return 2 if self.quantised is None else 1

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return self.m * self.k * self.item

    def random_weight(self) -> Tensor:
        """Weights on the card, of a size that their type holds well."""
        weight = torch.randn(self.m, self.k, dtype=torch.bfloat16, device="cuda")
        return weight if self.quantised is None else (16 * weight).to(self.quantised)


def products(shape: str, rows: int, weights: str = "bf16") -> list[Product]:
    """The five products of a shape. weights: bf16, int8 or fp8."""
    c = shape_config(shape, 4096)
    heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    sizes = {
        "qkv": (heads, c.hidden_size),
        "out": (c.hidden_size, c.num_heads * c.head_dim),
        "gate_up": (2 * c.intermediate_size, c.hidden_size),
        "down": (c.hidden_size, c.intermediate_size),
        "lm_head": (c.vocab_size, c.hidden_size),
    }
    return [Product(op, rows, *sizes[op], QUANTISED.get(weights)) for op in OPS]


def candidates(product: Product) -> Iterator[TileConfig]:
    """Parameters that may be good: enough bytes in flight, enough programs, and not too many registers."""
    return one_row(product) if product.rows == 1 else many_rows(product)


def one_row(product: Product) -> Iterator[TileConfig]:
    halves = 2 if product.op == "gate_up" else 1
    persistent = (4, 8, 16) if product.op == "lm_head" else (1,)
    for block, block_k, warps, unroll, per_core in itertools.product(
        (1, 2, 4, 8, 16), (256, 512, 1024, 2048), (1, 2, 4, 8), (1, 4), persistent
    ):
        per_thread = halves * block * block_k // (32 * warps)
        steps = -(-product.k // block_k)
        # in registers: the LM head has running bests besides
        fits = (32 if product.op == "lm_head" else 16) <= per_thread <= 64 and per_thread * unroll <= 128
        useful = block_k < 2 * tuning.next_power(product.k) and (unroll == 1 or steps > unroll // 2)
        if fits and useful and per_core * warps <= 48:
            yield TileConfig(block, block_k, stages=unroll, warps=warps, per_core=per_core, group=8)


def many_rows(product: Product) -> Iterator[TileConfig]:
    halves = 2 if product.op == "gate_up" else 1
    persistent = (1, 2) if product.op == "lm_head" else (1,)
    for block, block_k, split_k, stages, warps, per_core in itertools.product(
        (16, 32, 64, 128), (64, 128, 256, 512), (1, 2, 4, 8), (2, 3, 4, 6), (4, 8), persistent
    ):
        tile_rows = halves * block
        shared = shared_bytes(product, tile_rows, block_k, stages - 1)
        programs = product.m // tile_rows * split_k
        steps = -(-product.k // (block_k * split_k))
        # a short reduction lies in the pipeline whole; a long one needs it deep
        deep = shared >= 32 * 1024 and stages > 2 if product.k > 2048 else shared >= 16 * 1024 and stages <= 4
        fits = deep and shared <= SHARED // per_core
        enough = product.op == "lm_head" or 60 <= programs <= 600
        whole = product.op not in ("gate_up", "lm_head") or split_k == 1
        # bytes need tiles that a whole warp group multiplies
        high = (16 if product.quantised is None else 64) <= tile_rows <= 128 and (warps == 4 or tile_rows == 128)
        if fits and enough and whole and stages <= steps + 1 and high:
            yield TileConfig(block, block_k, split_k, stages, warps, per_core)


def shared_bytes(product: Product, tile_rows: int, block_k: int, steps: int) -> int:
    """Of shared memory for so many steps of weights and rows; beside weights of one byte the rows lie there once more,
    by their places in a word."""
    again = 0 if product.quantised is None else product.rows * 2 * block_k
    return (tile_rows * product.item + product.rows * 2) * block_k * steps + again


def with_prefetch(product: Product, config: TileConfig) -> Iterator[TileConfig]:
    """The same with weights asked for ahead of the wait."""
    tile_rows = config.block * (2 if product.op == "gate_up" else 1)
    segments = max(1, 32 * config.warps // tile_rows)
    for columns in (256, 512, 1024, 2048, 4096):
        if columns < 2 * product.k // config.split_k and columns * product.item >= 16 * segments:
            yield replace(config, prefetch=columns)


def near_tiles(product: Product, tile: TileConfig) -> Iterator[TileConfig]:
    """Parameters of which one is another, or two that make up for each other, and for a layer's product steps in lanes
    where there are none."""
    head = product.op == "lm_head"
    fields = ("block", "block_k", "split_k", "warps", *(["per_core"] if head else []))
    found = [replace(tile, **{field: 2 * getattr(tile, field)}) for field in fields]
    found += [replace(tile, **{field: getattr(tile, field) // 2}) for field in fields]
    for one, other in (("block", "block_k"), ("block", "split_k"), ("block", "warps"), ("block_k", "split_k")):
        for up, down in ((one, other), (other, one)):
            found.append(replace(tile, **{up: 2 * getattr(tile, up), down: getattr(tile, down) // 2}))
    if tile.lanes == 1:
        found += [replace(tile, stages=stages) for stages in (tile.stages - 1, tile.stages + 1, 2 * tile.stages)]
    found += [replace(tile, group=9 - tile.group)] if product.rows == 1 else []
    found += lane_tiles(product) if product.rows > 1 and tile.lanes == 1 and not head else []
    found += [replace(tile, prefetch=0), *with_prefetch(product, tile)]
    tried = {tile}
    for one in found:
        if sound(product, one) and one not in tried:
            tried.add(one)
            yield one


def lane_tiles(product: Product) -> Iterator[TileConfig]:
    """Steps that take most of the reduction, with as many lanes as warps."""
    halves = 2 if product.op == "gate_up" else 1
    for rows, block_k, split_k, warps in itertools.product((16, 32), (512, 1024, 2048), (1, 2, 4), (4, 8)):
        if block_k * split_k * 4 >= product.k and (split_k == 1 or product.k > 2048):
            yield TileConfig(rows // halves, block_k, split_k, stages=1, warps=warps, lanes=warps)


def sound(product: Product, tile: TileConfig) -> bool:
    """Whether the kernels take these parameters, as far as can be known without compiling."""
    if min(tile.block, tile.block_k, tile.split_k, tile.warps, tile.per_core) < 1 or tile.warps > 8:
        return False
    if tile.per_core * tile.warps > 48:
        return False
    if tile.prefetch and tile not in with_prefetch(product, replace(tile, prefetch=0)):
        return False
    halves, widest = 2 if product.op == "gate_up" else 1, 2 * tuning.next_power(product.k)
    if tile.block_k * tile.split_k >= widest:
        return False
    if product.rows == 1:
        per_thread = halves * tile.block * tile.block_k // (32 * tile.warps)
        return tile.split_k == 1 and tile.stages in (1, 2, 4) and per_thread >= 8 and per_thread * tile.stages <= 128
    splits, held = 1 if product.op in ("gate_up", "lm_head") else 8, tile.stages - 1
    if tile.lanes > 1:
        held = 1
        per_thread = halves * tile.block * tile.block_k // (32 * tile.warps)
        steps = -(-product.k // (tile.block_k * tile.split_k))
        if per_thread > 128 or tile.block_k < 32 * tile.lanes or steps > 4:
            return False
    shared = shared_bytes(product, halves * tile.block, tile.block_k, held)
    fits = held > 0 and shared <= SHARED // tile.per_core and halves * tile.block <= 128
    return fits and halves * tile.block >= 16 and tile.block_k >= 64 and tile.split_k <= splits
