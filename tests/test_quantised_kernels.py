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


def tile(rows: int) -> TileConfig:
    return TileConfig(32, 64, split_k=1 if rows == 1 else SPLIT)


@cases
def test_norm_linear(kind: str, rows: int, dtype: torch.dtype) -> None:
    h, norm, normed, squares = normed_input(rows, K, dtype, dtype)
    (weight, scale), bias, config = weights(M, kind), normal(M, dtype=dtype), tile(rows)
    y, parts = nans(rows, M, dtype=dtype), nans(config.split_k * M * rows)
    tickets = ints([0] * triton.cdiv(M, config.block))
    arguments = (h, norm, normed, squares, weight, bias, scale, y, parts, tickets, EPS, config, MODES[0])
    repeat(lambda: norm_linear(*arguments), y, tickets)
    assert_rows_close(y, norm_linear_ref(h, norm, weight, bias, scale, EPS), dtype)


@cases
def test_norm_gated(kind: str, rows: int, dtype: torch.dtype) -> None:
    h, norm, normed, squares = normed_input(rows, K, dtype, dtype)
    (weight, scale), y = weights(2 * M, kind), nans(rows, M, dtype=dtype)
    arguments = (h, norm, normed, squares, weight, None, scale, y, EPS, "silu", TileConfig(16, 64), MODES[0])
    repeat(lambda: norm_gated(*arguments), y)
    assert_rows_close(y, norm_gated_ref(h, norm, weight, None, scale, EPS, "silu"), dtype)


@cases
def test_linear_residual(kind: str, rows: int, dtype: torch.dtype) -> None:
    x, h, norm = normal(rows, K, dtype=dtype), normal(rows, M, dtype=dtype), (torch.rand(M) + 0.5).to(DEVICE, dtype)
    (weight, scale), bias = weights(M, kind), normal(M, dtype=dtype)
    expected, _, _ = linear_residual_ref(x, weight, bias, scale, h, norm)
    config = TileConfig(32, 64, split_k=SPLIT)
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
            scores, ids, logits, num_tokens=131, eps=EPS, softcap=softcap, config=TileConfig(32, 64), pdl=MODES[0],
        )  # fmt: skip

    repeat(launch, scores, ids, logits)
    assert_rows_close(logits, lm_head_ref(h, norm, weight, scale, EPS, softcap), dtype)
    assert torch.equal(scores.amax(0), logits.amax(1))


@cases
def test_every_number_is_taken_exactly(kind: str, rows: int, dtype: torch.dtype) -> None:
    """One column of ones: each sum is a weight itself, of all that the type has."""
    every = torch.arange(256, dtype=torch.uint8).view(QUANTISED[kind])
    every = every[every.float().isfinite()]
    weight = torch.zeros(len(every), 68, dtype=torch.uint8).view(QUANTISED[kind])
    weight[:, 5] = every
    weight = weight.to(DEVICE)
    x = torch.zeros(rows, 68, dtype=dtype, device=DEVICE)
    x[:, 5] = 1.0
    h, normed = nans(rows, len(every), dtype=dtype), nans(rows, len(every), dtype=dtype)
    config = TileConfig(32, 64)
    squares, parts, tickets = nans(triton.cdiv(len(every), 32), rows), nans(1), ints([0] * 8)
    linear_residual(x, weight, None, None, h, None, normed, squares, parts, tickets, config, MODES[0], add=False)
    assert torch.equal(h.float(), every.float().to(DEVICE).expand(rows, -1))
