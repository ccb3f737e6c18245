"""What comes between the passes of a draft model that grows a tree on the device (trees/best_first.py).

The kernel turns what the LM head left of a level's rows into candidates, and lays out the best of them as rows of the
next pass, which reads them beside all rows before it. Next file: keep_nodes.py, for when all levels are there.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pad_engine.kernels.row_stats import TOP, RowStats, StatParts, whole_row
from pad_engine.kernels.row_tiles import OFF, release_dependents, wait_for_inputs

_TOP = tl.constexpr(TOP)


class Candidates(NamedTuple):
    """Tokens that may follow, C at most, level by level: token, parent (a candidate before it, -1 behind the root) and
    depth int32 `[C]`, log_prob fp32 `[C]` of the whole path, -inf for one that does not count. row: int32 `[R]`, the
    candidate of each row that was read. node: int32 `[C]`, the kernels' own."""

    token: Tensor
    parent: Tensor
    depth: Tensor
    log_prob: Tensor
    row: Tensor
    node: Tensor


def empty_candidates(count: int, rows: int, device: torch.device) -> Candidates:
    """Room for so many."""

    def numbers(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return Candidates(
        numbers(count), numbers(count), numbers(count), numbers(count, torch.float32), numbers(rows), numbers(count)
    )


def rank_level_ref(stats: RowStats, parent: Tensor, log_prob: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The candidates behind rows of one level: token, parent and log_prob `[3 n]`, those of one row together.

    stats: of the rows. parent: `[n]`, each row's own candidate; log_prob: fp32 `[n]` of it. A row that is not finite
    has candidates at -inf, and token 0.
    """
    values = log_prob[:, None] + (stats.top_logit - stats.lse[:, None])
    ok = values.isfinite()
    token = torch.where(ok, stats.top_id, 0)
    return token.flatten(), parent.repeat_interleave(TOP), torch.where(ok, values, -torch.inf).flatten()


def best_ref(log_prob: Tensor, count: int) -> list[int]:
    """The `count` largest of fp32 `[n]`, of equals the first, in the order of their places."""
    order = sorted(range(len(log_prob)), key=lambda place: (-float(log_prob[place]), place))
    return sorted(order[:count])


@triton.jit
def places_before(log_prob, place):
    """int32 `[B]`: how many of `[B]` numbers come before each, the larger first, of equals the first."""
    ahead = (log_prob[None, :] > log_prob[:, None]) | (
        (log_prob[None, :] == log_prob[:, None]) & (place[None, :] < place[:, None])
    )
    return tl.sum(ahead.to(tl.int32), 1)


@triton.jit
def store_candidate(token_ptr, parent_ptr, depth_ptr, log_prob_ptr, place, token, parent, depth, log_prob, counts):
    """One candidate; what is not finite or does not count is at -inf."""
    ok = counts & (log_prob > float("-inf")) & (log_prob < float("inf"))
    tl.store(token_ptr + place, tl.where(ok, token, 0))
    tl.store(parent_ptr + place, parent)
    tl.store(depth_ptr + place, depth)
    tl.store(log_prob_ptr + place, tl.where(ok, log_prob, float("-inf")))


@triton.jit
def lay_out_level(
    token_ptr,
    log_prob_ptr,
    row_ptr,
    row_token_ptr,
    row_depth_ptr,
    row_mask_ptr,
    row_start_ptr,
    FIRST: tl.constexpr,
    NEW: tl.constexpr,
    LEVEL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The best WIDTH of the candidates from FIRST on, as rows of the next pass, behind those of earlier levels."""
    place = tl.arange(0, triton.next_power_of_2(NEW * _TOP))
    ok = place < NEW * _TOP
    # written by other programs of this launch, so not from this core's cache
    log_prob = tl.load(log_prob_ptr + FIRST + place, mask=ok, other=float("-inf"), cache_modifier=".cg")
    chosen = ok & (places_before(tl.where(ok, log_prob, float("-inf")), place) < WIDTH)
    slot = tl.cumsum(chosen.to(tl.int32), 0) - 1
    row = (LEVEL - 1) * WIDTH + slot
    bits = tl.full([1], 1, tl.int64) << row.to(tl.int64)
    if LEVEL > 1:
        bits |= tl.load(row_mask_ptr + (LEVEL - 2) * WIDTH + place // _TOP, mask=chosen, other=0)
    token = tl.load(token_ptr + FIRST + place, mask=chosen, other=0, cache_modifier=".cg")
    tl.store(row_ptr + row, FIRST + place, mask=chosen)
    tl.store(row_token_ptr + row, token, mask=chosen)
    # the first row behind the prefix is one step behind the root
    tl.store(row_depth_ptr + row, place * 0 + (LEVEL - 1), mask=chosen)
    tl.store(row_mask_ptr + row, bits, mask=chosen)
    tl.store(row_start_ptr + 1, LEVEL * WIDTH)


@triton.jit
def rank_level_kernel(
    values_ptr,
    value_ids_ptr,
    passed_start_ptr,
    cache_len_ptr,
    limit_ptr,
    done_ptr,
    draft_len_ptr,
    token_ptr,
    parent_ptr,
    depth_ptr,
    log_prob_ptr,
    row_ptr,
    row_token_ptr,
    row_depth_ptr,
    row_mask_ptr,
    row_start_ptr,
    ticket_ptr,
    max_len,
    ROWS: tl.constexpr,
    NEW: tl.constexpr,
    FIRST: tl.constexpr,
    LEVEL: tl.constexpr,
    WIDTH: tl.constexpr,
    GROWS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    new, one = tl.program_id(0), tl.arange(0, 1)
    held = tl.load(cache_len_ptr) + 1
    counts = (tl.load(done_ptr) == 0) & (held + LEVEL < tl.load(limit_ptr))
    parent, before = one * 0 - 1, one.to(tl.float32) * 0.0
    row = tl.load(passed_start_ptr + 1) - 1 + one
    if LEVEL > 1:
        row = (LEVEL - 2) * WIDTH + new + one
        parent = tl.load(row_ptr + row)
        before = tl.load(log_prob_ptr + parent)
    wait_for_inputs(PDL)
    lse, _, z1, id1, z2, id2, z3, id3 = whole_row(values_ptr, value_ids_ptr, row, True, ROWS, NUM_PARTS, BLOCK_P)
    place = FIRST + new * _TOP + one
    ptrs = (token_ptr, parent_ptr, depth_ptr, log_prob_ptr)
    depth = one * 0 + LEVEL
    store_candidate(ptrs[0], ptrs[1], ptrs[2], ptrs[3], place, id1, parent, depth, before + (z1 - lse), counts)
    store_candidate(ptrs[0], ptrs[1], ptrs[2], ptrs[3], place + 1, id2, parent, depth, before + (z2 - lse), counts)
    store_candidate(ptrs[0], ptrs[1], ptrs[2], ptrs[3], place + 2, id3, parent, depth, before + (z3 - lse), counts)
    if GROWS:
        tl.debug_barrier()  # all threads' stores come before the one thread's release
        if tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu") == NEW - 1:
            tl.store(ticket_ptr, 0)  # for the next launch
            tl.store(draft_len_ptr, tl.minimum(held, max_len))
            lay_out_level(
                token_ptr, log_prob_ptr, row_ptr, row_token_ptr, row_depth_ptr, row_mask_ptr, row_start_ptr, FIRST, NEW,
                LEVEL, WIDTH,
            )  # fmt: skip


def rank_level(
    stats: StatParts,
    passed_start: Tensor,
    cache_len: Tensor,
    limit: Tensor,
    done: Tensor,
    draft_len: Tensor,
    candidates: Candidates,
    row_token: Tensor,
    row_depth: Tensor,
    row_mask: Tensor,
    row_start: Tensor,
    ticket: Tensor,
    *,
    level: int,
    width: int,
    last: bool,
    max_len: int,
    pdl: int,
) -> None:
    """Launch: the candidates of one level, >= 1, of one sequence (rank_level_ref), and the next pass's rows.

    Read: stats, what the LM head left of the pass's rows: at level 1 the last of passed_start `[2]`'s rows is ranked,
    later rows (level - 2) * width and on. cache_len, limit and done int32 `[1]`: deeper candidates than the sequence
    may take are at -inf. Written: candidates, 3 a row; unless it is the last level, the best `width` of them
    (best_ref) as rows (level - 1) * width and on of row_token, row_depth int32 and row_mask int64 `[R]`, row_start
    `[2]`, and draft_len `[1]`: how many tokens come before them, max_len at most. ticket int32 `[1]`: zero before and
    after.
    """
    programs, _, rows = stats.values.shape
    new = 1 if level == 1 else width
    rank_level_kernel[(new,)](
        values_ptr=stats.values,
        value_ids_ptr=stats.ids,
        passed_start_ptr=passed_start,
        cache_len_ptr=cache_len,
        limit_ptr=limit,
        done_ptr=done,
        draft_len_ptr=draft_len,
        token_ptr=candidates.token,
        parent_ptr=candidates.parent,
        depth_ptr=candidates.depth,
        log_prob_ptr=candidates.log_prob,
        row_ptr=candidates.row,
        row_token_ptr=row_token,
        row_depth_ptr=row_depth,
        row_mask_ptr=row_mask,
        row_start_ptr=row_start,
        ticket_ptr=ticket,
        max_len=max_len,
        ROWS=rows,
        NEW=new,
        FIRST=candidate_count(level - 1, width),
        LEVEL=level,
        WIDTH=width,
        GROWS=not last,
        NUM_PARTS=programs,
        BLOCK_P=triton.next_power_of_2(programs),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl != OFF,
    )


def candidate_count(levels: int, width: int) -> int:
    """How many candidates so many levels have."""
    return TOP * (1 + width * (levels - 1)) if levels else 0
