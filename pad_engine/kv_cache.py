"""Keys and values: a committed prefix for each sequence, and a scratch for rows that may yet be rejected.

One buffer holds the layers of one window size: `[layers, 2, seqs, kv_heads, scratch + slots, head_dim]`, keys first.
Scratch row r lives in slot `scratch - 1 - r` and the prefix begins at slot `scratch`, so scratch rows and prefix are
one unbroken range to the attention, whatever their number, and nothing is copied to read them. In layers that see
everything, position p lives in prefix slot p. In sliding layers the prefix is a ring of `window` slots, position p in
slot p modulo the window: a rejected row never overwrites a key that is needed again, because it never left the scratch.
Rows that will surely be kept, those of a prompt, need no scratch where nothing wraps: they are written to the prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pad_engine.errors import ModelError
from pad_engine.kernels.kv_commit import kv_commit_ref

PREFILL_SCRATCH = 512  # rows of a pass over a prompt that cannot be written to the prefix at once


def prefill_chunk(device: torch.device) -> int:
    """Rows of one pass over a prompt, where the cache takes them (KVCache.rows_at_once)."""
    return 2048 if device.type == "cuda" else PREFILL_SCRATCH  # a GPU is not busy with fewer


@dataclass(frozen=True)
class RowGroup:
    """The new rows of one sequence in a pass.

    depth: distance of each row from the sequence's committed length. mask: `[n, R]` bool over all R scratch rows of the
    sequence (those already there, then these): what each row sees of them. None means a chain: everything before it.
    direct: a chain that will surely be kept and begins behind the prefix; the scratch must be empty. It does not join
    the scratch, and `commit_direct` ends it.
    """

    seq: int
    tokens: Sequence[int]
    depth: Sequence[int]
    mask: Tensor | None = None
    direct: bool = False


@dataclass(frozen=True)
class View:
    """What one group writes and reads in the layers of one window size.

    causal: the rows go to the prefix in the order of their positions and are the last of the M slots read; each sees
    those up to its own. Otherwise slots run backwards, and mask is additive `[group_size * n, M]` over those read
    (None: all of them are seen).
    """

    write: slice
    read: slice
    mask: Tensor | None = None
    causal: bool = False


@dataclass(frozen=True)
class Span:
    """Where one group's rows lie: its rows of the pass, and its view for each window size.

    drafted: some of the rows may yet be rejected.
    """

    seq: int
    rows: slice
    drafted: bool
    views: dict[int | None, View]


@dataclass(frozen=True)
class Placement:
    """One pass: the rows' tokens and positions (int64 `[N]`), and the spans of their sequences."""

    tokens: Tensor
    positions: Tensor
    prompt_lengths: Tensor
    spans: list[Span]


class KVCache:
    """The cache of one model for `num_seqs` sequences of at most `capacity` committed tokens each.

    windows: for each layer its sliding window in tokens, or None. group_size: query heads a key/value head.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        num_kv_heads: int,
        group_size: int,
        head_dim: int,
        *,
        num_seqs: int = 1,
        capacity: int,
        scratch: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.capacity, self.scratch, self.group_size = capacity, scratch, group_size
        self.dtype, self.device = dtype, device
        self.buffers: dict[int | None, Tensor] = {}
        # each layer's window and its index in that buffer
        self.layers = [(window, windows[:layer].count(window)) for layer, window in enumerate(windows)]
        for window in dict.fromkeys(windows):
            slots = scratch + (capacity if window is None else min(window, capacity))
            # sequences read together are read equally far, and what a mask hides must be finite
            make = torch.empty if num_seqs == 1 else torch.zeros
            shape = (windows.count(window), 2, num_seqs, num_kv_heads, slots, head_dim)
            try:
                self.buffers[window] = make(shape, dtype=dtype, device=device)
            except RuntimeError as error:  # torch.OutOfMemoryError on a GPU is one
                raise ModelError(
                    f"no memory on {device} for the keys and values of {num_seqs} x {capacity} tokens: {error}",
                    "choose a smaller max_length",
                ) from error
        self.lengths = [0] * num_seqs
        self.prompt_lengths = [0] * num_seqs
        self.tokens: list[list[int]] = [[] for _ in range(num_seqs)]  # of the committed rows
        # of the scratch rows in use
        self.depths: list[list[int]] = [[] for _ in range(num_seqs)]
        self.drafted: list[list[int]] = [[] for _ in range(num_seqs)]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers.values())

    def reset(self, seq: int, prompt_length: int = 0) -> None:
        """Forget a sequence. prompt_length: tokens of the prompt to come (it fixes dynamic rotary frequencies)."""
        self.lengths[seq], self.prompt_lengths[seq], self.tokens[seq] = 0, prompt_length, []
        self.discard(seq)

    def keep_prefix(self, seq: int, ids: Sequence[int]) -> int:
        """Forget what does not begin `ids`; returns how many of them are left in the cache.

        A ring that has wrapped has lost the keys before its window, so such a sequence can only be kept whole.
        """
        self.discard(seq)
        common = self.lengths[seq] = self.common_prefix(seq, ids)
        del self.tokens[seq][common:]
        return common

    def common_prefix(self, seq: int, ids: Sequence[int]) -> int:
        """The same without forgetting anything."""
        held = self.tokens[seq]
        common = next((i for i, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b), min(len(held), len(ids)))
        wrapped = any(window is not None and len(held) > window for window in self.buffers)
        return 0 if wrapped and common < len(held) else common

    def in_order(self, window: int | None, seq: int, rows: int) -> bool:
        """Whether that many rows behind the prefix neither wrap in a ring nor leave the reach of one another."""
        return window is None or self.lengths[seq] + rows <= window

    def rows_at_once(self, seq: int, rows: int) -> int:
        """How many of the next `rows` of a sequence one direct group can hold: a ring that wraps needs the scratch."""
        return rows if all(self.in_order(window, seq, rows) for window in self.buffers) else min(rows, self.scratch)

    def claim(self, group: RowGroup) -> None:
        """Let a group's rows join the scratch, where a pass writes them."""
        self.depths[group.seq] += group.depth
        self.drafted[group.seq] += group.tokens

    def place(self, groups: Sequence[RowGroup]) -> Placement:
        """Give the rows of a pass their slots and masks, once for all layers. The rows join the scratch, but for those
        of direct groups.

        ValueError when rows do not fit the scratch, or direct ones the prefix; the cache is then as it was.
        """
        columns, start = self.columns(groups), 0
        spans: list[Span] = []
        for group in groups:
            rows = slice(start, start := start + len(group.tokens))
            views = {window: self.view(group, window) for window in self.buffers}
            spans.append(Span(group.seq, rows, group.mask is not None and len(group.tokens) > 1, views))
            if not group.direct:
                self.claim(group)
        return Placement(*columns, spans)

    def columns(self, groups: Sequence[RowGroup]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions and prompt lengths of the groups' rows. ValueError as of place."""
        for group in groups:
            self.check_room(group)
        tokens = [token for group in groups for token in group.tokens]
        positions = [self.lengths[group.seq] + depth for group in groups for depth in group.depth]
        prompts = [self.prompt_lengths[group.seq] for group in groups for _ in group.tokens]
        first, second = (torch.tensor(column, device=self.device) for column in (tokens, positions))
        return first, second, torch.tensor(prompts)

    def check_room(self, group: RowGroup) -> None:
        """ValueError unless the group's rows fit where they go."""
        seq, n = group.seq, len(group.tokens)
        rows = len(self.depths[seq]) + n
        if group.direct:
            if rows > n:
                raise ValueError(f"the scratch of sequence {seq} holds {rows - n} rows: commit or discard them first")
            self.check_capacity(seq, n)
        in_scratch = not group.direct or not all(self.in_order(window, seq, n) for window in self.buffers)
        if in_scratch and rows > self.scratch:
            raise ValueError(f"{rows} rows of sequence {seq} do not fit a scratch of {self.scratch}")

    def check_capacity(self, seq: int, rows: int) -> None:
        """ValueError unless that many rows fit behind the prefix."""
        if self.lengths[seq] + rows > self.capacity:
            raise ValueError(f"{self.lengths[seq] + rows} tokens do not fit a cache of {self.capacity}")

    def view(self, group: RowGroup, window: int | None) -> View:
        """The slots that a group writes and reads in layers of one window size, and what it sees of them."""
        depths = [*self.depths[group.seq], *group.depth]
        length, n = self.lengths[group.seq], len(group.tokens)
        if group.direct and self.in_order(window, group.seq, n):
            end = self.scratch + length + n
            return View(slice(end - n, end), slice(self.scratch, end), causal=True)
        filled = length if window is None else min(length, window)
        # slots run backwards, so the last row has the lowest slot
        last = self.scratch - len(depths)
        write, read = slice(last, last + n), slice(last, self.scratch + filled)
        in_reach = window is None or max(group.depth) + length < window
        if n == 1 and in_reach and group.mask is None:
            return View(write, read)
        mask = group.mask
        if mask is None:
            mask = torch.ones(n, len(depths), dtype=torch.bool).tril_(len(depths) - n)
        seen = torch.ones(n, len(depths) + filled, dtype=torch.bool)
        seen[:, : len(depths)] = mask.flip(1)
        if not in_reach:
            assert window is not None
            slots = torch.arange(filled)
            prefix = length - 1 - (length - 1 - slots) % max(filled, 1)  # position held by each slot of the ring
            keys = torch.cat((length + torch.tensor(depths).flip(0), prefix))
            seen &= keys > (length + torch.tensor(list(group.depth)))[:, None] - window
        if seen.all():
            return View(write, read)
        additive = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        return View(write, read, additive.repeat(self.group_size, 1).to(self.device, self.dtype))

    def write(self, layer: int, span: Span, k: Tensor, v: Tensor) -> None:
        """Store the span's new rows. k, v: `[n, kv_heads, head_dim]`."""
        window, index = self.layers[layer]
        view = span.views[window]
        slots = self.buffers[window][index, :, span.seq, :, view.write]
        if span.drafted:
            # a masked key or value that is not finite would still turn its neighbours' sums into NaN; the row itself
            # stays what it is, and fails the request if it is on the path
            k, v = k.nan_to_num(), v.nan_to_num()
        if not view.causal:
            k, v = k.flip(0), v.flip(0)
        slots[0] = k.transpose(0, 1)
        slots[1] = v.transpose(0, 1)

    def read(self, layer: int, span: Span) -> tuple[Tensor, Tensor, View]:
        """Keys and values `[kv_heads, M, head_dim]` of the slots read, and what the span's rows see of them."""
        window, index = self.layers[layer]
        view = span.views[window]
        keys, values = self.buffers[window][index, :, span.seq, :, view.read]
        return keys, values, view

    def commit(self, seq: int, rows: Sequence[int]) -> None:
        """Move scratch rows, in this order, behind the prefix, and empty the scratch."""
        self.check_capacity(seq, len(rows))
        for window in self.buffers:
            self.move(window, seq, rows)
        self.advance(seq, [self.drafted[seq][row] for row in rows])

    def commit_direct(self, seq: int, tokens: Sequence[int]) -> None:
        """Keep the tokens of a direct group, once all layers have run. Without this its rows stay invisible."""
        for window in self.buffers:
            if not self.in_order(window, seq, len(tokens)):
                self.move(window, seq, range(len(tokens)))
        self.advance(seq, tokens)

    def move(self, window: int | None, seq: int, rows: Sequence[int]) -> None:
        """Copy scratch rows, in this order, behind the prefix in the layers of one window size."""
        kv_commit_ref(self.buffers[window][:, :, seq], *self.slots_of(window, seq, rows))

    def slots_of(self, window: int | None, seq: int, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """The slots of those rows, and the slots that they move to."""
        ring = self.capacity if window is None else min(window, self.capacity)
        # a ring keeps the last of many rows only
        moved = list(rows)[-ring:]
        first = self.lengths[seq] + len(rows) - len(moved)
        source = [self.scratch - 1 - row for row in moved]
        return source, [self.scratch + (first + i) % ring for i in range(len(moved))]

    def advance(self, seq: int, tokens: Sequence[int]) -> None:
        """Count rows, whose keys and values lie behind the prefix already, as part of it, and empty the scratch.

        ValueError when they do not fit the capacity.
        """
        self.check_capacity(seq, len(tokens))
        self.lengths[seq] += len(tokens)
        self.tokens[seq] += tokens
        self.discard(seq)

    def discard(self, seq: int) -> None:
        """Empty the scratch without keeping anything of it."""
        self.depths[seq], self.drafted[seq] = [], []
