"""A norm and the matrix product behind it, in one kernel: `y = rms_norm(h) W^T + b`.

The product is linear in the row's factor 1 / rms, so that factor goes onto the result. One row: the norm's weight is
multiplied in as the row is read, and the squares are summed on the way. More rows: whoever wrote the hidden state left
it times the norm's weight, and its partial sums of squares (linear_residual.py), so the tensor core takes its input as
it lies. Nothing is folded into W, which would round bf16 weights again and could not be shared by tied embeddings.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pad_engine.kernels.row_tiles import (
    OFF,
    add_parts,
    inverse_rms,
    lane_product,
    lane_tile,
    many_row_product,
    one_row_product,
    one_row_tile,
    prefetch_rows,
    release_dependents,
    row_scales,
    segments,
    square_parts,
    wait_for_inputs,
)
from pad_engine.kernels.tuning import TileConfig


def norm_linear_ref(
    h: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, eps: float
) -> Tensor:
    """The meaning, in fp32. h: `[N, K]`. norm: `[K]`. weight: `[M, K]`. bias: `[M]` or None. scale: fp32 `[M]`, of
    quantised weights, or None. Returns `[N, M]` fp32."""
    h = h.float()
    y = (h * norm.float()) @ weight.float().t() * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    y = y if scale is None else y * scale
    return y if bias is None else y + bias.float()


@triton.jit
def normed_product(
    h_ptr,
    norm_ptr,
    normed_ptr,
    squares_ptr,
    w_ptr,
    weight_rows,
    row_ok,
    spread_rows,
    k_begin,
    k_end,
    K,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    PREFETCH: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
    LANES: tl.constexpr = 1,
):
    """A tile of the product without the factor 1 / rms: fp32 `[BLOCK, ROWS]`, and the sums of squares for it. Waits."""
    if PDL and PREFETCH > 0:
        prefetch_rows(w_ptr, spread_rows, k_begin, k_end, K, BLOCK, PREFETCH, THREADS)
    if ROWS == 1:
        w = one_row_tile(w_ptr, h_ptr, weight_rows, row_ok, k_begin, k_end, K, BLOCK_K, EVEN_K, GROUP)
        wait_for_inputs(PDL)
        sums, squares = one_row_product(
            w, h_ptr, norm_ptr, w_ptr, weight_rows, row_ok, k_begin, k_end, K, BLOCK_K, EVEN_K, STAGES, GROUP
        )
        return sums[:, None], tl.full((1,), 0.0, tl.float32) + squares
    else:
        if LANES > 1:
            w = lane_tile(w_ptr, weight_rows, row_ok, k_begin, k_end, K, BLOCK_K, LANES, EVEN_K, "evict_first")
        wait_for_inputs(PDL)
        parts = square_parts(squares_ptr, ROWS, NUM_SQUARES, BLOCK_SQUARES)
        if LANES > 1:
            acc = lane_product(
                w, normed_ptr, w_ptr, weight_rows, row_ok, k_begin, k_end, K,
                ROWS, BLOCK, BLOCK_K, LANES, EVEN_K, STAGES,
            )  # fmt: skip
        else:
            acc = many_row_product(
                normed_ptr, w_ptr, weight_rows, row_ok, k_begin, k_end, K, ROWS, BLOCK, BLOCK_K, EVEN_K, STAGES
            )
        return acc, tl.sum(parts, 0)


@triton.jit
def norm_linear_kernel(
    h_ptr,
    norm_ptr,
    normed_ptr,
    squares_ptr,
    w_ptr,
    bias_ptr,
    scale_ptr,
    y_ptr,
    part_ptr,
    ticket_ptr,
    M,
    K,
    eps,
    ROWS: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    PREFETCH: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    first = tl.program_id(0) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    ok = columns < M
    SEGMENTS: tl.constexpr = segments(BLOCK, THREADS)
    spread_rows = tl.minimum(first + tl.arange(0, BLOCK * SEGMENTS) // SEGMENTS, M - 1)
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    k_begin = tl.program_id(1) * share
    k_end = tl.minimum(k_begin + share, K)
    scale = row_scales(scale_ptr, columns, ok)
    acc, squares = normed_product(
        h_ptr, norm_ptr, normed_ptr, squares_ptr, w_ptr, columns, ok, spread_rows, k_begin, k_end, K,
        ROWS, BLOCK, BLOCK_K, EVEN_K, STAGES, GROUP, NUM_SQUARES, BLOCK_SQUARES, PREFETCH, THREADS, PDL, LANES,
    )  # fmt: skip
    if SPLIT_K > 1:
        last, acc = add_parts(part_ptr, ticket_ptr, acc, columns, ok, M, ROWS, SPLIT_K)
        if not last:
            return
    y = acc * inverse_rms(squares, K, eps)[None, :] * scale[:, None]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, mask=ok).to(tl.float32)[:, None]
    rows = tl.arange(0, ROWS)
    tl.store(y_ptr + rows[None, :] * M + columns[:, None], y.to(y_ptr.dtype.element_ty), mask=ok[:, None])


def norm_linear(
    h: Tensor,
    norm: Tensor,
    normed: Tensor,
    squares: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    y: Tensor,
    parts: Tensor,
    tickets: Tensor,
    eps: float,
    config: TileConfig,
    pdl: int,
) -> None:
    """Launch: the arguments of norm_linear_ref, N in {1, 16, 32, 64}; writes y `[N, M]` in h's type.

    normed: `[N, K]`, h times norm in h's type, and squares: fp32 `[P, N]`, partial sums of h's squares; both are read
    when N > 1. parts: fp32, at least `split_k * M * N`, and tickets: int32 zeros `[cdiv(M, block)]`, both left as they
    were found; one row is never split.
    """
    (n, k), m = h.shape, weight.shape[0]
    norm_linear_kernel[(triton.cdiv(m, config.block), config.split_k)](
        h_ptr=h,
        norm_ptr=norm,
        normed_ptr=normed,
        squares_ptr=squares,
        w_ptr=weight,
        bias_ptr=bias,
        scale_ptr=scale,
        y_ptr=y,
        part_ptr=parts,
        ticket_ptr=tickets,
        M=m,
        K=k,
        eps=eps,
        LANES=config.lanes,
        PDL=pdl,
        launch_pdl=pdl != OFF,
        **norm_arguments(n, squares),
        **config.arguments(k),
    )


def norm_arguments(rows: int, squares: Tensor) -> dict[str, int]:
    """The constants of a launch that say how the sums of squares come."""
    count = 1 if rows == 1 else squares.shape[0]
    return {"ROWS": rows, "NUM_SQUARES": count, "BLOCK_SQUARES": triton.next_power_of_2(count)}
