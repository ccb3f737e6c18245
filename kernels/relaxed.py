"""Relaxed acceptance as the accept kernel runs it: `base | (override & floor)`, and the cut along the path.

The meaning, in torch and plain Python, is pad_engine/rules/override.py; an override itself is a `@triton.jit` function
of that package. Thresholds and bounds lie in device memory, so that one captured round serves all of them.
"""

import triton
import triton.language as tl

# `scalars` is fp32 `[8]`: two thresholds, the floor's logarithm, whether the base must have the floor, lookahead,
# reach, overrides at most (0: any number), and the window that they are counted in; Override.scalars makes it.
# int32 a drafted place of a report: a flag, then margin, entropy, probability and pivot_prob as the bits of fp32
TRACE_FIELDS = 5
_BASE_SCORE = tl.constexpr(2.0)


@triton.jit
def load_judged(judged_ptr, id_ptr, row, NUM_ROWS: tl.constexpr):
    """JudgedRows `[BLOCK_R]`: three ids, three logits, lse, entropy, token_logit, pivot_prob."""
    ok = row < NUM_ROWS
    return (
        tl.load(id_ptr + row, mask=ok, other=-1),
        tl.load(id_ptr + NUM_ROWS + row, mask=ok, other=-1),
        tl.load(id_ptr + 2 * NUM_ROWS + row, mask=ok, other=-1),
        tl.load(judged_ptr + row, mask=ok, other=0.0),
        tl.load(judged_ptr + NUM_ROWS + row, mask=ok, other=0.0),
        tl.load(judged_ptr + 2 * NUM_ROWS + row, mask=ok, other=0.0),
        tl.load(judged_ptr + 3 * NUM_ROWS + row, mask=ok, other=0.0),
        tl.load(judged_ptr + 4 * NUM_ROWS + row, mask=ok, other=0.0),
        tl.load(judged_ptr + 5 * NUM_ROWS + row, mask=ok, other=0.0),
        tl.load(judged_ptr + 6 * NUM_ROWS + row, mask=ok, other=1.0),
    )


@triton.jit
def relax(base, token, judged, scalars_ptr, OVERRIDE: tl.constexpr, BY_CLASSIFIER: tl.constexpr):
    """accept and override bool `[BLOCK_R]`, score fp32. base: what the base accepts."""
    id1, id2, id3, z1, z2, z3, lse, entropy, token_logit, pivot_prob = judged
    t0, t1 = tl.load(scalars_ptr), tl.load(scalars_ptr + 1)
    chosen = OVERRIDE(token, id1, id2, id3, z1, z2, z3, lse, entropy, token_logit, pivot_prob, t0, t1)
    log_p = token_logit - lse
    allowed = log_p >= tl.load(scalars_ptr + 2)
    outer = tl.load(scalars_ptr + 3) > 0.0
    accept = tl.where(outer, (base | chosen) & allowed, base | (chosen & allowed))
    score = 1.0 - pivot_prob if BY_CLASSIFIER else tl.exp(log_p)
    return accept, accept & (base == 0), tl.where(base, _BASE_SCORE, score)


@triton.jit
def cut_path(on_path, flag, depth, mask_bits, row, mine, history, scalars_ptr):
    """The path in front of its first node that an override's bounds forbid. flag: overrides, of any row; history: bit b
    says that the token emitted b tokens before the next one was an override."""
    lookahead, reach = tl.load(scalars_ptr + 4).to(tl.int32), tl.load(scalars_ptr + 5).to(tl.int32)
    most, window = tl.load(scalars_ptr + 6).to(tl.int32), tl.load(scalars_ptr + 7).to(tl.int32)
    override = on_path & flag
    # entry (i, j): how far row j of the path lies behind row i of it
    behind = depth[None, :] - depth[:, None]
    followed = on_path[None, :] & (flag[None, :] == 0) & (behind > 0) & (behind <= lookahead)
    lonely = (lookahead > 0) & (tl.sum(followed.to(tl.int32), 1) < lookahead)
    below = ((mask_bits[None, :] >> row.to(tl.int64)[:, None]) & 1) != 0
    deepest = tl.max(tl.where(below & mine[None, :], depth[None, :], 0), 1)
    short = (reach > 0) & (depth + reach > deepest)
    recent = override[None, :] & (behind <= 0) & (behind > -window)
    ago = tl.arange(0, 64)
    old = (((history >> ago.to(tl.int64)) & 1)[None, :] != 0) & (depth[:, None] + ago[None, :] < window)
    count = tl.sum(recent.to(tl.int32), 1) + tl.sum(old.to(tl.int32), 1)
    violates = override & (lonely | short | ((most > 0) & (count > most)))
    return on_path & (depth < tl.min(tl.where(violates, depth, 2147483647)))


@triton.jit
def next_history(history, emitted, depth, count):
    """history behind `count` emitted tokens. emitted: bool `[BLOCK_R]`, the overrides among them."""
    ago = count - depth  # a node of depth d is the round's d-th token
    ones = tl.full([1], 1, tl.int64)
    bits = tl.sum(tl.where(emitted & (ago < 64), ones << tl.minimum(ago, 63).to(tl.int64), 0))
    shift = tl.minimum(count, 63).to(tl.int64)
    return tl.where(count > 63, 0, history << shift) | bits


@triton.jit
def write_trace(trace_ptr, kept, override, depth, judged, MAX_ROWS: tl.constexpr):
    """Of each emitted drafted token whether it is an override, and of overrides what their judging row said."""
    _, _, _, z1, z2, _, lse, entropy, token_logit, pivot_prob = judged
    place = trace_ptr + depth - 1
    tl.store(place, override.to(tl.int32), mask=kept)
    tl.store(place + MAX_ROWS, (z1 - z2).to(tl.int32, bitcast=True), mask=override)
    tl.store(place + 2 * MAX_ROWS, entropy.to(tl.int32, bitcast=True), mask=override)
    tl.store(place + 3 * MAX_ROWS, tl.exp(token_logit - lse).to(tl.int32, bitcast=True), mask=override)
    tl.store(place + 4 * MAX_ROWS, pivot_prob.to(tl.int32, bitcast=True), mask=override)
