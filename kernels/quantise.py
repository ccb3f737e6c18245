"""Weights of one byte: each row of a matrix as whole numbers or 8-bit floats, times a scale of its own.

Symmetric and by the row's largest magnitude, so that a product's sum is scaled once, behind the reduction, and a kernel
reads half the bytes of bf16. Both types are exact in bf16, fp16 and fp32: what is lost is lost here and nowhere else.
Next to read: linear.py, which multiplies with such weights, and row_tiles.py for the kernels.
"""

import torch
from torch import Tensor

QUANTISED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
NAMES = {dtype: name for name, dtype in QUANTISED.items()}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
ROWS = 4096  # of a matrix at a time, so that the fp32 copies stay small beside it


def quantise(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """weight: `[M, K]` in any float type; dtype: one of QUANTISED.

    Returns the quantised weight `[M, K]`, rounded to nearest, ties to even, and its scales fp32 `[M]`: a row's largest
    magnitude over the type's. A row of zeros, or below what a normal scale can tell from them, becomes zeros of scale
    1. A row with a number that is not finite has a scale that is not.
    """
    quantised = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scales = torch.empty(len(weight), device=weight.device)
    for rows, out, scale in zip(weight.split(ROWS), quantised.split(ROWS), scales.split(ROWS), strict=True):
        exact = rows.float()
        torch.div(exact.abs().amax(1), LARGEST[dtype], out=scale)
        scale.masked_fill_(scale < torch.finfo(torch.float32).tiny, 1.0)
        exact = exact / scale[:, None]
        out.copy_(exact.round_() if dtype == torch.int8 else exact)
    return quantised, scales


def dequantise(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights that a quantised `[M, K]` and its scales fp32 `[M]` stand for, each rounded once to dtype."""
    return weight.to(dtype).mul_(scale[:, None])
