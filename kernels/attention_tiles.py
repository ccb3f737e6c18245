"""The parts of the attention kernel (tree_attention.py): heads normed and rotated, tiles of the cache, the softmax that
takes them in step by step, and what a split leaves for join_splits.py."""

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # scores are in units of log 2


@triton.jit
def angles(position, ok, cos_ptr, sin_ptr, D: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """cos and sin `[BLOCK, D / 2]`, fp32, of rows at some positions."""
    half = tl.arange(0, BLOCK_HALF)
    mask = ok[:, None] & (half < D // 2)[None, :]
    # the table's sine carries the rotation's minus sign in its first half
    place = position.to(tl.int64)[:, None] * D + D // 2 + half[None, :]
    cos = tl.load(cos_ptr + place, mask=mask, other=0.0).to(tl.float32)
    return cos, tl.load(sin_ptr + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def raw_halves(head_ptr, ok, D: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """The halves `[BLOCK, D / 2]` of one head of some rows, as the product left them. head_ptr: `[BLOCK]` pointers."""
    half = tl.arange(0, BLOCK_HALF)
    mask = ok[:, None] & (half < D // 2)[None, :]
    pointers = head_ptr[:, None] + half[None, :]
    return tl.load(pointers, mask=mask, other=0.0), tl.load(pointers + D // 2, mask=mask, other=0.0)


@triton.jit
def turn(a, b, cos, sin, norm_ptr, eps, D: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Halves of heads normed, if norm_ptr `[D]` is given, and rotated: in fp32, then rounded to their type."""
    dtype: tl.constexpr = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    if norm_ptr is not None:
        half = tl.arange(0, BLOCK_HALF)
        rms = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        a *= rms * tl.load(norm_ptr + half, mask=half < D // 2, other=0.0).to(tl.float32)[None, :]
        b *= rms * tl.load(norm_ptr + D // 2 + half, mask=half < D // 2, other=0.0).to(tl.float32)[None, :]
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit
def new_values(v_ptr, ok, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Values `[BLOCK, D]` of new rows. v_ptr: `[BLOCK]` pointers."""
    width = tl.arange(0, BLOCK_D)
    return tl.load(v_ptr[:, None] + width[None, :], mask=ok[:, None] & (width < D)[None, :], other=0.0)


@triton.jit
def clear_values(v):
    """Values with zeros where they are not finite, and which rows `[BLOCK]` had such. A masked one would turn the sums
    of rows that do not see it into NaN as well; those that do see it are spoiled by hand."""
    finite = tl.abs(v.to(tl.float32)) < float("inf")
    return tl.where(finite, v, 0.0).to(v.dtype), tl.min(finite.to(tl.int32), 1) == 0


@triton.jit
def spoil(total, seen, bad):
    """The sums of rows, NaN for those that see a key whose value is not finite."""
    return tl.where(tl.max((seen & bad[None, :]).to(tl.int32), 1) > 0, float("nan"), total)


@triton.jit
def capped(scores, SOFTCAP: tl.constexpr):
    """Scores with the soft cap, if there is one, in units of log 2."""
    if SOFTCAP is not None:
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = SOFTCAP * (2.0 * tl.sigmoid(2.0 * scores / SOFTCAP) - 1.0)
    return scores * LOG2_E


@triton.jit
def attend(
    qa,
    qb,
    ka,
    kb,
    v,
    seen,
    peak,
    total,
    acc,
    scale,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of the softmax over a tile of keys that come as halves. seen: bool `[BLOCK_M, keys]`."""
    scores = tl.dot(qa, tl.trans(ka), input_precision=PRECISION)
    scores = tl.dot(qb, tl.trans(kb), scores, input_precision=PRECISION)
    return take_in(scores, v, seen, peak, total, acc, scale, SOFTCAP, PRECISION)


@triton.jit
def take_in(scores, v, seen, peak, total, acc, scale, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the online softmax (Milakov and Gimelshein 2018): scores of a tile of keys, in base 2, folded into
    the rows' running maximum, sum and weighted values. seen: bool `[BLOCK_M, keys]`, or None for all."""
    if SOFTCAP is None:
        unit = scale * LOG2_E
    else:
        scores = capped(scores * scale, SOFTCAP)
        unit = 1.0
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * unit)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen nothing yet
    shrink = tl.exp2(peak - base)
    weights = tl.exp2(scores * unit - base[:, None])
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return new_peak, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def cached_tile(k_ptr, v_ptr, slots, ok, D: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys as halves and values of some slots of one head: `[BLOCK, D / 2]` twice and `[BLOCK, D]`."""
    half, width = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_D)
    offset = slots.to(tl.int64)[:, None] * D
    k_ok, v_ok = ok[:, None] & (half < D // 2)[None, :], ok[:, None] & (width < D)[None, :]
    ka = tl.load(k_ptr + offset + half[None, :], mask=k_ok, other=0.0)
    kb = tl.load(k_ptr + offset + D // 2 + half[None, :], mask=k_ok, other=0.0)
    return ka, kb, tl.load(v_ptr + offset + width[None, :], mask=v_ok, other=0.0)


@triton.jit
def append(k_ptr, v_ptr, slots, ok, ka, kb, v, D: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write a tile's keys and values to slots of the cache."""
    half, width = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_D)
    offset = slots.to(tl.int64)[:, None] * D
    k_ok, v_ok = ok[:, None] & (half < D // 2)[None, :], ok[:, None] & (width < D)[None, :]
    tl.store(k_ptr + offset + half[None, :], ka, mask=k_ok)
    tl.store(k_ptr + offset + D // 2 + half[None, :], kb, mask=k_ok)
    tl.store(v_ptr + offset + width[None, :], v, mask=v_ok)


@triton.jit
def splits_at_work(length, count, ring, chunk_step, SPLITS: tl.constexpr, STRICT: tl.constexpr):
    """How many keys a sequence's splits read, in strict mode the new ones among them, and how many splits have some:
    one at least."""
    if STRICT:
        reach = length + count
        active = tl.cdiv(reach, chunk_step)
    else:
        reach = tl.minimum(length, ring)
        active = tl.minimum(tl.maximum(tl.cdiv(reach, chunk_step), 1), SPLITS)
    return reach, active


@triton.jit
def leave_part(part_ptr, sums_ptr, place, ok, peak, total, acc, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store a split's weighted mean of the values that it saw, and log2 of its sum of weights, -inf if it saw none."""
    width = tl.arange(0, BLOCK_D)
    mean = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(part_ptr + place[:, None] * D + width[None, :], mean, mask=ok[:, None] & (width < D)[None, :])
    tl.store(sums_ptr + place, peak + tl.log2(total), mask=ok)


@triton.jit
def seen_keys(key, end, position, length, ring, WINDOW: tl.constexpr, STRICT: tl.constexpr):
    """bool `[rows, keys]`: which slots of the prefix (in strict mode: positions) up to `end` each row sees."""
    if STRICT:
        seen = (key < end)[None, :] & (key[None, :] <= position[:, None])
    else:
        seen = (key < end)[None, :] & (position >= 0)[:, None]
    if WINDOW is not None:
        # the position that each slot of the ring holds
        held = length - 1 - (length - 1 - key) % ring
        seen = seen & (held[None, :] > position[:, None] - WINDOW)
    return seen


@triton.jit
def with_new_keys(
    ka,
    kb,
    v,
    key,
    fresh,
    new_ptr,
    value_offset,
    k_ptr,
    v_ptr,
    slots,
    keep,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    eps,
    D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A tile of the cache with the pass's own rows in their absolute places, and which of them `[BLOCK_S]` have values
    that are not finite. What is attended to is what goes to the slots where keep: computed twice, it might round twice.
    new_ptr: `[BLOCK_S]` pointers to the keys where fresh."""
    a, b = raw_halves(new_ptr, fresh, D, BLOCK_HALF)
    new_v, bad = clear_values(new_values(new_ptr + value_offset, fresh, D, BLOCK_D))
    cos, sin = angles(key, fresh, cos_ptr, sin_ptr, D, BLOCK_HALF)
    a, b = turn(a, b, cos, sin, k_norm_ptr, eps, D, BLOCK_HALF)
    append(k_ptr, v_ptr, slots, fresh & keep, a, b, new_v, D, BLOCK_HALF, BLOCK_D)
    ka, kb = tl.where(fresh[:, None], a, ka), tl.where(fresh[:, None], b, kb)
    return ka, kb, tl.where(fresh[:, None], new_v, v), bad


@triton.jit
def attend_whole_tiles(
    qa,
    qb,
    cache_desc,
    key_row,
    value_rows,
    begin,
    end,
    position,
    length,
    ring,
    peak,
    total,
    acc,
    scale,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The softmax over slots [begin, end) of the prefix, whole tiles. They come to shared memory by bulk tensor copies,
    STAGES - 1 tiles ahead, and the tensor core takes them from there: they pass no register. cache_desc: the layer's
    rows `[., D]` by tiles `[BLOCK_S, D]`. key_row: of slot 0's keys; value_rows: from there to its values."""
    q = tl.reshape(tl.permute(tl.join(qa, qb), (0, 2, 1)), (qa.shape[0], 2 * qa.shape[1]))
    for start in tl.range(begin, end, BLOCK_S, num_stages=STAGES):
        scores = tl.dot(q, tl.trans(cache_desc.load([key_row + start, 0])), input_precision=PRECISION)
        values = cache_desc.load([key_row + value_rows + start, 0])
        seen = None
        if WINDOW is not None:
            seen = seen_keys(start + tl.arange(0, BLOCK_S), end, position, length, ring, WINDOW, False)
        peak, total, acc = take_in(scores, values, seen, peak, total, acc, scale, SOFTCAP, PRECISION)
    return peak, total, acc


class AttentionWorkspace:
    """What the splits of a launch of at most `rows` rows leave: each one's weighted means of the values, and log2 of
    its sums of weights. One a stream: launches that follow one another share it. splits: the most that one has."""

    def __init__(self, rows: int, heads: int, head_dim: int, splits: int, device: torch.device):
        parts = (splits + 1) * rows * heads  # the pass's own rows may have a split to themselves
        self.parts = torch.empty(parts * head_dim, dtype=torch.float32, device=device)
        self.sums = torch.empty(parts, dtype=torch.float32, device=device)
