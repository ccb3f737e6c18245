"""Attention of a few rows over a prefix and the rows' own ancestors, with grouped key/value heads.

The mask says which keys a row sees: the whole prefix (or a window of it), and of the new rows its ancestors and itself.
Rows and the query heads of one key/value head are packed together, so each key is read once (Ainslie et al. 2023).

The kernel takes the product's output as it is: it norms and rotates queries and new keys, writes the new rows to the
cache, and attends. Each key/value head is shared by a fixed number of programs (split KV, Dao et al. 2023), of which
the device's own lengths decide how many have work. Each leaves its part, and join_splits.py puts them together.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pad_engine.kernels.attention_tiles import (
    AttentionWorkspace,
    angles,
    append,
    attend,
    attend_whole_tiles,
    cached_tile,
    capped,
    clear_values,
    leave_part,
    new_values,
    raw_halves,
    seen_keys,
    splits_at_work,
    spoil,
    turn,
    with_new_keys,
)
from pad_engine.kernels.join_splits import join_splits
from pad_engine.kernels.row_tiles import OFF, release_dependents, wait_for_inputs
from pad_engine.kernels.tuning import AttentionConfig


def tree_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None = None
) -> Tensor:
    """Softmax attention under an additive mask.

    q: `[N, H, D]`. k, v: `[H_kv, M, D]`, H a multiple of H_kv. mask: `[H / H_kv * N, M]` additive in q's type, rows
    ordered by query head within the group and then by N, or `[1, H_kv, ...]`; None lets every row see every key.
    softcap: scores become `softcap * tanh(scores / softcap)` before the mask. Returns `[N, H * D]` in q's type.
    """
    n, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[0]
    # [N, H, D] -> [H_kv, G * N, D]
    packed = q.view(n, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    if softcap is None:
        out = F.scaled_dot_product_attention(
            packed.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), attn_mask=mask, scale=scale
        ).squeeze(0)
    else:
        scores = softcap * torch.tanh((packed @ k.transpose(1, 2)).float() * scale / softcap)
        if mask is not None:
            scores = scores + mask
        out = scores.softmax(-1).to(q.dtype) @ v
    # [H_kv, G * N, D] -> [N, H * D]
    return out.view(num_kv_heads, -1, n, head_dim).permute(2, 0, 1, 3).reshape(n, num_heads * head_dim)


@triton.jit
def tree_attention_kernel(
    qkv_ptr,
    k_ptr,
    v_ptr,
    part_ptr,
    sums_ptr,
    depth_ptr,
    mask_ptr,
    start_ptr,
    length_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    scale,
    seq_stride,
    head_stride,
    scratch,
    ring,
    capacity,
    chunk_step,
    cache_desc,
    value_rows,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    OWN: tl.constexpr,
    TO_PREFIX: tl.constexpr,
    STRICT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCKS: tl.constexpr = (ROWS * GROUP + BLOCK_M - 1) // BLOCK_M
    PRECISION: tl.constexpr = "ieee" if qkv_ptr.dtype.element_ty == tl.float32 else "tf32"
    head, split = tl.program_id(0), tl.program_id(1)
    seq, block = tl.program_id(2) // BLOCKS, tl.program_id(2) % BLOCKS
    # the forest and the committed lengths were written before the pass began: they need no wait
    first = tl.load(start_ptr + seq)
    count = tl.load(start_ptr + seq + 1) - first
    length = tl.load(length_ptr + seq)
    member = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row, ok = first + member // GROUP, member // GROUP < count
    position = length + tl.load(depth_ptr + row, mask=ok, other=0)
    bits = tl.load(mask_ptr + row, mask=ok, other=0)
    place = (seq * seq_stride + head * head_stride) // D + scratch
    k_ptr += seq * seq_stride + head * head_stride
    v_ptr += seq * seq_stride + head * head_stride

    # keys of the prefix that this split reads; in strict mode also the new ones, each at its absolute place
    filled = tl.minimum(length, ring)
    reach, active = splits_at_work(length, count, ring, chunk_step, SPLITS, STRICT)
    chunk = chunk_step
    if not STRICT:
        chunk = tl.cdiv(tl.cdiv(reach, active), BLOCK_S) * BLOCK_S
    if (split >= active + OWN) | (block * BLOCK_M >= count * GROUP):
        return
    begin = tl.minimum(split * chunk, reach) if OWN else split * chunk
    end = tl.minimum(begin + chunk, reach)

    # the prefix does not change during the pass, so its first keys are on their way before the wait
    whole = begin
    if STAGES:  # whole tiles come later, by bulk copies
        whole = end - (end - begin - 1) % BLOCK_S - 1
    key = whole + tl.arange(0, BLOCK_S)
    ka, kb, v = cached_tile(k_ptr, v_ptr, scratch + key, key < tl.minimum(end, filled), D, BLOCK_HALF, BLOCK_D)
    cos, sin = angles(position, ok, cos_ptr, sin_ptr, D, BLOCK_HALF)
    # the rows of the pass itself go to the last split, which has the fewest keys of the prefix, or none
    own = split == active - 1 + OWN
    t = tl.arange(0, BLOCK_T)
    t_ok = t < tl.where(own, count, 0)
    t_position = length + tl.load(depth_ptr + first + t, mask=t_ok, other=0)
    t_cos, t_sin = angles(t_position, t_ok, cos_ptr, sin_ptr, D, BLOCK_HALF)
    wait_for_inputs(PDL)
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    qa, qb = raw_halves(qkv_ptr + row * WIDTH + (head * GROUP + member % GROUP) * D, ok, D, BLOCK_HALF)
    new_ptr = qkv_ptr + (HEADS + head) * D
    na, nb = raw_halves(new_ptr + (first + t) * WIDTH, t_ok, D, BLOCK_HALF)
    nv = new_values(new_ptr + KV_HEADS * D + (first + t) * WIDTH, t_ok, D, BLOCK_D)
    qa, qb = turn(qa, qb, cos, sin, q_norm_ptr, eps, D, BLOCK_HALF)
    na, nb = turn(na, nb, t_cos, t_sin, k_norm_ptr, eps, D, BLOCK_HALF)
    if ROWS > 1:
        nv, bad = clear_values(nv)
    if not STRICT:  # noqa: SIM102 - known to the compiler, unlike the next
        if own & (block == 0):
            if TO_PREFIX:
                slots, fits = scratch + t_position % ring, t_ok & (t_position < capacity)
            else:
                slots, fits = scratch - 1 - t, t_ok
            append(k_ptr, v_ptr, slots, fits, na, nb, nv, D, BLOCK_HALF, BLOCK_D)

    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if ROWS == 1 and not STRICT:
        # a row that sees one new key, itself, begins with it
        score = tl.sum(qa.to(tl.float32) * na.to(tl.float32) + qb.to(tl.float32) * nb.to(tl.float32), 1)
        peak = tl.where(own & ok, capped(score * scale, SOFTCAP), peak)
        total = tl.where(own & ok, 1.0, total)
        acc = tl.where((own & ok)[:, None], nv.to(tl.float32), acc)
    elif not STRICT:  # noqa: SIM102 - known to the compiler, unlike the next
        if own:
            # bit j of a row's word says that row j of the forest is the row or an ancestor
            seen = (((bits[:, None] >> (first + t).to(tl.int64)[None, :]) & 1) != 0) & t_ok[None, :]
            if WINDOW is not None:
                seen = seen & (t_position[None, :] > position[:, None] - WINDOW)
            peak, total, acc = attend(qa, qb, na, nb, nv, seen, peak, total, acc, scale, SOFTCAP, PRECISION)
            total = spoil(total, seen, bad)

    if STAGES:
        seen = seen_keys(key, end, position, length, ring, WINDOW, STRICT)
        peak, total, acc = attend(qa, qb, ka, kb, v, seen, peak, total, acc, scale, SOFTCAP, PRECISION)
        peak, total, acc = attend_whole_tiles(
            qa, qb, cache_desc, place, value_rows, begin, whole, position, length, ring, peak, total, acc, scale,
            WINDOW, SOFTCAP, PRECISION, BLOCK_S, STAGES,
        )  # fmt: skip
    else:
        for start in range(begin, end, BLOCK_S):
            key = start + tl.arange(0, BLOCK_S)
            # the next keys are on their way while these are attended to
            following = key + BLOCK_S
            next_a, next_b, next_v = cached_tile(
                k_ptr, v_ptr, scratch + following, following < tl.minimum(end, filled), D, BLOCK_HALF, BLOCK_D
            )
            seen = seen_keys(key, end, position, length, ring, WINDOW, STRICT)
            if STRICT:
                ka, kb, v, s_bad = with_new_keys(
                    ka, kb, v, key, (key >= length) & (key < reach), new_ptr + (first + key - length) * WIDTH,
                    KV_HEADS * D, k_ptr, v_ptr, scratch + key, key < tl.where(block == 0, capacity, 0), k_norm_ptr,
                    cos_ptr, sin_ptr, eps, D, BLOCK_HALF, BLOCK_D,
                )  # fmt: skip
            peak, total, acc = attend(qa, qb, ka, kb, v, seen, peak, total, acc, scale, SOFTCAP, PRECISION)
            if STRICT:
                total = spoil(total, seen, s_bad)
            ka, kb, v = next_a, next_b, next_v

    index = row * HEADS + head * GROUP + member % GROUP
    leave_part(part_ptr, sums_ptr, split * (ROWS * HEADS) + index, ok, peak, total, acc, D, BLOCK_D)


def tree_attention(
    qkv: Tensor,
    layer: Tensor,
    out: Tensor,
    workspace: AttentionWorkspace,
    depth: Tensor,
    mask_bits: Tensor,
    seq: Tensor,
    seq_start: Tensor,
    cache_len: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    *,
    eps: float,
    scale: float,
    softcap: float | None,
    scratch: int,
    capacity: int,
    window: int | None,
    heads: int,
    config: AttentionConfig,
    to_prefix: bool,
    strict: bool,
    pdl: int,
) -> None:
    """Launch: norm, rotation, append to the cache, and attention, for N rows (1, 16, 32 or 64) of up to S sequences.

    Two kernels: the second puts the splits' parts together. qkv: `[N, (H + 2 H_kv) D]`, as the product left it. layer:
    `[2, S, H_kv, scratch + slots, D]`, one layer of a KVCache buffer. out: `[N, H D]`. depth: int32 `[N]`; mask_bits:
    int64 `[N]`; seq: int32 `[N]`, each row's sequence; seq_start: int32 `[S + 1]`, the rows of each sequence, those
    past the last being padding; cache_len: int32 `[S]`. cos, sin: `[max_length, D]`, the sine with the rotation's sign.
    q_norm, k_norm: `[D]` or None. to_prefix: the rows go behind the prefix by position, not to the scratch (a root
    alone, or a chain in strict mode). strict: keys stand at absolute places, so that a row's bits do not depend on how
    many rows are in the pass; chains only.
    """
    n, d = qkv.shape[0], layer.shape[-1]
    _, seqs, kv_heads, slots, _ = layer.shape
    group = heads // kv_heads
    block_m = min(config.block_m, max(16, triton.next_power_of_2(n * group)))
    ring = slots - scratch
    half = max(16, triton.next_power_of_2(d // 2))
    # a tile is one box of memory, and both halves of a head lie in it side by side
    stages = 0 if strict or 2 * half != d else config.stages
    chunk = config.chunk
    own = config.own and n > 1 and not strict
    if strict:
        # absolute places: a split's range follows from the capacity alone, with rows that may reach behind it
        chunk = triton.cdiv(triton.cdiv(capacity + n, config.splits), config.block_s) * config.block_s
    tree_attention_kernel[(kv_heads, config.splits + own, seqs * triton.cdiv(n * group, block_m))](
        qkv_ptr=qkv,
        k_ptr=layer[0],
        v_ptr=layer[1],
        part_ptr=workspace.parts,
        sums_ptr=workspace.sums,
        depth_ptr=depth,
        mask_ptr=mask_bits,
        start_ptr=seq_start,
        length_ptr=cache_len,
        cos_ptr=cos,
        sin_ptr=sin,
        q_norm_ptr=q_norm,
        k_norm_ptr=k_norm,
        eps=eps,
        scale=scale,
        seq_stride=layer.stride(1),
        head_stride=layer.stride(2),
        scratch=scratch,
        ring=ring,
        capacity=capacity,
        chunk_step=chunk,
        cache_desc=TensorDescriptor.from_tensor(layer.view(-1, d), [config.block_s, d]) if stages else None,
        value_rows=layer.stride(0) // d,
        STAGES=stages,
        WINDOW=window,
        SOFTCAP=softcap,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=d,
        ROWS=n,
        BLOCK_M=block_m,
        BLOCK_S=config.block_s,
        BLOCK_T=1 if n == 1 else max(16, n),
        BLOCK_HALF=half,
        BLOCK_D=max(16, triton.next_power_of_2(d)),
        SPLITS=config.splits,
        OWN=own,
        TO_PREFIX=to_prefix,
        STRICT=strict,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl != OFF,
    )
    join_splits(
        workspace, out, seq, seq_start, cache_len,
        ring=ring, chunk=chunk, heads=heads, head_dim=d, splits=config.splits, own=own, strict=strict, pdl=pdl,
    )  # fmt: skip
