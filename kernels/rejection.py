"""Speculative sampling of a drafted chain on the card (Leviathan et al. 2023, algorithm 1): which tokens stay, and the
one after them, from logits that lie there.

Two launches. The first sums exponentials of every row, in parts. In the second each program walks the chain, which
takes a few numbers a node, and draws from its part of the row where the walk ends: the Gumbel argmax of log max(p - q,
0), for which no sum is needed. The last program to arrive puts the parts together. The meaning, and the same random
numbers, are those of pad_engine/rules/rejection.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pad_engine.kernels.gumbel import ACCEPT, RESIDUAL, gumbel_noise, philox_word

LSE_SPLITS, DRAW_SPLITS = 8, 64
BLOCK = 1024
_ACCEPT, _RESIDUAL = tl.constexpr(ACCEPT), tl.constexpr(RESIDUAL)


@triton.jit(do_not_specialize=["temperature"])
def lse_parts_kernel(logits_ptr, stride, part_ptr, temperature, V, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    row, split = tl.program_id(0), tl.program_id(1)
    share = tl.cdiv(V, SPLITS)
    begin = split * share
    end = tl.minimum(begin + share, V)
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(begin, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        z = tl.load(logits_ptr + row.to(tl.int64) * stride + token, mask=token < end, other=float("-inf")) / temperature
        new = tl.maximum(peak, z)
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(peak - base) + tl.exp(z - base)
        peak = new
    top = tl.max(peak, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(part_ptr + (row * SPLITS + split) * 2, top)
    tl.store(part_ptr + (row * SPLITS + split) * 2 + 1, tl.sum(total * tl.exp(peak - base), 0))


@triton.jit
def row_lse(part_ptr, row, SPLITS: tl.constexpr):
    """log of the sum of exp(z / T) of one row, a scalar."""
    split = tl.arange(0, SPLITS)
    peak = tl.load(part_ptr + (row * SPLITS + split) * 2)
    total = tl.load(part_ptr + (row * SPLITS + split) * 2 + 1)
    top = tl.max(peak, 0)
    return top + tl.log(tl.sum(total * tl.exp(peak - top), 0))


@triton.jit
def walk_chain(
    logits_ptr, stride, q_ptr, q_stride, token_ptr, pick_ptr, part_ptr, temperature, position, seed_lo, seed_hi,
    round_index, N, Q_WIDTH, SPLITS: tl.constexpr,
):  # fmt: skip
    """The last node that stays, and whether its row is finite."""
    node, going = tl.program_id(0) * 0, tl.load(pick_ptr) >= 0
    lo, hi = tl.cast(seed_lo, tl.uint32), tl.cast(seed_hi, tl.uint32)
    for child in range(1, N):
        if going:
            token = tl.load(token_ptr + child)
            z = tl.load(logits_ptr + node.to(tl.int64) * stride + token) / temperature
            p = tl.exp(z - row_lse(part_ptr, node, SPLITS))
            q = p * 0.0 + 1.0
            if q_ptr is not None:
                q = tl.load(q_ptr + node.to(tl.int64) * q_stride + token, mask=token < Q_WIDTH, other=0.0)
            place, purpose = tl.cast(position + child, tl.uint32), tl.cast(_ACCEPT, tl.uint32)
            word = philox_word(place, token.to(tl.uint32), purpose, tl.cast(round_index, tl.uint32), lo, hi)
            # in fp64, where a draw just below one is not one
            stays = word.to(tl.float64) * 2.3283064365386963e-10 * q.to(tl.float64) < p.to(tl.float64)
            node = tl.where(stays, child, node)
            going = stays & (tl.load(pick_ptr + child) >= 0)
    return node, tl.load(pick_ptr + node) >= 0


@triton.jit(do_not_specialize=["temperature", "position", "seed_lo", "seed_hi", "round_index"])
def rejection_kernel(
    logits_ptr, stride, q_ptr, q_stride, token_ptr, pick_ptr, part_ptr, draw_ptr, draw_id_ptr, ticket_ptr, out_ptr,
    temperature, position, seed_lo, seed_hi, round_index, N, V, Q_WIDTH, SPLITS: tl.constexpr, DRAWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    node, finite = walk_chain(
        logits_ptr, stride, q_ptr, q_stride, token_ptr, pick_ptr, part_ptr, temperature, position, seed_lo, seed_hi,
        round_index, N, Q_WIDTH, SPLITS,
    )  # fmt: skip
    rejected = tl.load(token_ptr + tl.minimum(node + 1, N - 1))
    ends = node == N - 1
    lse = row_lse(part_ptr, node, SPLITS)
    lo, hi = tl.cast(seed_lo, tl.uint32), tl.cast(seed_hi, tl.uint32)
    share = tl.cdiv(V, DRAWS)
    begin = program * share
    end = tl.minimum(begin + share, V)
    # of the residual and, should rounding leave nothing of it, of p itself
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    plain = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id, plain_id = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for first in range(begin, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        z = tl.load(logits_ptr + node.to(tl.int64) * stride + token, mask=token < end, other=float("-inf"))
        p = tl.exp(z / temperature - lse)
        q = (token == rejected).to(tl.float32)
        if q_ptr is not None:
            q = tl.load(q_ptr + node.to(tl.int64) * q_stride + token, mask=(token < end) & (token < Q_WIDTH), other=0.0)
        noise = gumbel_noise(lo, hi, position + node + 1 + token * 0, token, _RESIDUAL, round_index)
        left = tl.where(ends, p, tl.maximum(p - q, 0.0))
        score, plain_score = tl.log(left) + noise, tl.log(p) + noise
        better, plainer = score > best, plain_score > plain
        best, best_id = tl.where(better, score, best), tl.where(better, token, best_id)
        plain, plain_id = tl.where(plainer, plain_score, plain), tl.where(plainer, token, plain_id)
    top, plain_top = tl.max(best, 0), tl.max(plain, 0)
    tl.store(draw_ptr + program * 2, top)
    tl.store(draw_ptr + program * 2 + 1, plain_top)
    tl.store(draw_id_ptr + program * 2, tl.min(tl.where(best == top, best_id, 2147483647), 0))
    tl.store(draw_id_ptr + program * 2 + 1, tl.min(tl.where(plain == plain_top, plain_id, 2147483647), 0))
    tl.debug_barrier()  # the stores come before the one thread's release
    if tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu") == DRAWS - 1:
        tl.store(ticket_ptr, 0)  # for the next launch
        draw = tl.arange(0, DRAWS)
        score = tl.load(draw_ptr + draw * 2, cache_modifier=".cg")
        ids = tl.load(draw_id_ptr + draw * 2, cache_modifier=".cg")
        if tl.max(score, 0) == float("-inf"):
            score = tl.load(draw_ptr + draw * 2 + 1, cache_modifier=".cg")
            ids = tl.load(draw_id_ptr + draw * 2 + 1, cache_modifier=".cg")
        drawn = tl.min(tl.where(score == tl.max(score, 0), ids, 2147483647), 0)
        tl.store(out_ptr, node)
        tl.store(out_ptr + 1, tl.where(finite, drawn, -1))


class RejectionWorkspace:
    """Buffers of launches over at most `rows` rows; one a stream. out: int32 `[2]`, the drafted tokens that stay and
    the token after them, -1 where the row there is not finite."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.parts = torch.empty(rows, LSE_SPLITS, 2, device=device)
        self.draws = torch.empty(DRAW_SPLITS, 2, device=device)
        self.draw_ids = torch.empty(DRAW_SPLITS, 2, dtype=torch.int32, device=device)
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device)
        self.out = torch.zeros(2, dtype=torch.int32, device=device)


def rejection_chain(
    logits: Tensor,
    q_rows: Tensor | None,
    token: Tensor,
    row_pick: Tensor,
    workspace: RejectionWorkspace,
    *,
    temperature: float,
    position: int,
    seed: int,
    round_index: int,
) -> None:
    """Launch. logits: fp32 `[N, V]`, processed, unit stride over V. q_rows: fp32 `[N, V']`, what each node's child was
    drawn from, or None where nothing was drawn. token, row_pick: int32 `[N]`, the chain and the target's own picks, -1
    where a row is not finite. temperature: above 0. position: of the root in its sequence. Written: workspace.out."""
    n, vocab = logits.shape
    w, seed = workspace, seed % 2**64
    lse_parts_kernel[(n, LSE_SPLITS)](logits, logits.stride(0), w.parts, temperature, vocab, LSE_SPLITS, BLOCK)
    rejection_kernel[(DRAW_SPLITS,)](
        logits, logits.stride(0), q_rows, 0 if q_rows is None else q_rows.stride(0), token, row_pick, w.parts, w.draws,
        w.draw_ids, w.ticket, w.out, temperature, position, seed & 0xFFFFFFFF, seed >> 32, round_index, n, vocab,
        0 if q_rows is None else q_rows.shape[1], LSE_SPLITS, DRAW_SPLITS, BLOCK,
    )  # fmt: skip
