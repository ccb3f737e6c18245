"""The LM head: the last norm, the product with the vocabulary's rows, and what acceptance needs of the logits.

The kernel is persistent. Each program takes every P-th tile of the vocabulary and keeps a running best score in
registers, so a row leaves P numbers instead of V logits; the accept kernel (accept.py) puts them together. Above
temperature 0 the score is `logit + T * G[seed, position, token]` (gumbel.py). Logits are written only where somebody
asks for them. A draft model's head may have the rows of some tokens alone: its noise and picks still go by token.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pad_engine.kernels.gumbel import gumbel_noise, gumbel_score
from pad_engine.kernels.norm_linear import norm_arguments, norm_linear_ref, normed_product
from pad_engine.kernels.pivot_mlp import TapProjection, project_tap
from pad_engine.kernels.row_stats import StatParts, best_place, fold_stats, store_stats
from pad_engine.kernels.row_tiles import (
    OFF,
    inverse_rms,
    many_row_product,
    one_row_product,
    one_row_tile,
    release_dependents,
    row_scales,
    segments,
)
from pad_engine.kernels.tuning import TileConfig


class Judging(NamedTuple):
    """What the LM head leaves beside the picks, of N rows. stats: parts of P programs, of the logits, or, where a draft
    is to be ranked by them (`scored`), of the scores that are picked from. token, parent: int32 `[N]`, the forest, and
    token_logit: fp32 `[N]`, the logit of each node's token in its parent's row (a root's in its own), or all None.
    tap: or None."""

    stats: StatParts
    token: Tensor | None = None
    parent: Tensor | None = None
    token_logit: Tensor | None = None
    tap: TapProjection | None = None
    scored: bool = False


def lm_head_ref(
    h: Tensor, norm: Tensor, weight: Tensor, scale: Tensor | None, eps: float, softcap: float | None
) -> Tensor:
    """The logits, fp32 `[N, V]`: norm_linear_ref without a bias, then `softcap * tanh(z / softcap)` where one is set.
    What the kernel picks of them is gumbel.gumbel_pick_ref."""
    logits = norm_linear_ref(h, norm, weight, None, scale, eps)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@triton.jit
def token_ids(row_id_ptr, row, ok):
    """int32 `[BLOCK]`: the tokens of rows of the weights, which are the rows themselves where there is no table."""
    if row_id_ptr is None:
        return row
    else:
        return tl.load(row_id_ptr + row, mask=ok, other=0)


@triton.jit
def tile_logits(acc, entry, ok, rms, scale, logits_ptr, V, SOFTCAP: tl.constexpr, ROWS: tl.constexpr):
    """A tile of products `[BLOCK, ROWS]` as logits, written where somebody asks for them."""
    rows = tl.arange(0, ROWS)
    logits = acc * rms[None, :] * scale[:, None]
    if SOFTCAP is not None:
        # tanh(x) = 2 sigmoid(2 x) - 1
        logits = SOFTCAP * (2.0 * tl.sigmoid(2.0 * logits / SOFTCAP) - 1.0)
    if logits_ptr is not None:
        # turned, so that a row's neighbours are written side by side
        pointers = logits_ptr + rows.to(tl.int64)[:, None] * V + entry[None, :]
        tl.store(pointers, tl.trans(logits).to(logits_ptr.dtype.element_ty), mask=ok[None, :])
    return logits


@triton.jit
def fold_best(logits, token, ok, best, best_id, seed, temperature, position):
    """Keep the best score of every place, and its id; returns the scores as well."""
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
    return tl.where(better, score, best), tl.where(better, token[:, None], best_id), score


@triton.jit
def token_logits(logits, first, nodes, judges, out_ptr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Of a tile of logits `[BLOCK, ROWS]` of the tokens from `first` on, leave those that nodes are judged by: of each
    node's token, in the row that judges it. nodes, judges: `[ROWS]`, those tokens and rows. Few tiles have one, so the
    others pay for a look only."""
    own = nodes - first
    here = (own >= 0) & (own < BLOCK)
    if tl.max(here.to(tl.int32)) > 0:
        rows, place = tl.arange(0, ROWS), tl.where(here, own, 0)
        found = tl.gather(logits, place[:, None] + tl.zeros((ROWS, ROWS), tl.int32), 0)
        judged = tl.sum(tl.where(rows[None, :] == judges[:, None], found, 0.0), 1)
        tl.store(out_ptr + rows, judged, mask=here)


@triton.jit
def lm_head_kernel(
    h_ptr,
    norm_ptr,
    normed_ptr,
    squares_ptr,
    w_ptr,
    scale_ptr,
    row_id_ptr,
    depth_ptr,
    seq_ptr,
    length_ptr,
    seed_ptr,
    temperature_ptr,
    score_ptr,
    id_ptr,
    logits_ptr,
    values_ptr,
    value_ids_ptr,
    node_ptr,
    parent_ptr,
    token_logit_ptr,
    tap_ptr,
    tap_weight_ptr,
    tap_part_ptr,
    V,
    K,
    eps,
    SCORED: tl.constexpr,
    UNITS: tl.constexpr,
    TAP_SPLIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PREFETCH: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    STATS: tl.constexpr = values_ptr is not None
    program, programs = tl.program_id(0), tl.num_programs(0)
    index, rows = tl.arange(0, BLOCK), tl.arange(0, ROWS)
    seq = tl.load(seq_ptr + rows)
    # the token picked after a row stands one position behind it
    position = tl.load(length_ptr + seq) + tl.load(depth_ptr + rows) + 1
    seed, temperature = tl.load(seed_ptr + seq), tl.load(temperature_ptr + seq)
    best = tl.full((BLOCK, ROWS), float("-inf"), tl.float32)
    best_id = tl.full((BLOCK, ROWS), 2147483647, tl.int32)
    entry = program * BLOCK + index
    SEGMENTS: tl.constexpr = segments(BLOCK, THREADS)
    spread_rows = tl.minimum(program * BLOCK + tl.arange(0, BLOCK * SEGMENTS) // SEGMENTS, V - 1)
    scale, token = row_scales(scale_ptr, entry, entry < V), token_ids(row_id_ptr, entry, entry < V)
    acc, squares = normed_product(
        h_ptr, norm_ptr, normed_ptr, squares_ptr, w_ptr, entry, entry < V, spread_rows, 0, K, K,
        ROWS, BLOCK, BLOCK_K, EVEN_K, STAGES, GROUP, NUM_SQUARES, BLOCK_SQUARES, PREFETCH, THREADS, PDL,
    )  # fmt: skip
    rms = inverse_rms(squares, K, eps)
    if UNITS > 0:
        project_tap(tap_ptr, tap_weight_ptr, tap_part_ptr, program, programs, K, UNITS, TAP_SPLIT, ROWS)
    logits = tile_logits(acc, entry, entry < V, rms, scale, logits_ptr, V, SOFTCAP, ROWS)
    best, best_id, score = fold_best(logits, token, entry < V, best, best_id, seed, temperature, position)
    if node_ptr is not None:
        nodes, parents = tl.load(node_ptr + rows), tl.load(parent_ptr + rows)
        judges = tl.where(parents < 0, rows, parents)
        token_logits(logits, program * BLOCK, nodes, judges, token_logit_ptr, BLOCK, ROWS)
    if STATS:
        low, no_id = tl.full((BLOCK, ROWS), float("-inf"), tl.float32), tl.full((BLOCK, ROWS), 2147483647, tl.int32)
        zero = tl.zeros((BLOCK, ROWS), tl.float32)
        peak, total, weighted, a, a_id, b, b_id, c, c_id = fold_stats(
            score if SCORED else logits, token, entry < V, low, zero, zero, low, no_id, low, no_id, low, no_id
        )
    for tile in range(program + programs, tl.cdiv(V, BLOCK), programs):
        entry = tile * BLOCK + index
        scale, token = row_scales(scale_ptr, entry, entry < V), token_ids(row_id_ptr, entry, entry < V)
        if ROWS == 1:
            w = one_row_tile(w_ptr, h_ptr, entry, entry < V, 0, K, K, BLOCK_K, EVEN_K, GROUP)
            sums, _ = one_row_product(
                w, h_ptr, norm_ptr, w_ptr, entry, entry < V, 0, K, K, BLOCK_K, EVEN_K, STAGES, GROUP
            )
            acc = sums[:, None]
        else:
            acc = many_row_product(normed_ptr, w_ptr, entry, entry < V, 0, K, K, ROWS, BLOCK, BLOCK_K, EVEN_K, STAGES)
        logits = tile_logits(acc, entry, entry < V, rms, scale, logits_ptr, V, SOFTCAP, ROWS)
        best, best_id, score = fold_best(logits, token, entry < V, best, best_id, seed, temperature, position)
        if node_ptr is not None:
            token_logits(logits, tile * BLOCK, nodes, judges, token_logit_ptr, BLOCK, ROWS)
        if STATS:
            peak, total, weighted, a, a_id, b, b_id, c, c_id = fold_stats(
                score if SCORED else logits, token, entry < V, peak, total, weighted, a, a_id, b, b_id, c, c_id
            )
    top, top_id, _ = best_place(best, best_id)
    tl.store(score_ptr + program * ROWS + rows, top)
    tl.store(id_ptr + program * ROWS + rows, top_id)
    if STATS:
        store_stats(values_ptr, value_ids_ptr, program, peak, total, weighted, a, a_id, b, b_id, c, c_id, ROWS)


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
    judging: Judging | None = None,
    *,
    num_tokens: int,
    row_ids: Tensor | None = None,
    eps: float,
    softcap: float | None,
    config: TileConfig,
    pdl: int,
) -> None:
    """Launch: h, norm, weight, scale as in lm_head_ref, N in {1, 16, 32, 64}; normed, squares as in norm_linear.

    depth, seq: int32 `[N]`; cache_len: int32, seed: int64, temperature: fp32, all `[S]`. num_tokens: ids from here on
    are padding of the vocabulary, and never computed. row_ids: int32 `[num_tokens]`, ascending, the tokens of the
    weights' rows where they are not the first ids: logits are of these rows, and judging has no nodes. scores: fp32
    `[P, N]` and ids: int32 `[P, N]`, written: the best score of each program and its id, the lowest at ties; P programs
    are started. A NaN gives the score +inf. logits: `[N, num_tokens]` in any float type, written, or None. judging:
    what rules beside the pick need, written, or None; of a row with a NaN the sums of the statistics alone say so.
    """
    n, k = h.shape
    none = Judging(StatParts(None, None))  # type: ignore[arg-type]
    j = judging or none
    tap = j.tap or TapProjection(None, None, None)  # type: ignore[arg-type]
    lm_head_kernel[(scores.shape[0],)](
        h_ptr=h,
        norm_ptr=norm,
        normed_ptr=normed,
        squares_ptr=squares,
        w_ptr=weight,
        scale_ptr=scale,
        row_id_ptr=row_ids,
        depth_ptr=depth,
        seq_ptr=seq,
        length_ptr=cache_len,
        seed_ptr=seed,
        temperature_ptr=temperature,
        score_ptr=scores,
        id_ptr=ids,
        logits_ptr=logits,
        values_ptr=j.stats.values,
        value_ids_ptr=j.stats.ids,
        node_ptr=j.token,
        parent_ptr=j.parent,
        token_logit_ptr=j.token_logit,
        tap_ptr=tap.rows,
        tap_weight_ptr=tap.weight,
        tap_part_ptr=tap.parts,
        SCORED=j.scored,
        UNITS=0 if j.tap is None else j.tap.weight.shape[0],
        TAP_SPLIT=1 if j.tap is None else j.tap.parts.shape[0],
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
