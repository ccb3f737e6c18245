"""Prompt lookup on the device: what followed the same words earlier in the sequence, as a chain of drafted tokens.

The meaning is that of drafters/ngram.py with a chain, but every earlier place is looked at, not the latest few. All
programs put the best match that they see into one key, and the last of them to arrive writes the chain.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pad_engine.kernels.draft_chain import write_links

MAX_MATCH = 32  # a longer match counts as one of this length
# places that a program looks at in one step, and the most programs: enough for all to be on the device at once
_BLOCK, _MAX_PROGRAMS = 256, 128

_MAX_MATCH = tl.constexpr(MAX_MATCH)


def ngram_match_ref(ids: Tensor, min_match: int) -> tuple[int, int]:
    """The longest earlier occurrence of the end of ids `[L]`, and of equally long ones the latest.

    Returns (length, place), min_match <= length <= min(MAX_MATCH, place): ids[place - length : place] equals the last
    `length` ids, and ids[place] followed. (0, 0) if there is none.
    """
    held = ids.tolist()
    best = (0, 0)
    for place in range(min_match, len(held)):
        length = 0
        while length < min(MAX_MATCH, place) and held[place - 1 - length] == held[-1 - length]:
            length += 1
        if length >= min_match:
            best = max(best, (length, place))
    return best


def ngram_lookup_ref(ids: Tensor, min_match: int, count: int) -> Tensor:
    """The root, which is the last of ids `[L]`, and the `count` tokens that may follow it, int32 `[1 + count]`.

    They are what followed the best match; where that reaches the end of the sequence its period repeats. Without a
    match there is the root alone.
    """
    length, place = ngram_match_ref(ids, min_match)
    follow = place + torch.arange(count if length else 0) % max(len(ids) - place, 1)
    return torch.cat([ids[-1:], ids[follow]]).int()


@triton.jit
def longest_match(ids_ptr, held, place, MIN_MATCH: tl.constexpr):
    """int64: the largest `length << 32 | place` of the places that match the end of the `held` ids; 0 if none does."""
    inside = (place >= MIN_MATCH) & (place < held)
    found = inside
    for i in tl.static_range(MIN_MATCH):
        end = tl.load(ids_ptr + held - 1 - i, mask=i < held, other=-1)
        found &= tl.load(ids_ptr + place - 1 - i, mask=inside, other=-1) == end
    length = tl.where(found, MIN_MATCH, 0)
    if tl.max(length) > 0:
        longer = found
        for i in tl.static_range(MIN_MATCH, _MAX_MATCH):
            end = tl.load(ids_ptr + held - 1 - i, mask=i < held, other=-1)
            # not masked by what is known of the match so far, or each load would wait for the one before
            longer &= tl.load(ids_ptr + place - 1 - i, mask=found & (place > i), other=-2) == end
            length += longer.to(tl.int32)
    return tl.max(tl.where(length > 0, (length.to(tl.int64) << 32) + place, 0))


@triton.jit
def write_chain(
    ids_ptr,
    token_ptr,
    parent_ptr,
    depth_ptr,
    mask_bits_ptr,
    seq_start_ptr,
    held,
    place,
    count,
    NUM_ROWS: tl.constexpr,
):
    """A chain of the root and `count` tokens from `place` on; a match that reaches the end repeats its period."""
    i = tl.arange(0, triton.next_power_of_2(NUM_ROWS))
    follow = place + (i - 1) % tl.maximum(held - place, 1)
    token = tl.load(ids_ptr + tl.where((i > 0) & (i <= count), follow, held - 1))
    tl.store(token_ptr + i, token, mask=i < NUM_ROWS)
    write_links(parent_ptr, depth_ptr, mask_bits_ptr, seq_start_ptr, count, NUM_ROWS)


@triton.jit
def ngram_lookup_kernel(
    ids_ptr,
    cache_len_ptr,
    limit_ptr,
    max_depth_ptr,
    done_ptr,
    token_ptr,
    parent_ptr,
    depth_ptr,
    mask_bits_ptr,
    seq_start_ptr,
    best_ptr,
    ticket_ptr,
    MIN_MATCH: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    held = tl.load(cache_len_ptr) + 1
    best = tl.full([], 0, tl.int64)
    first = tl.program_id(0) * BLOCK
    while first < held:
        best = tl.maximum(best, longest_match(ids_ptr, held, first + tl.arange(0, BLOCK), MIN_MATCH))
        first += NUM_PROGRAMS * BLOCK
    # thread 0 does all scalar accesses, so its ticket releases its key
    tl.atomic_max(best_ptr, best, mask=best > 0, sem="relaxed")
    if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == NUM_PROGRAMS - 1:
        tl.store(ticket_ptr, 0)
        best = tl.atomic_xchg(best_ptr, 0, sem="relaxed")
        count = tl.minimum(tl.minimum(tl.load(max_depth_ptr), tl.load(limit_ptr) - held - 1), NUM_ROWS - 1)
        count = tl.where((best > 0) & (tl.load(done_ptr) == 0), tl.maximum(count, 0), 0)
        write_chain(
            ids_ptr,
            token_ptr,
            parent_ptr,
            depth_ptr,
            mask_bits_ptr,
            seq_start_ptr,
            held,
            (best & 0x7FFFFFFF).to(tl.int32),
            count,
            NUM_ROWS,
        )


def ngram_lookup(
    ids: Tensor,
    cache_len: Tensor,
    limit: Tensor,
    max_depth: Tensor,
    done: Tensor,
    token: Tensor,
    parent: Tensor,
    depth: Tensor,
    mask_bits: Tensor,
    seq_start: Tensor,
    best: Tensor,
    ticket: Tensor,
    min_match: int = 2,
    pdl: bool = False,
) -> None:
    """Launch: draft a chain for one sequence. int32 but where said otherwise.

    Read: ids `[1, capacity]`, of which cache_len + 1 are held, the last being the root; cache_len, limit (the most ids
    that it may hold), max_depth (the most tokens to draft) and done `[1]`. Written: token, parent, depth `[R]` and
    mask_bits int64 `[R]`, R <= 64, as in a Forest, and seq_start `[2]`: 0 and the number of rows of the chain. That is
    1 + K, K <= max_depth, limit - held - 1 and R - 1, or 1 without a match or when done; the rows behind it go on as a
    chain of roots. best int64 `[1]` and ticket `[1]`: zero before and after. min_match: the shortest match, 1 to
    MAX_MATCH.
    """
    num_programs = min(triton.cdiv(ids.shape[1], _BLOCK), _MAX_PROGRAMS)
    ngram_lookup_kernel[(num_programs,)](
        ids_ptr=ids,
        cache_len_ptr=cache_len,
        limit_ptr=limit,
        max_depth_ptr=max_depth,
        done_ptr=done,
        token_ptr=token,
        parent_ptr=parent,
        depth_ptr=depth,
        mask_bits_ptr=mask_bits,
        seq_start_ptr=seq_start,
        best_ptr=best,
        ticket_ptr=ticket,
        MIN_MATCH=min_match,
        NUM_ROWS=len(token),
        NUM_PROGRAMS=num_programs,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
