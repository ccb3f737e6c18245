"""Commit of accepted rows: copy their keys and values from the scratch into the prefix, over all layers at once."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def kv_commit_ref(buffer: Tensor, source: Sequence[int], target: Sequence[int]) -> None:
    """Copy slots of `buffer` `[layers, 2, kv_heads, slots, head_dim]` in place: target[i] takes what source[i] held.

    Sources and targets must not overlap.
    """
    if not source:
        return
    moved = buffer.index_select(3, torch.tensor(source, device=buffer.device))
    buffer.index_copy_(3, torch.tensor(target, device=buffer.device), moved)


@triton.jit
def kv_commit_kernel(
    buffer_ptr,
    path_ptr,
    seq_start_ptr,
    old_len_ptr,
    n_commit_ptr,
    NUM_SEQS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    SCRATCH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    plane, seq = tl.program_id(0), tl.program_id(1)
    i, d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    count, old_len = tl.load(n_commit_ptr + seq), tl.load(old_len_ptr + seq)
    # behind n_commit the path holds what an earlier round left
    row = tl.load(path_ptr + seq * BLOCK_R + i) - tl.load(seq_start_ptr + seq)
    if count == 0:
        return
    # a ring keeps the last of many rows only
    RING: tl.constexpr = SLOTS - SCRATCH
    kept = (i < count) & (i >= count - RING)
    mask = kept[:, None] & (d < HEAD_DIM)[None, :]
    head = ((plane // NUM_HEADS) * NUM_SEQS + seq).to(tl.int64) * NUM_HEADS + plane % NUM_HEADS
    base = buffer_ptr + head * (SLOTS * HEAD_DIM) + d[None, :]
    source, target = SCRATCH - 1 - row, SCRATCH + (old_len + i) % RING
    tile = tl.load(base + source.to(tl.int64)[:, None] * HEAD_DIM, mask=mask)
    tl.store(base + target.to(tl.int64)[:, None] * HEAD_DIM, tile, mask=mask)


def kv_commit(
    buffer: Tensor,
    path: Tensor,
    seq_start: Tensor,
    old_len: Tensor,
    n_commit: Tensor,
    scratch: int,
    pdl: bool = False,
) -> None:
    """Launch: move the first n_commit rows of each sequence's path from the scratch behind its prefix, in all layers.

    buffer: `[layers, 2, S, kv_heads, scratch + ring, head_dim]` of one window, contiguous, head_dim a multiple of 8.
    path: int32 `[S, B]` rows of the forest, B a power of two, of which sequence s's begin at seq_start[s], int32
    `[S + 1]`. old_len, n_commit: int32 `[S]`. Row r of a sequence lies in slot scratch - 1 - r, and the i-th row of its
    path goes to slot scratch + (old_len + i) % ring.
    """
    layers, _, num_seqs, num_heads, slots, head_dim = buffer.shape
    kv_commit_kernel[(layers * 2 * num_heads, num_seqs)](
        buffer_ptr=buffer,
        path_ptr=path,
        seq_start_ptr=seq_start,
        old_len_ptr=old_len,
        n_commit_ptr=n_commit,
        NUM_SEQS=num_seqs,
        NUM_HEADS=num_heads,
        SLOTS=slots,
        SCRATCH=scratch,
        HEAD_DIM=head_dim,
        BLOCK_R=path.shape[1],
        BLOCK_D=triton.next_power_of_2(head_dim),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
