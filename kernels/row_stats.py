"""The statistics of a row of logits that acceptance rules use, so that no probabilities need to be kept.

On a GPU the LM head (lm_head.py) folds every tile of logits into running statistics, in one pass (Milakov and
Gimelshein 2018 for the sum), and each of its programs leaves one part a row; whole_row puts the parts together.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TOP = 3


class RowStats(NamedTuple):
    """For N rows: top_id int32 `[N, TOP]`, top_logit fp32 `[N, TOP]`, and fp32 `[N]` each: lse, entropy (nats) and
    margin (largest logit minus second largest), all raw, at temperature 1."""

    top_id: Tensor
    top_logit: Tensor
    lse: Tensor
    entropy: Tensor
    margin: Tensor


def row_stats_ref(logits: Tensor, top: int = TOP) -> RowStats:
    """logits: `[N, V]` in any float type, V at least `top`. Equal logits rank by id, lowest first.

    entropy = lse - sum(exp(z - lse) z), with impossible tokens (-inf) adding nothing.
    """
    rows = logits.float()
    # a stable sort keeps equal logits in the order of their ids; topk promises nothing
    order = rows.sort(dim=-1, descending=True, stable=True)
    top_logit, top_id = order.values[:, :top], order.indices[:, :top].int()
    lse = rows.logsumexp(-1)
    p = (rows - lse[:, None]).exp()
    entropy = lse - (p * rows.masked_fill(p == 0, 0.0)).sum(-1)
    return RowStats(top_id, top_logit, lse, entropy, top_logit[:, 0] - top_logit[:, 1])


class StatParts(NamedTuple):
    """What P programs leave of N rows: values fp32 `[P, 3 + TOP, N]`, which are the largest logit, the sum of
    e = exp(z - largest), the sum of z e, and the TOP largest logits; ids int32 `[P, TOP, N]` of those."""

    values: Tensor
    ids: Tensor

    def sized(self, programs: int, rows: int) -> "StatParts":
        """The same memory for a launch of so many programs and rows, no more in all than it was made for."""
        count = programs * rows
        values = self.values.view(-1)[: count * (3 + TOP)].view(programs, 3 + TOP, rows)
        return StatParts(values, self.ids.view(-1)[: count * TOP].view(programs, TOP, rows))


def empty_parts(programs: int, rows: int, device: torch.device) -> StatParts:
    """Room for the parts of a launch."""
    values = torch.empty(programs, 3 + TOP, rows, dtype=torch.float32, device=device)
    return StatParts(values, torch.empty(programs, TOP, rows, dtype=torch.int32, device=device))


@triton.jit
def add_logit(peak, total, weighted, z):
    """Sums of exponentials relative to the largest logit, and one more logit in each; -inf is an impossible one."""
    # whichever of the two is smaller shrinks, so one exponential is enough
    shrink = tl.where(z == float("-inf"), 0.0, tl.exp(-tl.abs(peak - z)))
    is_peak, weight = z > peak, tl.where(z == float("-inf"), 0.0, z)
    total = tl.where(is_peak, total * shrink + 1.0, total + shrink)
    weighted = tl.where(is_peak, weighted * shrink + weight, weighted + weight * shrink)
    return tl.maximum(peak, z), total, weighted


@triton.jit
def grow_top(a, a_id, b, b_id, c, c_id, z, z_id):
    """The three largest of a >= b >= c and z. At ties what came first stays, so ids must come in their order."""
    first, second, third = z > a, z > b, z > c
    new_c = tl.where(second, b, tl.where(third, z, c))
    new_c_id = tl.where(second, b_id, tl.where(third, z_id, c_id))
    new_b, new_b_id = tl.where(first, a, tl.where(second, z, b)), tl.where(first, a_id, tl.where(second, z_id, b_id))
    return tl.where(first, z, a), tl.where(first, z_id, a_id), new_b, new_b_id, new_c, new_c_id


@triton.jit
def best_place(a, a_id):
    """The largest of `[BLOCK, ROWS]` along the first axis, its id, the lowest at ties, and where it is."""
    top = tl.max(a, 0)
    top_id = tl.min(tl.where(a == top[None, :], a_id, 2147483647), 0)
    return top, top_id, (a == top[None, :]) & (a_id == top_id[None, :])


@triton.jit
def take_top(a, a_id, b, b_id, c, c_id):
    """The largest of all `[BLOCK, ROWS]` places and its id, each `[ROWS]`, and the places without it."""
    top, top_id, at = best_place(a, a_id)
    a, a_id = tl.where(at, b, a), tl.where(at, b_id, a_id)
    b, b_id = tl.where(at, c, b), tl.where(at, c_id, b_id)
    return top, top_id, a, a_id, b, b_id, tl.where(at, float("-inf"), c), tl.where(at, 2147483647, c_id)


@triton.jit
def sum_places(peak, total, weighted):
    """The sums of all `[BLOCK, ROWS]` places as one, each `[ROWS]`."""
    top = tl.max(peak, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.exp(peak - base[None, :])
    return top, tl.sum(total * shrink, 0), tl.sum(weighted * shrink, 0)


@triton.jit
def fold_stats(logits, token, ok, peak, total, weighted, a, a_id, b, b_id, c, c_id):
    """A tile of logits `[BLOCK, ROWS]` into the running statistics of every place."""
    z = tl.where(ok[:, None], logits, float("-inf"))
    peak, total, weighted = add_logit(peak, total, weighted, z)
    a, a_id, b, b_id, c, c_id = grow_top(a, a_id, b, b_id, c, c_id, z, token[:, None] + tl.zeros_like(a_id))
    return peak, total, weighted, a, a_id, b, b_id, c, c_id


@triton.jit
def store_stats(values_ptr, ids_ptr, program, peak, total, weighted, a, a_id, b, b_id, c, c_id, ROWS: tl.constexpr):
    """Leave one part a row of the statistics of all places."""
    values_ptr += program * (6 * ROWS) + tl.arange(0, ROWS)
    ids_ptr += program * (3 * ROWS) + tl.arange(0, ROWS)
    peak, total, weighted = sum_places(peak, total, weighted)
    tl.store(values_ptr, peak)
    tl.store(values_ptr + ROWS, total)
    tl.store(values_ptr + 2 * ROWS, weighted)
    for place in tl.static_range(3):
        top, top_id, a, a_id, b, b_id, c, c_id = take_top(a, a_id, b, b_id, c, c_id)
        tl.store(values_ptr + (3 + place) * ROWS, top)
        tl.store(ids_ptr + place * ROWS, top_id)


@triton.jit
def whole_row(values_ptr, ids_ptr, row, live, ROWS: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    """The statistics of one row `[1]` from all parts: lse, entropy, and the three largest with their ids. A row with a
    NaN has a NaN in lse and entropy. live: whether the parts are there; without it nothing is read."""
    part = tl.arange(0, BLOCK_P)
    ok = (part < tl.where(live, NUM_PARTS, 0))[:, None]
    values = values_ptr + part[:, None] * (6 * ROWS) + row[None, :]
    ids = ids_ptr + part[:, None] * (3 * ROWS) + row[None, :]
    # all loads before the first is used
    peak = tl.load(values, mask=ok, other=float("-inf"))
    total = tl.load(values + ROWS, mask=ok, other=0.0)
    weighted = tl.load(values + 2 * ROWS, mask=ok, other=0.0)
    a = tl.load(values + 3 * ROWS, mask=ok, other=float("-inf"))
    b = tl.load(values + 4 * ROWS, mask=ok, other=float("-inf"))
    c = tl.load(values + 5 * ROWS, mask=ok, other=float("-inf"))
    a_id = tl.load(ids, mask=ok, other=2147483647)
    b_id = tl.load(ids + ROWS, mask=ok, other=2147483647)
    c_id = tl.load(ids + 2 * ROWS, mask=ok, other=2147483647)
    peak, total, weighted = sum_places(peak, total, weighted)
    lse = peak + tl.log(total)
    first, first_id, a, a_id, b, b_id, c, c_id = take_top(a, a_id, b, b_id, c, c_id)
    second, second_id, a, a_id, b, b_id, c, c_id = take_top(a, a_id, b, b_id, c, c_id)
    third, third_id, _ = best_place(a, a_id)
    return lse, lse - weighted / total, first, first_id, second, second_id, third, third_id
