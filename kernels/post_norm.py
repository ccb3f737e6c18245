"""The norm behind a block that Gemma has, and the residual: `h += rms_norm(y) * w`, with the next norm's start."""

import triton
import triton.language as tl
from torch import Tensor

from pad_engine.kernels.linear_residual import finish_rows
from pad_engine.kernels.row_tiles import OFF, inverse_rms, release_dependents, square_parts, wait_for_inputs


def post_norm_ref(y: Tensor, squares: Tensor, weight: Tensor, h: Tensor, eps: float) -> Tensor:
    """The meaning: h `[N, M]` plus y `[N, M]` over its root mean square times weight `[M]`, in y's type. squares: fp32
    `[P, N]`, partial sums of y's squares."""
    rms = (squares.sum(0) / y.shape[1] + eps).rsqrt()[:, None]
    return (h.float() + (y.float() * rms * weight.float()).to(y.dtype).float()).to(y.dtype)


@triton.jit
def post_norm_kernel(
    y_ptr,
    y_squares_ptr,
    weight_ptr,
    h_ptr,
    norm_ptr,
    normed_ptr,
    squares_ptr,
    tap_ptr,
    M,
    eps,
    ROWS: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    tile, rows = tl.program_id(0), tl.arange(0, ROWS)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    ok = columns < M
    weight = tl.load(weight_ptr + columns, mask=ok, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    rms = inverse_rms(tl.sum(square_parts(y_squares_ptr, ROWS, NUM_SQUARES, BLOCK_SQUARES), 0), M, eps)
    y = tl.load(y_ptr + rows[None, :] * M + columns[:, None], mask=ok[:, None], other=0.0).to(tl.float32)
    y = (y * rms[None, :] * weight[:, None]).to(h_ptr.dtype.element_ty).to(tl.float32)
    h = tl.load(h_ptr + rows[None, :] * M + columns[:, None], mask=ok[:, None], other=0.0)
    norm = tl.load(norm_ptr + columns, mask=ok, other=0.0)
    finish_rows(
        h.to(tl.float32) + y, columns, ok, h_ptr, norm, normed_ptr, squares_ptr, tap_ptr, tile, M,
        ROWS > 1, ROWS > 1, ROWS,
    )  # fmt: skip


def post_norm(
    y: Tensor,
    y_squares: Tensor,
    weight: Tensor,
    h: Tensor,
    norm: Tensor,
    normed: Tensor,
    squares: Tensor,
    eps: float,
    block: int,
    pdl: int,
    tap: Tensor | None = None,
) -> None:
    """Launch: the arguments of post_norm_ref; h is changed in place. normed, squares (of `block` columns a tile), tap:
    as in linear_residual."""
    n, m = y.shape
    post_norm_kernel[(triton.cdiv(m, block),)](
        y_ptr=y,
        y_squares_ptr=y_squares,
        weight_ptr=weight,
        h_ptr=h,
        norm_ptr=norm,
        normed_ptr=normed,
        squares_ptr=squares,
        tap_ptr=tap,
        M=m,
        eps=eps,
        ROWS=n,
        NUM_SQUARES=y_squares.shape[0],
        BLOCK_SQUARES=triton.next_power_of_2(y_squares.shape[0]),
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl != OFF,
    )
