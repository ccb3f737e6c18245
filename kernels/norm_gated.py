"""A norm, the gate and up products of an MLP, and its activation, in one kernel: `act(gate) * up`.

Gate rows and up rows of the weight alternate in a tile, so that both halves of an output are in one program. See
norm_linear.py for what becomes of the norm.
"""

import triton
import triton.language as tl
from torch import Tensor

from pad_engine.kernels.gated_act import ACTIVATIONS, activation
from pad_engine.kernels.norm_linear import norm_arguments, norm_linear_ref, normed_product
from pad_engine.kernels.row_tiles import OFF, inverse_rms, release_dependents, row_scales, segments
from pad_engine.kernels.tuning import TileConfig


def norm_gated_ref(
    h: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, eps: float, act: str
) -> Tensor:
    """The meaning, in fp32: norm_linear_ref with weight `[2 I, K]`, gate rows first, then `act(gate) * up` `[N, I]`.
    act: silu, gelu or gelu_pytorch_tanh."""
    gate, up = norm_linear_ref(h, norm, weight, bias, scale, eps).chunk(2, dim=-1)
    return ACTIVATIONS[act](gate) * up


@triton.jit
def norm_gated_kernel(
    h_ptr,
    norm_ptr,
    normed_ptr,
    squares_ptr,
    w_ptr,
    bias_ptr,
    scale_ptr,
    y_ptr,
    I,  # noqa: E741
    K,
    eps,
    ACT: tl.constexpr,
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
    index = tl.arange(0, 2 * BLOCK)
    first = tl.program_id(0) * BLOCK
    weight_rows = first + index // 2 + (index % 2) * I
    ok = first + index // 2 < I
    SEGMENTS: tl.constexpr = segments(2 * BLOCK, THREADS)
    spread = tl.arange(0, 2 * BLOCK * SEGMENTS) // SEGMENTS
    spread_rows = tl.minimum(first + spread // 2, I - 1) + (spread % 2) * I
    scale = row_scales(scale_ptr, weight_rows, ok)
    acc, squares = normed_product(
        h_ptr, norm_ptr, normed_ptr, squares_ptr, w_ptr, weight_rows, ok, spread_rows, 0, K, K,
        ROWS, 2 * BLOCK, BLOCK_K, EVEN_K, STAGES, GROUP, NUM_SQUARES, BLOCK_SQUARES, PREFETCH, THREADS, PDL, LANES,
    )  # fmt: skip
    y = acc * inverse_rms(squares, K, eps)[None, :] * scale[:, None]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + weight_rows, mask=ok).to(tl.float32)[:, None]
    gate, up = tl.split(tl.permute(tl.reshape(y, (BLOCK, 2, ROWS)), (0, 2, 1)))
    columns, rows = first + tl.arange(0, BLOCK), tl.arange(0, ROWS)
    y = activation(gate, ACT) * up
    tl.store(y_ptr + rows[None, :] * I + columns[:, None], y.to(y_ptr.dtype.element_ty), mask=(columns < I)[:, None])


def norm_gated(
    h: Tensor,
    norm: Tensor,
    normed: Tensor,
    squares: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    y: Tensor,
    eps: float,
    act: str,
    config: TileConfig,
    pdl: int,
) -> None:
    """Launch: the arguments of norm_gated_ref, N in {1, 16, 32, 64}; writes y `[N, I]` in h's type. normed, squares: as
    in norm_linear. A tile holds config.block rows of each half."""
    (n, k), inner = h.shape, weight.shape[0] // 2
    norm_gated_kernel[(triton.cdiv(inner, config.block),)](
        h_ptr=h,
        norm_ptr=norm,
        normed_ptr=normed,
        squares_ptr=squares,
        w_ptr=weight,
        bias_ptr=bias,
        scale_ptr=scale,
        y_ptr=y,
        I=inner,
        K=k,
        eps=eps,
        ACT=act,
        LANES=config.lanes,
        PDL=pdl,
        launch_pdl=pdl != OFF,
        **norm_arguments(n, squares),
        **config.arguments(k),
    )
