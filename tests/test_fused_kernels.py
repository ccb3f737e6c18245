"""The products, norms and ends of a fused pass equal their references, at every padded number of rows."""

from dataclasses import replace

import pytest
import torch
import triton
from launches import (
    CUDA,
    DEVICE,
    EPS,
    MODES,
    assert_rows_close,
    bits,
    cases,
    ints,
    nans,
    normal,
    normed_input,
    repeat,
)
from torch import Tensor

from pad_engine.kernels.embed_rows import embed_rows, embed_rows_ref
from pad_engine.kernels.gated_act import ACTIVATIONS
from pad_engine.kernels.linear_residual import linear_residual, linear_residual_ref
from pad_engine.kernels.norm_gated import norm_gated, norm_gated_ref
from pad_engine.kernels.norm_linear import norm_linear, norm_linear_ref
from pad_engine.kernels.post_norm import post_norm, post_norm_ref
from pad_engine.kernels.row_tiles import OFF
from pad_engine.kernels.tuning import TileConfig

# M, K, and how they are cut: by whole tiles, by none that divides, by splits of which the last has less work or none
SHAPES = [
    (96, 64, TileConfig(32, 32)),
    (70, 50, TileConfig(32, 32, split_k=3)),
    (40, 112, TileConfig(16, 16, split_k=3, group=8)),
    (144, 576, TileConfig(64, 64, split_k=3)),
    (40, 112, TileConfig(16, 128, lanes=4)),
    (70, 200, TileConfig(32, 64, split_k=2, lanes=2)),
]
if CUDA:
    SHAPES += [
        (576, 1536, TileConfig(16, 128, split_k=4, stages=1)),
        (960, 576, TileConfig(16, 64, split_k=2, stages=2, warps=8)),
        (576, 1536, TileConfig(32, 128, split_k=2, stages=4, prefetch=256)),
        (1000, 584, TileConfig(64, 64, stages=3, prefetch=512)),
        (576, 1536, TileConfig(16, 2048, warps=8, lanes=8, prefetch=1024)),
        (960, 576, TileConfig(16, 1024, warps=4, lanes=8)),
        (1000, 4096, TileConfig(32, 512, split_k=2, warps=8, lanes=4)),
    ]
GATED_SHAPES = [
    (48, 64, TileConfig(16, 32)),
    (35, 50, TileConfig(8, 32, stages=1, group=8)),
    (35, 112, TileConfig(8, 128, lanes=4)),
]
if CUDA:
    GATED_SHAPES += [
        (1536, 576, TileConfig(32, 64, stages=2)),
        (100, 1152, TileConfig(16, 128, stages=4, prefetch=256)),
        (1536, 576, TileConfig(8, 1024, warps=8, lanes=8)),
    ]
SHARED = 227 * 1024  # bytes of an H100's core that a program may have
WIDTHS = [(96, 32), (70, 16), (576, 64)]  # of a hidden state, and of its tiles
Shape = tuple[int, int, TileConfig]


def fitting(config: TileConfig, rows: int, dtype: torch.dtype) -> TileConfig:
    """With narrower steps where all lanes of one would not fit: those that were measured are of 16 rows in bf16."""
    while config.lanes > 1 and (2 * config.block + rows) * config.block_k * dtype.itemsize > SHARED:
        config = replace(config, block_k=config.block_k // 2)
    return config


@pytest.mark.parametrize(("rows", "dtype", "shape", "plain", "pdl"), cases(SHAPES, [True, False], MODES), ids=str)
def test_norm_linear(rows: int, dtype: torch.dtype, shape: Shape, plain: bool, pdl: int) -> None:
    m, k, config = shape
    config = replace(config, split_k=1) if rows == 1 else fitting(config, rows, dtype)
    # Gemma's norms are fp32 whatever the model's type
    h, norm, normed, squares = normed_input(rows, k, dtype, dtype if plain else torch.float32)
    weight = normal(m, k, dtype=dtype)
    bias, scale = (None, None) if plain else (normal(m, dtype=dtype) * 8, normal(m))
    y, parts = nans(rows, m, dtype=dtype), nans(config.split_k * m * rows)
    tickets = ints([0] * triton.cdiv(m, config.block))
    arguments = (h, norm, normed, squares, weight, bias, scale, y, parts, tickets, EPS, config, pdl)
    repeat(lambda: norm_linear(*arguments), y, tickets)
    assert_rows_close(y, norm_linear_ref(h, norm, weight, bias, scale, EPS), dtype)
    assert not tickets.any()


@pytest.mark.parametrize(
    ("rows", "dtype", "shape", "act", "pdl"), cases(GATED_SHAPES, list(ACTIVATIONS), MODES), ids=str
)
def test_norm_gated(rows: int, dtype: torch.dtype, shape: Shape, act: str, pdl: int) -> None:
    inner, k, config = shape
    config = fitting(config, rows, dtype)
    h, norm, normed, squares = normed_input(rows, k, dtype, dtype)
    weight = normal(2 * inner, k, dtype=dtype) / k**0.5
    bias, scale = (None, None) if inner == 48 else (normal(2 * inner, dtype=dtype), normal(2 * inner))
    y = nans(rows, inner, dtype=dtype)
    arguments = (h, norm, normed, squares, weight, bias, scale, y, EPS, act, config, pdl)
    repeat(lambda: norm_gated(*arguments), y)
    assert_rows_close(y, norm_gated_ref(h, norm, weight, bias, scale, EPS, act), dtype)


@pytest.mark.parametrize(("rows", "dtype", "shape", "add", "pdl"), cases(SHAPES, [True, False], MODES), ids=str)
def test_linear_residual(rows: int, dtype: torch.dtype, shape: Shape, add: bool, pdl: int) -> None:
    m, k, config = shape
    config = fitting(config, rows, dtype)
    x, weight = normal(rows, k, dtype=dtype), normal(m, k, dtype=dtype) / k**0.5
    # the engine adds where the next norm follows at once, and writes where a norm behind the block comes first
    norm = (torch.rand(m) + 0.5).to(DEVICE, torch.float32 if rows == 16 else dtype) if add else None
    bias, scale = (normal(m, dtype=dtype), normal(m)) if rows in (1, 32) else (None, None)
    h = normal(rows, m, dtype=dtype) if add else nans(rows, m, dtype=dtype)
    expected, _, _ = linear_residual_ref(x, weight, bias, scale, h if add else None, norm)
    tiles = triton.cdiv(m, config.block)
    normed, squares = nans(rows, m, dtype=dtype), nans(tiles, rows)
    parts, tickets = nans(config.split_k * m * rows), ints([0] * tiles)

    def launch() -> None:
        linear_residual(x, weight, bias, scale, h, norm, normed, squares, parts, tickets, config, pdl, add=add)

    repeat(launch, h, normed, squares, tickets)
    assert_rows_close(h, expected, dtype)
    assert not tickets.any()
    assert_left_behind(h, norm, normed, squares, config.block)


def assert_left_behind(h: Tensor, norm: Tensor | None, normed: Tensor, squares: Tensor, block: int) -> None:
    """What the next norm needs of a hidden state belongs to the very state that was stored; nothing else is written."""
    if norm is None or len(h) == 1:
        assert normed.isnan().all()
    else:
        assert torch.equal(bits(normed), bits((h.float() * norm.float()).to(h.dtype)))
    if norm is not None and len(h) == 1:
        assert squares.isnan().all()
    else:
        sums = torch.stack([tile.float().square().sum(1) for tile in h.split(block, dim=1)])
        torch.testing.assert_close(squares, sums, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("rows", "dtype", "width", "pdl"), cases(WIDTHS, MODES), ids=str)
def test_post_norm(rows: int, dtype: torch.dtype, width: tuple[int, int], pdl: int) -> None:
    m, block = width
    y, h = normal(rows, m, dtype=dtype), normal(rows, m, dtype=dtype)
    weight, norm = ((torch.rand(m) + 0.5).to(DEVICE) for _ in range(2))
    # the producer's tiles are not this kernel's
    own = torch.stack([part.float().square().sum(1) for part in y.tensor_split([5, 11, m // 2], dim=1)])
    whole = y.float() * torch.rsqrt(y.float().square().mean(-1, keepdim=True) + EPS) * weight
    expected = post_norm_ref(y, own, weight, h, EPS)
    assert_rows_close(expected, h.float() + whole, dtype)
    normed, squares = nans(rows, m, dtype=dtype), nans(triton.cdiv(m, block), rows)
    repeat(lambda: post_norm(y, own, weight, h, norm, normed, squares, EPS, block, pdl), h, normed, squares)
    assert_rows_close(h, expected, dtype)
    assert_left_behind(h, norm, normed, squares, block)


@pytest.mark.parametrize(
    ("rows", "dtype", "width", "scale", "pdl"), cases(WIDTHS, [None, 6.9375], [OFF, *MODES]), ids=str
)
def test_embed_rows(rows: int, dtype: torch.dtype, width: tuple[int, int], scale: float | None, pdl: int) -> None:
    m, block = width
    table, norm, token = normal(50, m, dtype=dtype), normal(m), ints(torch.randint(50, (rows,)))
    h, normed, squares = nans(rows, m, dtype=dtype), nans(rows, m, dtype=dtype), nans(triton.cdiv(m, block), rows)
    repeat(lambda: embed_rows(token, table, scale, h, norm, normed, squares, block, pdl), h, normed, squares)
    assert torch.equal(h, embed_rows_ref(token, table, scale))
    assert_left_behind(h, norm, normed, squares, block)
