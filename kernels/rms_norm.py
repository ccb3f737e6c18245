"""Root-mean-square norm (Zhang and Sennrich 2019, equation 4), in the two forms that the supported families use."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements of a program: several short rows (the heads of a q/k norm), or one long one


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, with the mean in fp32.

    x: `[..., D]` in any float type. weight: `[D]`. When the weight has x's type, the normalised row is rounded to that
    type before the product (Llama, Qwen, Mistral). A weight in fp32 beside a half-precision x is multiplied before
    rounding (Gemma). Returns `[..., D]` in x's type.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    normed = F.rms_norm(x.float(), (x.shape[-1],), None, eps)
    if weight.dtype == torch.float32:
        return (normed * weight).to(x.dtype)
    return normed.to(x.dtype) * weight


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_stride_n,
    x_stride_h,
    out_stride_n,
    out_stride_h,
    rows,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row r of the `rows` is head r % H of token r // H."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < D)[None, :]
    token, head = row // H, row % H
    x = tl.load(x_ptr + (token * x_stride_n + head * x_stride_h)[:, None] + column[None, :], mask=mask, other=0.0)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
    # a weight of x's type multiplies the rounded row, one in fp32 the exact one
    normed = (wide * scale[:, None]).to(weight.dtype).to(tl.float32)
    out = (normed * weight.to(tl.float32)[None, :]).to(x.dtype)
    tl.store(out_ptr + (token * out_stride_n + head * out_stride_h)[:, None] + column[None, :], out, mask=mask)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Launch the kernel; arguments and result as of `rms_norm`."""
    out = x.new_empty(x.shape) if out is None else out
    heads, d = x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
    rows = x.shape[0] * heads
    block = triton.next_power_of_2(d)
    rows_each = max(1, TILE // block)
    if rows:
        rms_norm_kernel[(triton.cdiv(rows, rows_each),)](
            x_ptr=x,
            weight_ptr=weight,
            out_ptr=out,
            x_stride_n=x.stride(0),
            x_stride_h=x.stride(1),
            out_stride_n=out.stride(0),
            out_stride_h=out.stride(1),
            rows=rows,
            eps=eps,
            H=heads,
            D=d,
            ROWS=rows_each,
            BLOCK=block,
            num_warps=8,
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """rms_norm_ref by the kernel on a GPU, one pass over memory instead of several.

    x: `[N, D]` or `[N, H, D]`, the last dimension contiguous, any strides before it. out: where to write, of x's shape
    and type, x itself if need be; None makes a new one. Returns out.
    """
    if x.is_cuda:
        return rms_norm_triton(x, weight, eps, out)
    normed = rms_norm_ref(x, weight, eps)
    return normed if out is None else out.copy_(normed)
