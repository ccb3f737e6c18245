"""The LM head: the last norm, the product with the vocabulary's rows, and what acceptance needs of the logits.

The kernel is persistent. Each program takes every P-th tile of the vocabulary and keeps a running best score in
registers, so a row leaves P numbers instead of V logits; the accept kernel (accept.py) puts them together. Above
temperature 0 the score is `logit + T * G[seed, position, token]` (gumbel.py). Logits are written only where somebody
asks for them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pad_engine.kernels.gumbel import gumbel_noise, gumbel_score
from pad_engine.kernels.norm_linear import norm_arguments, norm_linear_ref, normed_product
from pad_engine.kernels.row_tiles import (
    OFF,
    inverse_rms,
    many_row_product,
    one_row_product,
    release_dependents,
    segments,
    weight_tile,
)
from pad_engine.kernels.tuning import TileConfig


def lm_head_ref(
    h: Tensor, norm: Tensor, weight: Tensor, scale: Tensor | None, eps: float, softcap: float | None
) -> Tensor:
    """The logits, fp32 `[N, V]`: norm_linear_ref without a bias, then `softcap * tanh(z / softcap)` where one is set.
    What the kernel picks of them is gumbel.gumbel_pick_ref."""
    logits = norm_linear_ref(h, norm, weight, None, scale, eps)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@triton.jit
def fold_tile(
    acc,
    tile,
    best,
    best_id,
    rms,
    seed,
    temperature,
    position,
    scale_ptr,
    logits_ptr,
    V,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn a tile of products `[BLOCK, ROWS]` into logits and scores, and keep the best score of every place."""
    token, rows = tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROWS)
    ok = token < V
    logits = acc * rms[None, :]
    if scale_ptr is not None:
        logits *= tl.load(scale_ptr + token, mask=ok)[:, None]
    if SOFTCAP is not None:
        # tanh(x) = 2 sigmoid(2 x) - 1
        logits = SOFTCAP * (2.0 * tl.sigmoid(2.0 * logits / SOFTCAP) - 1.0)
    if logits_ptr is not None:
        # turned, so that a row's neighbours are written side by side
        pointers = logits_ptr + rows.to(tl.int64)[:, None] * V + token[None, :]
        tl.store(pointers, tl.trans(logits).to(logits_ptr.dtype.element_ty), mask=ok[None, :])
    score = logits
    if tl.max(temperature) > 0.0:
        noise = gumbel_noise(
            (seed & 0xFFFFFFFF).to(tl.uint32)[None, :],
            ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)[None, :],
            position[None, :],
            token[:, None],
        )
        # a row at temperature 0 adds 0 * noise, which changes nothing
        score = gumbel_score(logits, temperature[None, :], noise)
    # a row with a NaN has no pick, and says so by an infinite score
    score = tl.where(logits == logits, score, float("inf"))
    better = ok[:, None] & (score > best)
    return tl.where(better, score, best), tl.where(better, token[:, None], best_id)


@triton.jit
def lm_head_kernel(
    h_ptr,
    norm_ptr,
    normed_ptr,
    squares_ptr,
    w_ptr,
    scale_ptr,
    depth_ptr,
    seq_ptr,
    length_ptr,
    seed_ptr,
    temperature_ptr,
    score_ptr,
    id_ptr,
    logits_ptr,
    V,
    K,
    eps,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    index, rows = tl.arange(0, BLOCK), tl.arange(0, ROWS)
    seq = tl.load(seq_ptr + rows)
    # the token picked after a row stands one position behind it
    position = tl.load(length_ptr + seq) + tl.load(depth_ptr + rows) + 1
    seed, temperature = tl.load(seed_ptr + seq), tl.load(temperature_ptr + seq)
    best = tl.full((BLOCK, ROWS), float("-inf"), tl.float32)
    best_id = tl.full((BLOCK, ROWS), 2147483647, tl.int32)
    token = program * BLOCK + index
    SEGMENTS: tl.constexpr = segments(BLOCK, THREADS)
    spread_rows = tl.minimum(program * BLOCK + tl.arange(0, BLOCK * SEGMENTS) // SEGMENTS, V - 1)
    acc, squares = normed_product(
        h_ptr, norm_ptr, normed_ptr, squares_ptr, w_ptr, token, token < V, spread_rows, 0, K, K,
        ROWS, BLOCK, BLOCK_K, EVEN_K, STAGES, NUM_SQUARES, BLOCK_SQUARES, PREFETCH, THREADS, PDL,
    )  # fmt: skip
    rms = inverse_rms(squares, K, eps)
    best, best_id = fold_tile(
        acc, program, best, best_id, rms, seed, temperature, position, scale_ptr, logits_ptr, V, SOFTCAP, ROWS, BLOCK
    )
    for tile in range(program + programs, tl.cdiv(V, BLOCK), programs):
        token = tile * BLOCK + index
        if ROWS == 1:
            w = weight_tile(w_ptr, token, token < V, 0, K, K, BLOCK_K, EVEN_K)
            sums, _ = one_row_product(w, h_ptr, norm_ptr, w_ptr, token, token < V, 0, K, K, BLOCK_K, EVEN_K, STAGES)
            acc = sums[:, None]
        else:
            acc = many_row_product(normed_ptr, w_ptr, token, token < V, 0, K, K, ROWS, BLOCK, BLOCK_K, EVEN_K, STAGES)
        best, best_id = fold_tile(
            acc, tile, best, best_id, rms, seed, temperature, position, scale_ptr, logits_ptr, V, SOFTCAP, ROWS, BLOCK
        )
    top = tl.max(best, 0)
    # of equal scores the lowest id
    top_id = tl.min(tl.where(best == top[None, :], best_id, 2147483647), 0)
    tl.store(score_ptr + program * ROWS + rows, top)
    tl.store(id_ptr + program * ROWS + rows, top_id)


def lm_head(
    h: Tensor,
    norm: Tensor,
    normed: Tensor,
    squares: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    depth: Tensor,
    seq: Tensor,
    cache_len: Tensor,
    seed: Tensor,
    temperature: Tensor,
    scores: Tensor,
    ids: Tensor,
    logits: Tensor | None,
    *,
    num_tokens: int,
    eps: float,
    softcap: float | None,
    config: TileConfig,
    pdl: int,
) -> None:
    """Launch: h, norm, weight, scale as in lm_head_ref, N in {1, 16, 32, 64}; normed, squares as in norm_linear.

    depth, seq: int32 `[N]`; cache_len: int32, seed: int64, temperature: fp32, all `[S]`. num_tokens: ids from here on
    are padding of the vocabulary, and never computed. scores: fp32 `[P, N]` and ids: int32 `[P, N]`, written: the best
    score of each program and its id, the lowest at ties; P programs are started. A NaN gives the score +inf. logits:
    `[N, num_tokens]` in any float type, written, or None.
    """
    n, k = h.shape
    lm_head_kernel[(scores.shape[0],)](
        h_ptr=h,
        norm_ptr=norm,
        normed_ptr=normed,
        squares_ptr=squares,
        w_ptr=weight,
        scale_ptr=scale,
        depth_ptr=depth,
        seq_ptr=seq,
        length_ptr=cache_len,
        seed_ptr=seed,
        temperature_ptr=temperature,
        score_ptr=scores,
        id_ptr=ids,
        logits_ptr=logits,
        V=num_tokens,
        K=k,
        eps=eps,
        SOFTCAP=softcap,
        PDL=pdl,
        launch_pdl=pdl != OFF,
        **norm_arguments(n, squares),
        **config.arguments(k),
    )


def lm_head_programs(num_tokens: int, config: TileConfig, cores: int) -> int:
    """P: programs that fill `cores` multiprocessors, and no more than there are tiles."""
    return min(cores * config.per_core, -(-num_tokens // config.block))
