"""Many sequences of one cache in one pass: every layer writes and reads them as one batch, and the rows that each keeps
are moved together. What it costs in launches does not depend on the number of sequences.

Rows of a group stand beside those of the others: `[n, B]`, n rows of the longest group, B groups. Shorter groups repeat
their last row, and all read as many slots as the longest needs; masks hide the rest. Next to read: forest.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pad_engine.kernels.tree_attention import tree_attention_ref
from pad_engine.kv_cache import KVCache, RowGroup

ALIGNED = (
    16  # slots read are a multiple of it where the cache has them: masks of other widths are copied by the library
)
EVERYTHING = -2  # all slots hold positions beyond it


@dataclass(frozen=True)
class ForestView:
    """What the rows write and read in the layers of one window size. write: int64 `[N]`, their slots. mask: additive
    `[1, B * kv_heads, group_size * n, M]` over the M slots read."""

    write: Tensor
    read: slice
    mask: Tensor


@dataclass(frozen=True)
class ForestPlacement:
    """One pass over several groups: the rows' tokens, positions and prompt lengths as of a Placement.

    seq: int64 `[N]`, the sequence of each row; seqs: those of the groups. rows: int64 `[n * B]`, the rows side by side;
    places: int64 `[N]`, where each row stands among them. drafted: the rows may yet be rejected.
    """

    tokens: Tensor
    positions: Tensor
    prompt_lengths: Tensor
    seq: Tensor
    seqs: Tensor | slice
    rows: Tensor
    places: Tensor
    drafted: bool
    views: dict[int | None, ForestView]


def place_forest(cache: KVCache, groups: Sequence[RowGroup]) -> ForestPlacement:
    """KVCache.place for groups of different sequences, all of them direct or none. ValueError as there."""
    tokens, positions, prompts = cache.columns(groups)
    counts = [len(group.tokens) for group in groups]
    starts, longest = [0, *np.cumsum(counts).tolist()], max(counts)
    seq = [group.seq for group, count in zip(groups, counts, strict=True) for _ in range(count)]
    rows = [starts[b] + min(i, count - 1) for i in range(longest) for b, count in enumerate(counts)]
    places = [i * len(groups) + b for b, count in enumerate(counts) for i in range(count)]
    seqs = [group.seq for group in groups]
    in_order = seqs == list(range(len(seqs)))
    sizes = [len(seq), len(places), len(rows), len(seqs)]
    indices = torch.tensor([*seq, *places, *rows, *seqs], device=cache.device).split(sizes)
    placement = ForestPlacement(
        tokens, positions, prompts, seq=indices[0], seqs=slice(0, len(seqs)) if in_order else indices[3],
        rows=indices[2], places=indices[1], drafted=not groups[0].direct,
        views={window: forest_view(cache, groups, window, indices[2]) for window in cache.buffers},
    )  # fmt: skip
    for group in groups:
        if not group.direct:
            cache.claim(group)
    return placement


def forest_view(cache: KVCache, groups: Sequence[RowGroup], window: int | None, rows: Tensor) -> ForestView:
    """The slots of the groups' rows in layers of one window size, and what they see there. rows: of the placement."""
    scratch = [seen_scratch(cache, group, window) for group in groups]
    drafted = max(0 if own is None else own.shape[1] for own in scratch)
    own_slots = np.zeros((sum(len(group.tokens) for group in groups), drafted), dtype=bool)
    bounds: list[tuple[int, ...]] = []
    for group, own in zip(groups, scratch, strict=True):
        if own is not None:
            # slots run backwards
            own_slots[len(bounds) : len(bounds) + len(own), drafted - own.shape[1] :] = own[:, ::-1]
        bounds += row_bounds(cache, group, window, own is None)
    slots = cache.buffers[window].shape[-2] - cache.scratch
    prefix = max(seen for _, seen, *_ in bounds)
    prefix = min(prefix + -(prefix + drafted) % ALIGNED, slots)
    write, seen, last, filled, reach = torch.tensor(bounds, device=cache.device).unbind(1)
    places = torch.arange(prefix, device=cache.device)
    visible = places < seen[:, None]
    if window is not None:
        # position held by each slot of the ring
        visible &= last[:, None] - (last[:, None] - places) % filled[:, None] > reach[:, None]
    visible = torch.cat((torch.from_numpy(own_slots).to(cache.device), visible), 1)
    additive = torch.zeros(visible.shape, dtype=cache.dtype, device=cache.device).masked_fill_(~visible, -torch.inf)
    # [N, M] -> [n, B, M] -> [1, B * H_kv, G * n, M]
    num_kv_heads, width, batch = cache.buffers[window].shape[3], visible.shape[1], len(groups)
    spread = additive[rows].view(-1, batch, width).transpose(0, 1)[:, None, None]
    spread = spread.expand(batch, num_kv_heads, cache.group_size, -1, width).reshape(1, batch * num_kv_heads, -1, width)
    return ForestView(write, slice(cache.scratch - drafted, cache.scratch + prefix), spread)


def row_bounds(cache: KVCache, group: RowGroup, window: int | None, in_prefix: bool) -> list[tuple[int, ...]]:
    """For each row of a group the slot that it is written to, how many slots of the prefix it sees, the last position
    of the prefix, how many slots that fills (at least 1), and the position beyond which keys are in its reach.

    in_prefix: the rows are written to the prefix, where nothing is out of reach.
    """
    length, before = cache.lengths[group.seq], len(cache.depths[group.seq])
    if in_prefix:
        first = cache.scratch + length
        return [(first + i, length + i + 1, length - 1, 1, EVERYTHING) for i in range(len(group.tokens))]
    filled = length if window is None else min(length, window)
    reach = [EVERYTHING if window is None else length + depth - window for depth in group.depth]
    return [(cache.scratch - 1 - before - i, filled, length - 1, max(filled, 1), r) for i, r in enumerate(reach)]


def seen_scratch(cache: KVCache, group: RowGroup, window: int | None) -> npt.NDArray[np.bool_] | None:
    """Which scratch rows the group's rows see, bool `[n, R]`; None where they are written to the prefix."""
    n, depths = len(group.tokens), [*cache.depths[group.seq], *group.depth]
    if group.direct and cache.in_order(window, group.seq, n):
        return None
    seen = np.tri(n, len(depths), len(depths) - n, dtype=bool) if group.mask is None else group.mask.numpy()
    if window is not None and max(depths) >= window:
        seen = seen & (np.array(depths) > np.array(group.depth)[:, None] - window)
    return seen


def write(cache: KVCache, layer: int, placement: ForestPlacement, k: Tensor, v: Tensor) -> None:
    """Store the rows' keys and values, `[N, kv_heads, head_dim]` each."""
    window, index = cache.layers[layer]
    slots = placement.views[window].write
    if placement.drafted:
        k, v = k.nan_to_num(), v.nan_to_num()  # as KVCache.write
    keys, values = cache.buffers[window][index]
    keys[placement.seq, :, slots] = k
    values[placement.seq, :, slots] = v


def attend(
    cache: KVCache, layer: int, placement: ForestPlacement, q: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Attention of all rows, each over its own sequence. q: `[N, H, D]`; returns `[N, H * D]`."""
    window, index = cache.layers[layer]
    view = placement.views[window]
    keys, values = (part[placement.seqs, :, view.read].flatten(0, 1) for part in cache.buffers[window][index])
    batch = keys.shape[0] // cache.buffers[window].shape[3]
    # [N, H, D] -> [n, B * H, D]: to the operator the sequences are more heads, each with its own mask
    side_by_side = q[placement.rows].view(-1, batch * q.shape[1], q.shape[2])
    out = tree_attention_ref(side_by_side, keys, values, view.mask, scale, softcap)
    return out.view(-1, q.shape[1] * q.shape[2])[placement.places]


def commit_forest(cache: KVCache, kept: Sequence[tuple[int, Sequence[int]]], direct: Sequence[RowGroup] = ()) -> None:
    """KVCache.commit of several sequences: for each its scratch rows that stay, in order.

    direct: groups instead that were written to the prefix, where it does not wrap: KVCache.commit_direct.
    """
    if len(kept) == 1 and not direct:
        return cache.commit(*kept[0])  # copies of whole slots are quicker than picking them for each sequence
    moves = [*kept, *((group.seq, range(len(group.tokens))) for group in direct)]
    for seq, rows in moves:
        cache.check_capacity(seq, len(rows))
    in_place = {group.seq for group in direct}
    for window, buffer in cache.buffers.items():
        seqs: list[int] = []
        slots: tuple[list[int], list[int]] = [], []
        for seq, rows in moves:
            if rows and not (seq in in_place and cache.in_order(window, seq, len(rows))):
                pair = cache.slots_of(window, seq, rows)
                for all_slots, own in zip(slots, pair, strict=True):
                    all_slots += own
                seqs += [seq] * len(pair[0])
        if seqs:
            seq_of, source, target = torch.tensor([seqs, *slots], device=cache.device)
            buffer[:, :, seq_of, :, target] = buffer[:, :, seq_of, :, source]
    for seq, rows in kept:
        cache.advance(seq, [cache.drafted[seq][row] for row in rows])
    for group in direct:
        cache.advance(group.seq, group.tokens)


def adopt_prefix(cache: KVCache, seq: int, ids: list[int]) -> int:
    """Begin a sequence anew with what it, or another one, holds of `ids`; returns how many of them need no reading.

    Copying costs a launch, so another one's are taken only where they spare half of the reading.
    """
    donor, common = seq, cache.common_prefix(seq, ids)
    wanted = common + max(1, (len(ids) - common + 1) // 2)
    for other, tokens in enumerate(cache.tokens):
        if common < len(ids) and tokens[:wanted] == ids[:wanted] and cache.common_prefix(other, ids) > common:
            donor, common = other, cache.common_prefix(other, ids)
    held = cache.lengths[seq]
    for buffer in cache.buffers.values():
        ring = buffer.shape[-2] - cache.scratch
        kept, used = cache.scratch + min(common, ring), cache.scratch + min(held, ring)
        if donor != seq:
            buffer[:, :, seq, :, cache.scratch : kept] = buffer[:, :, donor, :, cache.scratch : kept]
        # whatever was left here is hidden from the new sequence by masks, which hide no NaN
        buffer[:, :, seq, :, : cache.scratch] = 0
        buffer[:, :, seq, :, kept:used] = 0
    cache.discard(seq)
    cache.lengths[seq], cache.tokens[seq] = common, list(ids[:common])
    return common
