"""The second half of the attention: the parts that the splits of tree_attention.py left, put together.

It is a kernel of its own since a boundary between kernels takes less time than the last split of a head takes to know
that it is the last, and because all rows and heads can then be put together side by side (docs/performance.md). One
warp has one row and head, so that a split's weight is one number for all its threads.
"""

import triton
import triton.language as tl
from torch import Tensor

from pad_engine.kernels.attention_tiles import AttentionWorkspace, splits_at_work
from pad_engine.kernels.row_tiles import OFF, release_dependents, wait_for_inputs

AT_ONCE = 8  # parts that a program has on their way


def join_splits_ref(parts: Tensor, sums: Tensor) -> Tensor:
    """The meaning. parts: fp32 `[S, N, H, D]`, each split's weighted mean of the values that it saw. sums: fp32
    `[S, N, H]`, log2 of the sum of its weights, -inf where it saw none. Returns fp32 `[N, H, D]`, the mean over all."""
    weights = (sums - sums.max(0).values).exp2()
    return (weights[..., None] * parts).sum(0) / weights.sum(0)[..., None]


@triton.jit
def take_in_parts(
    part_ptr,
    sums_ptr,
    first,
    count,
    place,
    plane,
    peak,
    total,
    acc,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """AT_ONCE splits from `first` on, those of them below `count`, taken into the softmax of one row and head, step by
    step (Milakov and Gimelshein 2018). No load waits for another. plane: rows of D from a split's to the next one's."""
    width = tl.arange(0, BLOCK_D)
    for number in tl.static_range(AT_ONCE):
        split = first + number
        at = split * plane + place
        # where there is none, the first one's sum is read once more
        own = tl.load(sums_ptr + tl.where(split < count, at, place))
        own = tl.where(split < count, own, float("-inf"))
        there = (width < D) & (tl.full((BLOCK_D,), split, tl.int32) < count)
        part = tl.load(part_ptr + at * D + width, mask=there, other=0.0)
        new_peak = tl.maximum(peak, own)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen nothing yet
        shrink, weight = tl.exp2(peak - base), tl.exp2(own - base)
        peak, total, acc = new_peak, total * shrink + weight, acc * shrink + part * weight
    return peak, total, acc


@triton.jit
def join_splits_kernel(
    part_ptr,
    sums_ptr,
    out_ptr,
    seq_ptr,
    start_ptr,
    length_ptr,
    ring,
    chunk_step,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    OWN: tl.constexpr,
    STRICT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    row, width = tl.program_id(0), tl.arange(0, BLOCK_D)
    seq = tl.load(seq_ptr + row)
    first = tl.load(start_ptr + seq)
    rows = tl.load(start_ptr + seq + 1) - first
    _, active = splits_at_work(tl.load(length_ptr + seq), rows, ring, chunk_step, SPLITS, STRICT)
    # the padding behind the last sequence's rows has none
    count = tl.where(row < first + rows, active + OWN, 0)
    first_place = row * HEADS + tl.program_id(1) * EACH
    wait_for_inputs(PDL)
    for number in tl.static_range(EACH):
        place = first_place + number
        peak, total = float("-inf"), 0.0
        acc = tl.zeros((BLOCK_D,), tl.float32)
        for begin in tl.range(0, count, AT_ONCE):
            peak, total, acc = take_in_parts(
                part_ptr, sums_ptr, begin, count, place, ROWS * HEADS, peak, total, acc, D, BLOCK_D, AT_ONCE
            )
        if count > 0:
            tl.store(out_ptr + place * D + width, (acc / total).to(out_ptr.dtype.element_ty), mask=width < D)


def join_splits(
    workspace: AttentionWorkspace,
    out: Tensor,
    seq: Tensor,
    seq_start: Tensor,
    cache_len: Tensor,
    *,
    ring: int,
    chunk: int,
    heads: int,
    head_dim: int,
    splits: int,
    own: bool,
    strict: bool,
    pdl: int,
) -> None:
    """Launch behind tree_attention_kernel, with what it was given: writes out `[N, H D]`, but for padding.

    seq: int32 `[N]`, seq_start: int32 `[S + 1]`, cache_len: int32 `[S]`, as of tree_attention. ring: slots of a prefix.
    chunk: the chunk_step, splits: without the pass's own rows, which have one more where own.
    """
    n = out.shape[0]
    # heads of a program; on a CPU, where each is interpreted, which costs by the program, all
    each = heads if out.device.type == "cpu" else 1
    join_splits_kernel[(n, heads // each)](
        part_ptr=workspace.parts,
        sums_ptr=workspace.sums,
        out_ptr=out,
        seq_ptr=seq,
        start_ptr=seq_start,
        length_ptr=cache_len,
        ring=ring,
        chunk_step=chunk,
        ROWS=n,
        HEADS=heads,
        D=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        SPLITS=splits,
        OWN=own,
        STRICT=strict,
        AT_ONCE=min(AT_ONCE, splits + own),
        EACH=each,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl != OFF,
    )
