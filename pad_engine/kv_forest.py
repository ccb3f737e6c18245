"""Many sequences of one cache in one pass: every layer writes and reads them as one batch, and the rows that each keeps
are moved together. What it costs in launches and waits does not depend on the number of sequences.

Rows of a group stand beside those of the others: `[n, B]`, n rows of the longest group, B groups. Shorter groups repeat
their last row, and all read as many slots as the longest needs; masks hide the rest. Next to read: forest.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pad_engine.kernels.tree_attention import tree_attention_ref
from pad_engine.kv_cache import KVCache, RowGroup

# slots read are a multiple of it where the cache has them: masks of other widths are copied by the library
ALIGNED = 16
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
    places: int64 `[N]`, where each row stands among them; None for both where each group has one row. drafted: the rows
    may yet be rejected.
    """

    tokens: Tensor
    positions: Tensor
    prompt_lengths: Tensor
    seq: Tensor
    seqs: Tensor | slice
    rows: Tensor | None
    places: Tensor | None
    drafted: bool
    views: dict[int | None, ForestView]


def place_forest(cache: KVCache, groups: Sequence[RowGroup]) -> ForestPlacement:
    """KVCache.place for groups of different sequences, all of them direct or none. ValueError as there."""
    for group in groups:
        cache.check_room(group)
    seqs, counts = np.array([[group.seq, len(group.tokens)] for group in groups]).T
    batch, longest, ends = len(groups), int(counts.max()), np.cumsum(counts)
    group_of = np.repeat(np.arange(batch), counts)
    index = np.arange(ends[-1]) - (ends - counts)[group_of]  # of each row in its group
    tokens, depth = joined(group.tokens for group in groups), joined(group.depth for group in groups)
    lengths = np.array([cache.lengths[seq] for seq in seqs])
    prompts = np.array([cache.prompt_lengths[seq] for seq in seqs])[group_of]
    rows = ends - counts + np.minimum(np.arange(longest)[:, None], counts - 1)
    columns = [tokens, lengths[group_of] + depth, seqs[group_of], index * batch + group_of, rows.ravel(), seqs]
    spans = {window: span_of(cache, groups, window, group_of, index, depth) for window in cache.buffers}
    on_device = uploaded([*columns, *(bound for span in spans.values() for bound in span.bounds)], cache.device)
    side_by_side = None if longest == 1 else on_device[4]
    bounds = iter(on_device[len(columns) :])
    views = {
        window: make_view(
            cache, window, span.own, span.prefix, list(islice(bounds, len(span.bounds))), side_by_side, batch
        )
        for window, span in spans.items()
    }
    for group in groups:
        if not group.direct:
            cache.claim(group)
    return ForestPlacement(
        on_device[0], on_device[1], torch.from_numpy(prompts), on_device[2], slice_of(seqs.tolist(), on_device[5]),
        side_by_side, None if longest == 1 else on_device[3], not groups[0].direct, views,
    )  # fmt: skip


def uploaded(columns: Sequence[npt.NDArray[np.int64]], device: torch.device) -> tuple[Tensor, ...]:
    """int64 columns on a device, by one transfer that nobody waits for."""
    together = torch.from_numpy(np.concatenate(columns)).to(device, non_blocking=True)
    return tuple(together.split([len(column) for column in columns]))


def joined(parts: Iterable[Iterable[int]]) -> npt.NDArray[np.int64]:
    """Whole numbers behind one another. numpy joins lists more slowly, as it makes an array of each."""
    return np.fromiter(chain.from_iterable(parts), np.int64)


def slice_of(seqs: list[int], indices: Tensor) -> Tensor | slice:
    """The sequences as a slice where they are all from the first on, which spares copies."""
    return slice(0, len(seqs)) if seqs == list(range(len(seqs))) else indices


class HostSpan(NamedTuple):
    """What rows see in layers of one window size, on the host. own: bool `[N, R]`, of the R scratch slots before the
    prefix. prefix: slots of it that are read. bounds: int64 `[N]` each: the slot that a row is written to, and how many
    slots of the prefix it sees; with a window also the last position of the prefix, how many slots that fills (at least
    1), and the position beyond which keys are in the row's reach."""

    own: Tensor
    prefix: int
    bounds: Sequence[npt.NDArray[np.int64]]


def span_of(
    cache: KVCache,
    groups: Sequence[RowGroup],
    window: int | None,
    group_of: npt.NDArray[np.int64],
    index: npt.NDArray[np.int64],
    depth: npt.NDArray[np.int64],
) -> HostSpan:
    """The HostSpan of groups. group_of, index, depth: of each row, its group, its place there, and its depth."""
    facts = [
        (cache.lengths[g.seq], len(cache.depths[g.seq]), g.direct and cache.in_order(window, g.seq, len(g.tokens)))
        for g in groups
    ]
    length, before, in_prefix = np.array(facts)[group_of].T
    filled = length if window is None else np.minimum(length, window)
    bounds = [
        np.where(in_prefix, cache.scratch + length + index, cache.scratch - 1 - before - index),
        np.where(in_prefix, length + index + 1, filled),
    ]
    if window is not None:
        # rows that are written to the prefix have all of it in reach
        reach = np.where(in_prefix, EVERYTHING, length + depth - window)
        bounds += [length - 1, np.where(in_prefix, 1, np.maximum(filled, 1)), reach]
    behind = np.where(in_prefix, -1, before + index)  # the row's own place in the scratch
    drafted = int(behind.max()) + 1
    # slots run backwards; a chain sees all that is before it, as far as it reaches
    place = np.arange(drafted)[::-1]
    own = place <= behind[:, None]
    if window is not None and drafted > window:
        own &= place > behind[:, None] - window
    ends = np.cumsum([len(group.tokens) for group in groups])
    for group, end in zip(groups, ends, strict=True):
        if group.mask is not None:
            seen = seen_scratch(cache, group, window)
            own[end - len(seen) : end, : drafted - seen.shape[1]] = False
            own[end - len(seen) : end, drafted - seen.shape[1] :] = seen[:, ::-1]
    return HostSpan(torch.from_numpy(own), prefix_read(cache, window, int(bounds[1].max()), drafted), bounds)


def prefix_read(cache: KVCache, window: int | None, seen: int, drafted: int) -> int:
    """How many slots of the prefix are read, of which some row sees `seen`, beside so many of the scratch."""
    if len(cache.lengths) == 1:
        return seen  # a mask hides no NaN, and in the slots behind may be any: see KVCache
    return min(seen + -(seen + drafted) % ALIGNED, cache.buffers[window].shape[-2] - cache.scratch)


def make_view(
    cache: KVCache, window: int | None, own: Tensor, prefix: int, bounds: Sequence[Tensor], rows: Tensor | None,
    batch: int,
) -> ForestView:  # fmt: skip
    """The view of rows on the device. own, prefix, bounds: as of HostSpan. rows: as of ForestPlacement."""
    write, seen = bounds[:2]
    places = torch.arange(prefix, device=cache.device)
    visible = places < seen[:, None]
    if window is not None:
        last, filled, reach = (bound[:, None] for bound in bounds[2:])
        # position held by each slot of the ring
        visible &= last - (last - places) % filled > reach
    visible = torch.cat((own.to(cache.device, non_blocking=True), visible), 1)
    additive = torch.zeros(visible.shape, dtype=cache.dtype, device=cache.device).masked_fill_(~visible, -torch.inf)
    # [N, M] -> [n, B, M] -> [1, B * H_kv, G * n, M]
    num_kv_heads, width, drafted = cache.buffers[window].shape[3], visible.shape[1], own.shape[1]
    spread = (additive if rows is None else additive[rows]).view(-1, batch, width).transpose(0, 1)[:, None, None]
    spread = spread.expand(batch, num_kv_heads, cache.group_size, -1, width).reshape(1, batch * num_kv_heads, -1, width)
    return ForestView(write, slice(cache.scratch - drafted, cache.scratch + prefix), spread)


def seen_scratch(cache: KVCache, group: RowGroup, window: int | None) -> npt.NDArray[np.bool_]:
    """Which scratch rows the rows of a group with a mask see, bool `[n, R]`."""
    assert group.mask is not None
    seen: npt.NDArray[np.bool_] = group.mask.numpy()
    depths = np.array([*cache.depths[group.seq], *group.depth])
    return seen if window is None else seen & (depths > np.array(group.depth)[:, None] - window)


def write(cache: KVCache, layer: int, placement: ForestPlacement, k: Tensor, v: Tensor) -> None:
    """Store the rows' keys and values, `[N, kv_heads, head_dim]` each."""
    window, index = cache.layers[layer]
    slots = placement.views[window].write
    both = torch.stack((k, v), 1)
    # not finite: as KVCache.write
    cache.buffers[window][index][:, placement.seq, :, slots] = both.nan_to_num_() if placement.drafted else both


def attend(
    cache: KVCache, layer: int, placement: ForestPlacement, q: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Attention of all rows, each over its own sequence. q: `[N, H, D]`; returns `[N, H * D]`."""
    window, index = cache.layers[layer]
    view = placement.views[window]
    keys, values = (part[placement.seqs, :, view.read].flatten(0, 1) for part in cache.buffers[window][index])
    batch = keys.shape[0] // cache.buffers[window].shape[3]
    # [N, H, D] -> [n, B * H, D]: to the operator the sequences are more heads, each with its own mask
    side_by_side = (q if placement.rows is None else q[placement.rows]).reshape(-1, batch * q.shape[1], q.shape[2])
    out = tree_attention_ref(side_by_side, keys, values, view.mask, scale, softcap)
    out = out.view(-1, q.shape[1] * q.shape[2])
    return out if placement.places is None else out[placement.places]


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
        moved = [
            (seq, rows) for seq, rows in moves
            if rows and not (seq in in_place and cache.in_order(window, seq, len(rows)))
        ]  # fmt: skip
        if moved:
            seq_of, source, target = uploaded(moved_slots(cache, window, moved), cache.device)
            buffer[:, :, seq_of, :, target] = buffer[:, :, seq_of, :, source]
    for seq, rows in kept:
        cache.advance(seq, [cache.drafted[seq][row] for row in rows])
    for group in direct:
        cache.advance(group.seq, group.tokens)


def moved_slots(
    cache: KVCache, window: int | None, moves: Sequence[tuple[int, Sequence[int]]]
) -> list[npt.NDArray[np.int64]]:
    """KVCache.slots_of of several sequences, each with its rows: int64 columns, for each row that is moved its
    sequence, its slot, and the slot that it moves to."""
    ring = cache.capacity if window is None else min(window, cache.capacity)
    facts = [(seq, len(rows), cache.lengths[seq]) for seq, rows in moves]
    counts = np.array([count for _, count, _ in facts])
    seq_of, count, length = np.repeat(facts, counts, axis=0).T
    index = np.arange(len(count)) - np.repeat(np.cumsum(counts) - counts, counts)  # of each row in its sequence
    columns = [seq_of, cache.scratch - 1 - joined(rows for _, rows in moves), cache.scratch + (length + index) % ring]
    return [column[index >= count - ring] for column in columns]  # a ring keeps the last of many rows only


def worth_sharing(ids: list[int], held: int) -> int:
    """How many of `ids` another sequence must hold for a copy, which costs a launch, if `held` of them are there: so
    many that half of the reading is spared."""
    return held + max(1, (len(ids) - held + 1) // 2)


def best_prefix(cache: KVCache, seq: int, ids: list[int]) -> tuple[int, int]:
    """Which sequence a new one at `seq` should begin with, itself where no other is worth it, and how many of `ids`
    that one holds."""
    donor, common = seq, cache.common_prefix(seq, ids)
    wanted = worth_sharing(ids, common)
    for other, tokens in enumerate(cache.tokens if common < len(ids) else []):
        # most differ in the last token
        if tokens[wanted - 1 : wanted] != ids[wanted - 1 : wanted] or tokens[:wanted] != ids[:wanted]:
            continue
        if (held := cache.common_prefix(other, ids)) > common:
            donor, common, wanted = other, held, held + 1
    return donor, common


def adopt_prefix(cache: KVCache, seq: int, ids: list[int]) -> int:
    """Begin a sequence anew with what it, or another one, holds of `ids`; returns how many of them need no reading."""
    donor, common = best_prefix(cache, seq, ids)
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
