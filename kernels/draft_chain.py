"""The small kernels between the passes of a draft model whose steps are part of a captured round.

begin_draft_kernel lays out the rows that the draft model reads first, and opens the chain that the target will verify;
take_draft_kernel puts each step's pick into that chain and makes it the next step's row. Where a step's rows stand
follows from the sequence's length on the device, so nothing here asks the host.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pad_engine.kernels.accept_path import best_of_parts
from pad_engine.kernels.row_tiles import OFF

_TILE = 1024  # of partial results in one step


def begin_draft_ref(ids: Tensor, skip: int, rows: int, capacity: int, vocab_size: int) -> tuple[Tensor, Tensor, int]:
    """The rows that a draft model reads of a sequence: its last `rows` ids but for the last `skip`, or all there are.

    ids: int `[L]`. capacity: tokens that the draft model's cache can hold; a sequence that has outgrown it is read at
    the wrong place, whose rows nobody uses. An id that the draft model does not know is read as 0: that costs
    acceptance, nothing else. Returns the rows' tokens int32 `[n]`, their depths int32 `[n]`, and how many tokens come
    before them in the cache.
    """
    held = max(len(ids) - skip, 0)
    count = min(rows, held)
    tokens = ids[held - count : held]
    return torch.where(tokens < vocab_size, tokens, 0).int(), torch.arange(count).int(), min(held, capacity) - count


def chain_length_ref(held: int, limit: int, depth: int, done: bool) -> int:
    """Tokens of a draft: the last one that the sequence may hold is never drafted."""
    return 0 if done else max(min(depth, limit - held - 1), 0)


@triton.jit
def write_links(parent_ptr, depth_ptr, mask_bits_ptr, seq_start_ptr, count, NUM_ROWS: tl.constexpr):
    """The forest of one chain: `count` tokens behind the root; the rows after them go on as padding."""
    i = tl.arange(0, triton.next_power_of_2(NUM_ROWS))
    tl.store(parent_ptr + i, i - 1, mask=i < NUM_ROWS)
    tl.store(depth_ptr + i, i, mask=i < NUM_ROWS)
    tl.store(mask_bits_ptr + i, (tl.full([1], 2, tl.int64) << i) - 1, mask=i < NUM_ROWS)
    tl.store(seq_start_ptr, 0)
    tl.store(seq_start_ptr + 1, 1 + count)


@triton.jit
def begin_draft_kernel(
    ids_ptr,
    cache_len_ptr,
    limit_ptr,
    done_ptr,
    skip_ptr,
    row_token_ptr,
    row_parent_ptr,
    row_depth_ptr,
    row_mask_ptr,
    row_start_ptr,
    draft_len_ptr,
    token_ptr,
    parent_ptr,
    depth_ptr,
    mask_bits_ptr,
    seq_start_ptr,
    capacity,
    vocab_size,
    FEED: tl.constexpr,
    ROWS: tl.constexpr,
    CHAIN_ROWS: tl.constexpr,
    CHAIN: tl.constexpr,
    DEPTH: tl.constexpr,
):
    ids_held = tl.load(cache_len_ptr) + 1
    held = ids_held
    if skip_ptr is not None:
        held = tl.maximum(held - tl.load(skip_ptr), 0)
    count = tl.minimum(held, FEED)
    row = tl.arange(0, triton.next_power_of_2(ROWS))
    token = tl.load(ids_ptr + held - count + row, mask=row < count, other=0)
    tl.store(row_token_ptr + row, tl.where(token < vocab_size, token, 0), mask=row < ROWS)
    write_links(row_parent_ptr, row_depth_ptr, row_mask_ptr, row_start_ptr, count - 1, ROWS)
    tl.store(draft_len_ptr, tl.minimum(held, capacity) - count)
    if CHAIN:
        drafted = tl.maximum(tl.minimum(tl.load(limit_ptr) - ids_held - 1, DEPTH), 0)
        i = tl.arange(0, triton.next_power_of_2(CHAIN_ROWS))
        # picks take the places behind the root as they come
        tl.store(token_ptr + i, tl.load(ids_ptr + ids_held - 1) + i * 0, mask=i < CHAIN_ROWS)
        drafted = tl.where(tl.load(done_ptr) == 0, drafted, 0)
        write_links(parent_ptr, depth_ptr, mask_bits_ptr, seq_start_ptr, drafted, CHAIN_ROWS)


@triton.jit
def take_draft_kernel(
    part_score_ptr,
    part_id_ptr,
    part_stride,
    row_start_ptr,
    cache_len_ptr,
    row_token_ptr,
    draft_len_ptr,
    token_ptr,
    seq_start_ptr,
    capacity,
    STEP: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    # written before the pass whose parts these are, so it needs no wait
    last = tl.load(row_start_ptr + 1) - 1
    length = tl.load(cache_len_ptr)
    stop = tl.load(seq_start_ptr + 1)
    if PDL:
        gdc_wait()
    pick = tl.max(best_of_parts(part_score_ptr + last, part_id_ptr + last, part_stride, True, NUM_PARTS, BLOCK_P, 1), 0)
    token = tl.maximum(pick, 0)
    tl.store(token_ptr + STEP, token)
    tl.store(row_token_ptr, token)
    tl.store(draft_len_ptr, tl.minimum(length + STEP, capacity - 1))
    # a row that is not finite proposes nothing, and nothing comes behind it
    tl.store(seq_start_ptr + 1, tl.where(pick < 0, tl.minimum(stop, STEP), stop))


def begin_draft(
    ids: Tensor,
    cache_len: Tensor,
    limit: Tensor,
    done: Tensor,
    row_token: Tensor,
    row_parent: Tensor,
    row_depth: Tensor,
    row_mask: Tensor,
    row_start: Tensor,
    draft_len: Tensor,
    chain: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None,
    skip: Tensor | None,
    *,
    feed: int,
    depth: int,
    capacity: int,
    vocab_size: int,
) -> None:
    """Launch: the first rows of a draft (begin_draft_ref), for one sequence. int32 but where said otherwise.

    Read: ids `[1, .]`, of which cache_len + 1 are held; cache_len, limit (the most ids that it may hold), done (0 while
    it runs), all `[1]`; skip `[1]`, or None for 0. Written: of the rows, at most `feed`: row_token, row_parent,
    row_depth `[R]`, row_mask int64 `[R]` and row_start `[2]`, as in a Forest, and draft_len `[1]`. chain: token,
    parent, depth `[C]`, mask_bits int64 `[C]` and seq_start `[2]` of the forest that the target verifies, written: the
    root and room for chain_length_ref(..., depth) tokens; or None.
    """
    token, parent, chain_depth, mask_bits, seq_start = chain or (None, None, None, None, None)
    begin_draft_kernel[(1,)](
        ids_ptr=ids,
        cache_len_ptr=cache_len,
        limit_ptr=limit,
        done_ptr=done,
        skip_ptr=skip,
        row_token_ptr=row_token,
        row_parent_ptr=row_parent,
        row_depth_ptr=row_depth,
        row_mask_ptr=row_mask,
        row_start_ptr=row_start,
        draft_len_ptr=draft_len,
        token_ptr=token,
        parent_ptr=parent,
        depth_ptr=chain_depth,
        mask_bits_ptr=mask_bits,
        seq_start_ptr=seq_start,
        capacity=capacity,
        vocab_size=vocab_size,
        FEED=feed,
        ROWS=len(row_token),
        CHAIN_ROWS=1 if token is None else len(token),
        CHAIN=token is not None,
        DEPTH=depth,
        num_warps=1,
    )


def take_draft(
    part_score: Tensor,
    part_id: Tensor,
    row_start: Tensor,
    cache_len: Tensor,
    row_token: Tensor,
    draft_len: Tensor,
    token: Tensor,
    seq_start: Tensor,
    *,
    step: int,
    capacity: int,
    pdl: int,
) -> None:
    """Launch: take the pick of the last of a draft pass's rows as the step-th drafted token, step >= 1.

    Read: part_score fp32 and part_id int32 `[P, R]`, what the LM head left; row_start and cache_len as in begin_draft.
    Written: token `[C]` at place `step`, row_token `[.]` at place 0 and draft_len `[1]`, the next pass's row and where
    it stands. seq_start `[2]` is cut where the row was not finite.
    """
    parts = len(part_score)
    take_draft_kernel[(1,)](
        part_score_ptr=part_score,
        part_id_ptr=part_id,
        part_stride=part_score.stride(0),
        row_start_ptr=row_start,
        cache_len_ptr=cache_len,
        row_token_ptr=row_token,
        draft_len_ptr=draft_len,
        token_ptr=token,
        seq_start_ptr=seq_start,
        capacity=capacity,
        STEP=step,
        NUM_PARTS=parts,
        BLOCK_P=min(_TILE, triton.next_power_of_2(parts)),
        PDL=pdl != OFF,
        num_warps=4,
        launch_pdl=pdl != OFF,
    )
