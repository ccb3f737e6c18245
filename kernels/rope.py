"""Rotary position embedding (Su et al. 2021, equation 34), in the half-split form of the Hugging Face checkpoints."""

import triton
import triton.language as tl
from torch import Tensor

HEADS = 16  # of a program


def rope_ref(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head.

    x: `[N, H, D]`. cos, signed_sin: `[N, 1, D]` in x's type; the first half of signed_sin carries the minus sign of
    the rotation, so that a roll by D/2 takes the place of a negation and a concatenation. Returns `[N, H, D]`.
    """
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), signed_sin)


@triton.jit
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    stride_n,
    stride_h,
    H: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotates BLOCK_H heads of one row in place."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    pair = tl.arange(0, BLOCK_HALF)
    mask = (head < H)[:, None] & (pair < HALF)[None, :]
    first = x_ptr + row * stride_n + head[:, None] * stride_h + pair[None, :]
    angle, inside = row * 2 * HALF + pair, pair < HALF
    a = tl.load(first, mask=mask, other=0.0)
    b = tl.load(first + HALF, mask=mask, other=0.0)
    cos_a = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos_ptr + angle + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin_ptr + angle + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    # the reference rounds the first product to x's type
    out_a = (wide_a * cos_a).to(a.dtype).to(tl.float32) + wide_b * sin_a
    out_b = (wide_b * cos_b).to(b.dtype).to(tl.float32) + wide_a * sin_b
    tl.store(first, out_a.to(a.dtype), mask=mask)
    tl.store(first + HALF, out_b.to(b.dtype), mask=mask)


def rope_triton(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Launch the kernel; arguments and result as of `rope`, and x is always overwritten."""
    n, heads, head_dim = x.shape
    if n:
        rope_kernel[(n, triton.cdiv(heads, HEADS))](
            x_ptr=x,
            cos_ptr=cos,
            sin_ptr=signed_sin,
            stride_n=x.stride(0),
            stride_h=x.stride(1),
            H=heads,
            HALF=head_dim // 2,
            BLOCK_H=HEADS,
            BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
            num_warps=4,
        )
    return x


def rope(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """rope_ref, on a GPU by the kernel in place. What x holds afterwards is undefined: go on with the result.

    x: `[N, H, D]`, the last dimension contiguous, any strides before it. cos, signed_sin: contiguous `[N, 1, D]`.
    """
    return rope_triton(x, cos, signed_sin) if x.is_cuda else rope_ref(x, cos, signed_sin)
