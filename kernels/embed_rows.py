"""The first kernel of a pass: the rows' embeddings as hidden state, with what the first norm needs."""

import triton
import triton.language as tl
from torch import Tensor

from pad_engine.kernels.linear_residual import finish_rows
from pad_engine.kernels.row_tiles import OFF, release_dependents, wait_for_inputs


def embed_rows_ref(token: Tensor, table: Tensor, scale: float | None) -> Tensor:
    """The meaning. token: `[N]`, table: `[V, M]`, scale: factor or None. Returns `[N, M]` in the table's type."""
    rows = table[token.long()]
    return rows if scale is None else rows * scale


@triton.jit
def embed_rows_kernel(
    token_ptr,
    table_ptr,
    h_ptr,
    norm_ptr,
    normed_ptr,
    squares_ptr,
    M,
    scale: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    tile, rows = tl.program_id(0), tl.arange(0, ROWS)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    ok = columns < M
    token = tl.load(token_ptr + rows).to(tl.int64)
    h = tl.load(table_ptr + token[None, :] * M + columns[:, None], mask=ok[:, None], other=0.0).to(tl.float32)
    if scale is not None:
        h *= scale
    norm = tl.load(norm_ptr + columns, mask=ok, other=0.0)
    finish_rows(h, columns, ok, h_ptr, norm, normed_ptr, squares_ptr, None, tile, M, ROWS > 1, ROWS > 1, ROWS)


def embed_rows(
    token: Tensor,
    table: Tensor,
    scale: float | None,
    h: Tensor,
    norm: Tensor,
    normed: Tensor,
    squares: Tensor,
    block: int,
    pdl: int,
) -> None:
    """Launch: the arguments of embed_rows_ref; writes h `[N, M]`, and normed and squares as linear_residual does, in
    tiles of `block` columns. Rows past a tree's end hold any valid token."""
    n, m = h.shape
    embed_rows_kernel[(triton.cdiv(m, block),)](
        token_ptr=token,
        table_ptr=table,
        h_ptr=h,
        norm_ptr=norm,
        normed_ptr=normed,
        squares_ptr=squares,
        M=m,
        scale=scale,
        ROWS=n,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl != OFF,
    )
