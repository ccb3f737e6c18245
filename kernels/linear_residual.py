"""A matrix product and what follows it at the end of a block: `h += x W^T + b`, and the start of the next norm.

Beside the new hidden state the kernel leaves what the next norm_linear of several rows needs: the state times that
norm's weight, and for each tile the sum of its squares. The reduction over K may be split between programs; the last
of them to arrive at a tile adds the parts in their own order, so runs repeat bit for bit.
"""

import triton
import triton.language as tl
from torch import Tensor

from pad_engine.kernels.row_tiles import (
    OFF,
    add_parts,
    lane_product,
    lane_tile,
    many_row_product,
    one_row_product,
    one_row_tile,
    prefetch_rows,
    release_dependents,
    row_scales,
    segments,
    wait_for_inputs,
)
from pad_engine.kernels.tuning import TileConfig


def linear_residual_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, h: Tensor | None, norm: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The meaning. x: `[N, K]`, weight: `[M, K]`, bias: `[M]`, scale: fp32 `[M]`, h: `[N, M]` to be added (None: zero),
    norm: the next norm's weight `[M]` (None: one).

    Returns the sum in x's type, that times norm in x's type, both `[N, M]`, and the sums of its squares fp32 `[N]`.
    """
    y = x.float() @ weight.float().t()
    y = y if scale is None else y * scale
    y = y if bias is None else y + bias.float()
    y = (y if h is None else y + h.float()).to(x.dtype)
    normed = y if norm is None else (y.float() * norm.float()).to(x.dtype)
    return y, normed, y.float().square().sum(-1)


@triton.jit
def finish_rows(
    y,
    columns,
    ok,
    h_ptr,
    norm,
    normed_ptr,
    squares_ptr,
    tap_ptr,
    tile,
    M,
    NORM: tl.constexpr,
    SQUARES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """y fp32 `[BLOCK, ROWS]`: write it as the hidden state, with what its norm, of weights `[BLOCK]`, needs. tap_ptr:
    where a copy goes that later layers leave alone, or None."""
    rows = tl.arange(0, ROWS)
    offsets = rows[None, :] * M + columns[:, None]
    h = tl.where(ok[:, None], y, 0.0).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + offsets, h, mask=ok[:, None])
    if tap_ptr is not None:
        tl.store(tap_ptr + offsets, h, mask=ok[:, None])
    state = h.to(tl.float32)
    if NORM:
        normed = state * norm.to(tl.float32)[:, None]
        tl.store(normed_ptr + offsets, normed.to(normed_ptr.dtype.element_ty), mask=ok[:, None])
    if SQUARES:
        tl.store(squares_ptr + tile * ROWS + rows, tl.sum(state * state, 0))


@triton.jit
def linear_residual_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    scale_ptr,
    h_ptr,
    norm_ptr,
    normed_ptr,
    squares_ptr,
    part_ptr,
    ticket_ptr,
    tap_ptr,
    M,
    K,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    SQUARES: tl.constexpr,
    ROWS: tl.constexpr,
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
    tile, rows = tl.program_id(0), tl.arange(0, ROWS)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    ok = columns < M
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    k_begin = tl.program_id(1) * share
    k_end = tl.minimum(k_begin + share, K)
    if PDL and PREFETCH > 0:
        SEGMENTS: tl.constexpr = segments(BLOCK, THREADS)
        spread_rows = tl.minimum(tile * BLOCK + tl.arange(0, BLOCK * SEGMENTS) // SEGMENTS, M - 1)
        prefetch_rows(w_ptr, spread_rows, k_begin, k_end, K, BLOCK, PREFETCH, THREADS)
    # whatever is needed at the end is read at the start, beside the weights
    scale = row_scales(scale_ptr, columns, ok)
    norm = 0.0
    if NORM:
        norm = tl.load(norm_ptr + columns, mask=ok, other=0.0)
    h = tl.zeros((BLOCK, ROWS), tl.float32)
    h_pointers = h_ptr + rows[None, :] * M + columns[:, None]
    if ROWS == 1:
        w = one_row_tile(w_ptr, x_ptr, columns, ok, k_begin, k_end, K, BLOCK_K, EVEN_K, GROUP)
        wait_for_inputs(PDL)
        if ADD:
            h = tl.load(h_pointers, mask=ok[:, None], other=0.0).to(tl.float32)
        sums, _ = one_row_product(w, x_ptr, None, w_ptr, columns, ok, k_begin, k_end, K, BLOCK_K, EVEN_K, STAGES, GROUP)
        acc = sums[:, None]
    else:
        if LANES > 1:
            w = lane_tile(w_ptr, columns, ok, k_begin, k_end, K, BLOCK_K, LANES, EVEN_K, "evict_first")
        wait_for_inputs(PDL)
        if ADD:
            h = tl.load(h_pointers, mask=ok[:, None], other=0.0).to(tl.float32)
        if LANES > 1:
            acc = lane_product(
                w, x_ptr, w_ptr, columns, ok, k_begin, k_end, K, ROWS, BLOCK, BLOCK_K, LANES, EVEN_K, STAGES
            )
        else:
            acc = many_row_product(x_ptr, w_ptr, columns, ok, k_begin, k_end, K, ROWS, BLOCK, BLOCK_K, EVEN_K, STAGES)
    last = True
    if SPLIT_K > 1:
        last, acc = add_parts(part_ptr, ticket_ptr, acc, columns, ok, M, ROWS, SPLIT_K)
    if last:
        acc *= scale[:, None]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + columns, mask=ok).to(tl.float32)[:, None]
        finish_rows(h + acc, columns, ok, h_ptr, norm, normed_ptr, squares_ptr, tap_ptr, tile, M, NORM, SQUARES, ROWS)


def linear_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    h: Tensor,
    norm: Tensor | None,
    normed: Tensor,
    squares: Tensor,
    parts: Tensor,
    tickets: Tensor,
    config: TileConfig,
    pdl: int,
    add: bool = True,
    tap: Tensor | None = None,
) -> None:
    """Launch: the arguments of linear_residual_ref, N in {1, 16, 32, 64}; h is changed in place.

    normed: `[N, M]` in x's type, written when norm is given and N > 1. squares: fp32 `[cdiv(M, block), N]`, a sum a
    tile, written when N > 1 or norm is None. parts: fp32, at least `split_k * M * N`, and tickets: int32 zeros
    `[cdiv(M, block)]`, both left as they were found. add: False when h is written and not added to. tap: `[N, M]`, a
    copy of h that is written as well, or None.
    """
    (n, k), m = x.shape, weight.shape[0]
    linear_residual_kernel[(triton.cdiv(m, config.block), config.split_k)](
        x_ptr=x,
        w_ptr=weight,
        bias_ptr=bias,
        scale_ptr=scale,
        h_ptr=h,
        norm_ptr=norm,
        normed_ptr=normed,
        squares_ptr=squares,
        part_ptr=parts,
        ticket_ptr=tickets,
        tap_ptr=tap,
        M=m,
        K=k,
        ADD=add,
        NORM=norm is not None and n > 1,
        SQUARES=n > 1 or norm is None,
        ROWS=n,
        LANES=config.lanes,
        PDL=pdl,
        launch_pdl=pdl != OFF,
        **config.arguments(k),
    )
