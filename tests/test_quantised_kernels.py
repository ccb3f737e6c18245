"""The products of a fused pass with weights of one byte equal their references on the same weights."""

from itertools import product

import pytest
import torch
import triton
from launches import CUDA, DEVICE, DTYPES, EPS, MODES, assert_rows_close, ints, nans, normal, normed_input, repeat
from torch import Tensor

from pad_engine.kernels.linear_residual import linear_residual, linear_residual_ref
from pad_engine.kernels.lm_head import lm_head, lm_head_ref
from pad_engine.kernels.norm_gated import norm_gated, norm_gated_ref
from pad_engine.kernels.norm_linear import norm_linear, norm_linear_ref
from pad_engine.kernels.quantise import QUANTISED, quantise
from pad_engine.kernels.tuning import TileConfig

# neither M nor K is whole tiles, and K no more than whole words; a tensor core takes steps of 64 bytes from words
M, K, SPLIT = 70, 148, 3
ROWS = [1, 16, 64] if CUDA else [1, 16]
CASES = list(product(QUANTISED, ROWS, [DTYPES[0], DTYPES[-1]]))
cases = pytest.mark.parametrize(("kind", "rows", "dtype"), CASES, ids=str)


def weights(m: int, kind: str) -> tuple[Tensor, Tensor]:
    """Random rows of very different scales."""
    return quantise(normal(m, K) * torch.logspace(-2, 1, m, device=DEVICE)[:, None] / K**0.5, QUANTISED[kind])


def tile(rows: int, block: int = 32, **more: int) -> TileConfig:
    """One row in groups of eight, as default_config has bytes."""
    return TileConfig(block, 64, group=8 if rows == 1 else 1, **more)


@cases
def test_norm_linear(kind: str, rows: int, dtype: torch.dtype) -> None:
    h, norm, normed, squares = normed_input(rows, K, dtype, dtype)
    (weight, scale), bias = weights(M, kind), normal(M, dtype=dtype)
    config = tile(rows, split_k=1 if rows == 1 else SPLIT)
    y, parts = nans(rows, M, dtype=dtype), nans(config.split_k * M * rows)
    tickets = ints([0] * triton.cdiv(M, config.block))
    arguments = (h, norm, normed, squares, weight, bias, scale, y, parts, tickets, EPS, config, MODES[0])
    repeat(lambda: norm_linear(*arguments), y, tickets)
    assert_rows_close(y, norm_linear_ref(h, norm, weight, bias, scale, EPS), dtype)


@cases
def test_norm_gated(kind: str, rows: int, dtype: torch.dtype) -> None:
    h, norm, normed, squares = normed_input(rows, K, dtype, dtype)
    (weight, scale), y = weights(2 * M, kind), nans(rows, M, dtype=dtype)
    arguments = (h, norm, normed, squares, weight, None, scale, y, EPS, "silu", tile(rows, 16), MODES[0])
    repeat(lambda: norm_gated(*arguments), y)
    assert_rows_close(y, norm_gated_ref(h, norm, weight, None, scale, EPS, "silu"), dtype)


@cases
def test_linear_residual(kind: str, rows: int, dtype: torch.dtype) -> None:
    x, h, norm = normal(rows, K, dtype=dtype), normal(rows, M, dtype=dtype), (torch.rand(M) + 0.5).to(DEVICE, dtype)
    (weight, scale), bias = weights(M, kind), normal(M, dtype=dtype)
    expected, _, _ = linear_residual_ref(x, weight, bias, scale, h, norm)
    config = tile(rows, split_k=SPLIT)
    tiles = triton.cdiv(M, config.block)
    normed, squares = nans(rows, M, dtype=dtype), nans(tiles, rows)
    parts, tickets = nans(config.split_k * M * rows), ints([0] * tiles)
    arguments = (x, weight, bias, scale, h, norm, normed, squares, parts, tickets, config, MODES[0])
    repeat(lambda: linear_residual(*arguments), h, normed, squares, tickets)
    assert_rows_close(h, expected, dtype)


@cases
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_lm_head(kind: str, rows: int, dtype: torch.dtype, softcap: float | None) -> None:
    """Several tiles a program: each takes the scales of its own rows."""
    h, norm, normed, squares = normed_input(rows, K, dtype, dtype)
    weight, scale = weights(131, kind)
    scores, ids, logits = nans(2, rows), ints([[0] * rows] * 2), nans(rows, 131)
    zeros, seed = ints([0] * rows), ints([0], torch.int64)

    def launch() -> None:
        lm_head(
            h, norm, normed, squares, weight, scale, zeros, zeros, zeros[:1], seed, torch.zeros(1, device=DEVICE),
            scores, ids, logits, num_tokens=131, eps=EPS, softcap=softcap, config=tile(rows), pdl=MODES[0],
        )  # fmt: skip

    repeat(launch, scores, ids, logits)
    assert_rows_close(logits, lm_head_ref(h, norm, weight, scale, EPS, softcap), dtype)
    assert torch.equal(scores.amax(0), logits.amax(1))


@cases
@pytest.mark.parametrize("group", [1, 8])
def test_every_number_is_taken_exactly(kind: str, rows: int, dtype: torch.dtype, group: int) -> None:
    """One column of ones: each sum is a weight itself, of all that the type has."""
    every = torch.arange(256, dtype=torch.uint8).view(QUANTISED[kind])
    every = every[every.float().isfinite()]
    weight = torch.zeros(len(every), 68, dtype=torch.uint8).view(QUANTISED[kind])
    weight[:, 5] = every
    weight = weight.to(DEVICE)
    x = torch.zeros(rows, 68, dtype=dtype, device=DEVICE)
    x[:, 5] = 1.0
    h, normed = nans(rows, len(every), dtype=dtype), nans(rows, len(every), dtype=dtype)
    config = TileConfig(32, 64, group=group if rows == 1 else 1)
    squares, parts, tickets = nans(triton.cdiv(len(every), 32), rows), nans(1), ints([0] * 8)
    linear_residual(x, weight, None, None, h, None, normed, squares, parts, tickets, config, MODES[0], add=False)
    assert torch.equal(h.float(), every.float().to(DEVICE).expand(rows, -1))


def product_of(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 `[M]`: x `[1, K]` times weights `[M, K]`, by the kernel."""
    m = len(weight)
    h, normed = nans(1, m, dtype=x.dtype), nans(1, m, dtype=x.dtype)
    squares, parts, tickets = nans(triton.cdiv(m, 32), 1), nans(1), ints([0] * 8)
    linear_residual(x, weight, None, None, h, None, normed, squares, parts, tickets, tile(1), MODES[0], add=False)
    return h[0].float()


@pytest.mark.parametrize("size", [2.0**-120, 2.0**-60, 1.0, 2.0**40])
def test_one_row_of_any_size(size: float) -> None:
    """Beside int8 a row becomes whole numbers, eight neighbours by their largest."""
    weight = weights(M, "int8")[0]
    x = (normal(1, K) * torch.logspace(-4, 4, K // 4, device=DEVICE).repeat_interleave(4) * size).bfloat16()
    x[0, 8:16] = 0.0
    expected = (x.double() @ weight.double().t())[0] / size
    found = product_of(x, weight).double() / size
    assert float((found - expected).norm() / expected.norm()) < 2**-8


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_row_that_is_not_finite(bad: float) -> None:
    weight = weights(M, "int8")[0]
    x = normal(1, K, dtype=torch.bfloat16)
    x[0, 77] = bad
    assert not bool(product_of(x, weight).isfinite().any())
