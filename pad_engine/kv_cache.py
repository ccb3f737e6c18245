"""Keys and values: a committed prefix for each sequence, and a scratch for rows that may yet be rejected.

One buffer holds the layers of one window size: `[layers, 2, seqs, kv_heads, scratch + slots, head_dim]`, keys first.
Scratch row r lives in slot `scratch - 1 - r` and the prefix begins at slot `scratch`, so scratch rows and prefix are
one unbroken range to the attention, whatever their number, and nothing is copied to read them. In layers that see
everything, position p lives in prefix slot p. In sliding layers the prefix is a ring of `window` slots, position p in
slot p modulo the window: a rejected row never overwrites a key that is needed again, because it never left the scratch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pad_engine.errors import ModelError
from pad_engine.kernels.kv_commit import kv_commit_ref

PREFILL_CHUNK = 512  # rows of one pass over a prompt


@dataclass(frozen=True)
class RowGroup:
    """The new rows of one sequence in a pass.

    depth: distance of each row from the sequence's committed length. mask: `[n, R]` bool over all R scratch rows of the
    sequence (those already there, then these): what each row sees of them. None means a chain: everything before it.
    """

    seq: int
    tokens: Sequence[int]
    depth: Sequence[int]
    mask: Tensor | None = None


@dataclass(frozen=True)
class Span:
    """Where one group's rows lie: its rows of the pass, and the slots to write.

    drafted: some of the rows may yet be rejected. read: for each window size the slots to read, and the additive mask
    `[group_size * n, M]` over them (None: all of them are seen).
    """

    seq: int
    rows: slice
    write: slice
    drafted: bool
    read: dict[int | None, tuple[slice, Tensor | None]]


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
        self.layers: list[tuple[int | None, int]] = []  # each layer's window and its index in that buffer
        for window in windows:
            self.layers.append((window, sum(w == window for w, _ in self.layers)))
        for window in dict.fromkeys(windows):
            slots = scratch + (capacity if window is None else min(window, capacity))
            shape = (windows.count(window), 2, num_seqs, num_kv_heads, slots, head_dim)
            try:
                self.buffers[window] = torch.empty(shape, dtype=dtype, device=device)
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
        held = self.tokens[seq]
        common = next((i for i, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b), min(len(held), len(ids)))
        wrapped = any(window is not None and len(held) > window for window in self.buffers)
        if wrapped and common < len(held):
            common = 0
        self.lengths[seq] = common
        del held[common:]
        return common

    def place(self, groups: Sequence[RowGroup]) -> Placement:
        """Give the rows of a pass their slots and masks, once for all layers. The rows join the scratch."""
        tokens: list[int] = []
        positions: list[int] = []
        prompts: list[int] = []
        spans: list[Span] = []
        for group in groups:
            rows = len(self.depths[group.seq]) + len(group.tokens)
            if rows > self.scratch:
                raise ValueError(f"{rows} rows of sequence {group.seq} do not fit a scratch of {self.scratch}")
        for group in groups:
            n, length, used = len(group.tokens), self.lengths[group.seq], len(self.depths[group.seq])
            self.depths[group.seq] += group.depth
            self.drafted[group.seq] += group.tokens
            # slots run backwards, so the last row has the lowest slot
            write = slice(self.scratch - used - n, self.scratch - used)
            read = {window: self.visible(group, window) for window in self.buffers}
            drafted = group.mask is not None and n > 1
            spans.append(Span(group.seq, slice(len(tokens), len(tokens) + n), write, drafted, read))
            tokens += group.tokens
            positions += [length + depth for depth in group.depth]
            prompts += [self.prompt_lengths[group.seq]] * n
        return Placement(
            torch.tensor(tokens, device=self.device),
            torch.tensor(positions, device=self.device),
            torch.tensor(prompts),
            spans,
        )

    def visible(self, group: RowGroup, window: int | None) -> tuple[slice, Tensor | None]:
        """The slots that a group reads in layers of one window size, and its additive mask over them."""
        depths, length, n = self.depths[group.seq], self.lengths[group.seq], len(group.tokens)
        filled = length if window is None else min(length, window)
        read = slice(self.scratch - len(depths), self.scratch + filled)
        in_reach = window is None or max(group.depth) + length < window
        if n == 1 and in_reach and group.mask is None:
            return read, None
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
            return read, None
        additive = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        return read, additive.repeat(self.group_size, 1).to(self.device, self.dtype)

    def write(self, layer: int, span: Span, k: Tensor, v: Tensor) -> None:
        """Store the span's new rows. k, v: `[n, kv_heads, head_dim]`."""
        window, index = self.layers[layer]
        slots = self.buffers[window][index, :, span.seq, :, span.write]
        if span.drafted:
            # a masked key or value that is not finite would still turn its neighbours' sums into NaN; the row itself
            # stays what it is, and fails the request if it is on the path
            k, v = k.nan_to_num(), v.nan_to_num()
        slots[0] = k.flip(0).transpose(0, 1)
        slots[1] = v.flip(0).transpose(0, 1)

    def read(self, layer: int, span: Span) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values `[kv_heads, M, head_dim]` that the span's rows may see, and the additive mask over them."""
        window, index = self.layers[layer]
        slots, mask = span.read[window]
        keys, values = self.buffers[window][index, :, span.seq, :, slots]
        return keys, values, mask

    def commit(self, seq: int, rows: Sequence[int]) -> None:
        """Move scratch rows, in this order, behind the prefix, and empty the scratch."""
        length = self.lengths[seq]
        if length + len(rows) > self.capacity:
            raise ValueError(f"{length + len(rows)} tokens do not fit a cache of {self.capacity}")
        for window, buffer in self.buffers.items():
            # a ring keeps the last of many rows only
            moved = list(rows) if window is None else list(rows)[-min(window, self.capacity) :]
            first = length + len(rows) - len(moved)
            ring = self.capacity if window is None else min(window, self.capacity)
            source = [self.scratch - 1 - row for row in moved]
            target = [self.scratch + (first + i) % ring for i in range(len(moved))]
            kv_commit_ref(buffer[:, :, seq], source, target)
        self.lengths[seq] = length + len(rows)
        self.tokens[seq] += [self.drafted[seq][row] for row in rows]
        self.discard(seq)

    def discard(self, seq: int) -> None:
        """Empty the scratch without keeping anything of it."""
        self.depths[seq], self.drafted[seq] = [], []
