"""The end of a round in one kernel: from judgements of single nodes to the accepted path of each sequence, and on.

accept_kernel picks each row's token from the LM head's partial results, judges the nodes, appends the path's tokens and
the one after it to the sequence, decides whether the answer ends there, and tells the host by a ring of reports in
mapped memory. Next to read: accept_path.py for the meaning of the path, kv_commit.py, which moves the rows kept here.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pad_engine.kernels.accept_path import best_of_parts, cut_tokens, judge_pick, kept_path, path_tokens
from pad_engine.kernels.interpreted import INTERPRETED
from pad_engine.kernels.relaxed import TRACE_FIELDS, load_judged, next_history, write_trace

REPORT_HEADER = 4  # n_emitted, n_accepted, status and the rows of the tree come before a report's tokens
MAX_ROWS = 64  # of a forest: its mask is one int64 a row
TRACE_START = REPORT_HEADER + MAX_ROWS + 1  # of what a relaxed rule says of its overrides
REPORT_WIDTH = TRACE_START + TRACE_FIELDS * MAX_ROWS
_TILE = 1024  # of partial results in one step: two vectors of four for each of 128 threads

_HEADER, _WIDTH = tl.constexpr(REPORT_HEADER), tl.constexpr(REPORT_WIDTH)
_TRACE, _MAX_ROWS = tl.constexpr(TRACE_START), tl.constexpr(MAX_ROWS)


@triton.jit
def load_forest(token_ptr, parent_ptr, depth_ptr, mask_bits_ptr, row, NUM_ROWS: tl.constexpr):
    """token, parent, depth and mask_bits `[BLOCK_R]`."""
    token = tl.load(token_ptr + row, mask=row < NUM_ROWS, other=-1)
    parent = tl.load(parent_ptr + row, mask=row < NUM_ROWS, other=-1)
    depth = tl.load(depth_ptr + row, mask=row < NUM_ROWS, other=0)
    return token, parent, depth, tl.load(mask_bits_ptr + row, mask=row < NUM_ROWS, other=0)


@triton.jit
def load_sequence(seq_start_ptr, cache_len_ptr, limit_ptr, done_ptr, seq):
    """First row and the one behind the last, committed ids, most ids, and status."""
    start, stop = tl.load(seq_start_ptr + seq), tl.load(seq_start_ptr + seq + 1)
    return start, stop, tl.load(cache_len_ptr + seq), tl.load(limit_ptr + seq), tl.load(done_ptr + seq)


@triton.jit
def write_state(old_len_ptr, n_commit_ptr, cache_len_ptr, done_ptr, seq, length, count, status):
    """What the cache is to commit, its length after that, and whether the answer ends there."""
    tl.store(old_len_ptr + seq, length)
    tl.store(n_commit_ptr + seq, count)
    tl.store(cache_len_ptr + seq, length + count)
    tl.store(done_ptr + seq, status)


@triton.jit
def write_report(report_ptr, emitted, value, place, count, num_tokens, status, num_rows):
    """One sequence's part of a slot of the ring."""
    tl.store(report_ptr, count)
    tl.store(report_ptr + 1, tl.minimum(count, num_tokens - 1))
    tl.store(report_ptr + 2, status)
    tl.store(report_ptr + 3, num_rows)
    tl.store(report_ptr + _HEADER + place, value, mask=emitted)


@triton.jit
def store_release(pointer, value):
    """Store a 64-bit number once, behind all that the thread has written or seen, at system scope. An exchange would
    do, but is an atomic, which memory of the host need not allow."""
    if INTERPRETED:
        tl.store(pointer, value)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.u64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,l",
            [pointer.to(tl.int64), value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def publish(round_ptr, counter_ptr, ticket_ptr, round_index, NUM_SEQS: tl.constexpr):
    """Count the round and show it to the host, once the reports of all sequences are written.

    The barrier puts the stores of all threads before what thread 0, which does every scalar access, does next; a
    release at system scope then puts them before the counter for whoever sees the counter. The ticket does the same
    between the other programs and the last one.
    """
    tl.debug_barrier()
    if NUM_SEQS == 1:
        is_last = True
    else:
        is_last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="sys") == NUM_SEQS - 1
    if is_last:
        if NUM_SEQS > 1:
            tl.store(ticket_ptr, 0)
        tl.store(round_ptr, round_index + 1)
        rounds = (round_index + 1).to(counter_ptr.dtype.element_ty)
        store_release(counter_ptr, rounds)


@triton.jit
def accept_kernel(
    part_score_ptr,
    part_id_ptr,
    part_stride,
    token_ptr,
    parent_ptr,
    depth_ptr,
    mask_bits_ptr,
    seq_start_ptr,
    limit_ptr,
    end_ids_ptr,
    ids_ptr,
    ids_stride,
    cache_len_ptr,
    done_ptr,
    root_ptr,
    pick_ptr,
    path_ptr,
    old_len_ptr,
    n_commit_ptr,
    report_ptr,
    round_ptr,
    counter_ptr,
    ticket_ptr,
    judged_ptr,
    judged_id_ptr,
    scalars_ptr,
    history_ptr,
    passes,
    JUDGE: tl.constexpr,
    OVERRIDE: tl.constexpr,
    BY_CLASSIFIER: tl.constexpr,
    NUM_SEQS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_ENDS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    seq, row, end = tl.program_id(0), tl.arange(0, BLOCK_R), tl.arange(0, triton.next_power_of_2(NUM_ENDS))
    # nothing of this is written by the pass, so it needs no wait
    token, parent, depth, mask_bits = load_forest(token_ptr, parent_ptr, depth_ptr, mask_bits_ptr, row, NUM_ROWS)
    end_ids = tl.load(end_ids_ptr + end, mask=end < NUM_ENDS, other=-1)
    start, stop, length, limit, done = load_sequence(seq_start_ptr, cache_len_ptr, limit_ptr, done_ptr, seq)
    round_index = tl.load(round_ptr)
    report_ptr += ((round_index % RING) * NUM_SEQS + seq) * _WIDTH
    # The code runs once a round, and by then a pass's weights have pushed it out of every cache. So while the LM head
    # is still at work all of it is run once on nothing, and the second time its instructions are there.
    for step in range(passes):
        live = step == passes - 1
        if PDL:  # noqa: SIM102 - known to the compiler, unlike the next
            if live:
                gdc_wait()
        pick = best_of_parts(part_score_ptr, part_id_ptr, part_stride, live, NUM_PARTS, BLOCK_P, BLOCK_R)
        # a finished sequence has no rows, so nothing of it changes
        mine = (row >= start) & (row < tl.where(live & (done == 0), stop, start))
        judged, history = None, None
        if history_ptr is not None:
            history = tl.load(history_ptr + seq)
        if OVERRIDE is not None:
            judged = load_judged(judged_ptr, judged_id_ptr, row, NUM_ROWS)
        on_path, overrides = kept_path(
            pick, token, parent, depth, mask_bits, row, start, mine, judged, scalars_ptr, history, JUDGE, OVERRIDE,
            BY_CLASSIFIER,
        )  # fmt: skip
        value, place, end_token, num_tokens = path_tokens(pick, token, depth, on_path, row == start)
        count, status = cut_tokens(on_path, value, place, end_token, num_tokens, end_ids, length + 1, limit, done)
        emitted = on_path & (place < count)
        if OVERRIDE is not None:
            trace = report_ptr + _TRACE
            write_trace(trace, emitted & (row != start), emitted & overrides, depth, judged, _MAX_ROWS)
        tl.store(pick_ptr + row, pick, mask=mine)
        tl.store(path_ptr + seq * BLOCK_R + depth, row, mask=on_path)
        tl.store(ids_ptr + seq.to(tl.int64) * ids_stride + length + 1 + place, value, mask=emitted)
        tl.store(root_ptr + seq + row * 0, value, mask=emitted & (place == count - 1))
        if live:
            if history_ptr is not None:
                tl.store(history_ptr + seq, next_history(history, emitted & overrides, depth, count))
            write_state(old_len_ptr, n_commit_ptr, cache_len_ptr, done_ptr, seq, length, count, status)
            write_report(report_ptr, emitted, value, place, count, num_tokens, status, stop - start)
            publish(round_ptr, counter_ptr, ticket_ptr, round_index, NUM_SEQS)


class Relaxation(NamedTuple):
    """An override of accept_forest: a `@triton.jit` function of pad_engine/rules; by_classifier: whether its score is
    that of the classifier. values fp32 `[7, N]` and ids int32 `[3, N]`: JudgedRows (judge_nodes.py). scalars: fp32
    `[8]` (relaxed.py)."""

    override: Any
    by_classifier: bool
    values: Tensor
    ids: Tensor
    scalars: Tensor


def accept_forest(
    part_score: Tensor,
    part_id: Tensor,
    token: Tensor,
    parent: Tensor,
    depth: Tensor,
    mask_bits: Tensor,
    seq_start: Tensor,
    limit: Tensor,
    end_ids: Tensor,
    ids: Tensor,
    cache_len: Tensor,
    done: Tensor,
    root: Tensor,
    pick: Tensor,
    path: Tensor,
    old_len: Tensor,
    n_commit: Tensor,
    report: Tensor,
    round_index: Tensor,
    counter: Tensor,
    ticket: Tensor,
    judge: Any = judge_pick,
    pdl: bool = False,
    relaxation: Relaxation | None = None,
    history: Tensor | None = None,
) -> None:
    """Launch: one round's end for S sequences whose trees are N <= 64 rows in all. int32 but where said otherwise.

    Read: part_score fp32 and part_id `[P, N_pad]`, for each part of the vocabulary the best score of each row and its
    id (unit stride over rows; +inf says that the row is not finite). token, parent, depth `[N]` and mask_bits int64
    `[N]`, as in a Forest. seq_start `[S + 1]`: sequence s is rows seq_start[s] to seq_start[s + 1], the root first.
    limit `[S]`: the most ids that a sequence may hold. end_ids `[E]`: they end the answer; -1 is none.

    Changed: ids `[S, capacity]`, of which sequence s holds cache_len[s] + 1, the last being its root. cache_len, root
    and done `[S]`; done is the status, and unless it is RUNNING the sequence stays as it is. round_index int64 `[1]`.
    ticket `[1]`: zero before and after.

    Written: pick `[N]`, -1 where a row is not finite. path `[S, B]`: rows of the kept path, root first; B is a power of
    two, N <= B <= N_pad. old_len and n_commit `[S]`: cache_len before, and how many rows of the path the cache is to
    keep. report `[RING, S, REPORT_WIDTH]`, in slot round_index % RING: n_emitted, n_accepted, status, the tree's number
    of rows, and the emitted tokens. counter `[1]` in int32 or int64, after all else: the number of rounds. report and
    counter may lie in pinned memory of the host.

    pdl: the launch overlaps the kernel ahead of it, which may write the parts and nothing else of the above.

    judge: a `@triton.jit` function from (token, pick of the judging row) `[B]` to (accept bool, score fp32) `[B]`.
    relaxation: what may keep a node that judge rejects; its overrides are then described in the report, from
    TRACE_START on, TRACE_FIELDS times MAX_ROWS numbers by place among the drafted tokens that were emitted. history:
    int64 `[S]`, changed: bit b says that the token emitted b tokens ago was an override; needed with a relaxation, and
    kept up by rounds without one.
    """
    relaxed = relaxation or Relaxation(None, False, None, None, None)  # type: ignore[arg-type]
    block_rows = path.shape[1]
    accept_kernel[(len(limit),)](
        part_score_ptr=part_score,
        part_id_ptr=part_id,
        part_stride=part_score.stride(0),
        token_ptr=token,
        parent_ptr=parent,
        depth_ptr=depth,
        mask_bits_ptr=mask_bits,
        seq_start_ptr=seq_start,
        limit_ptr=limit,
        end_ids_ptr=end_ids,
        ids_ptr=ids,
        ids_stride=ids.stride(0),
        cache_len_ptr=cache_len,
        done_ptr=done,
        root_ptr=root,
        pick_ptr=pick,
        path_ptr=path,
        old_len_ptr=old_len,
        n_commit_ptr=n_commit,
        report_ptr=report,
        round_ptr=round_index,
        counter_ptr=counter,
        ticket_ptr=ticket,
        judged_ptr=relaxed.values,
        judged_id_ptr=relaxed.ids,
        scalars_ptr=relaxed.scalars,
        history_ptr=history,
        passes=2 if pdl else 1,
        JUDGE=judge,
        OVERRIDE=relaxed.override,
        BY_CLASSIFIER=relaxed.by_classifier,
        NUM_SEQS=len(limit),
        NUM_ROWS=len(token),
        NUM_PARTS=len(part_score),
        NUM_ENDS=len(end_ids),
        RING=len(report),
        BLOCK_P=max(1, _TILE // block_rows),
        BLOCK_R=block_rows,
        PDL=pdl,
        num_warps=4 if block_rows <= 16 else 8,
        launch_pdl=pdl,
    )
