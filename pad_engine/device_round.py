"""What a captured round reads and writes, at fixed addresses: the forest, the requests, and the report to the host.

Everything that differs from round to round lies in these tensors, so a graph that was captured once serves all of them.
Next to read: models/fused.py for the pass, graphs.py for the capture.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pad_engine.kernels.accept import MAX_ROWS, REPORT_HEADER, REPORT_WIDTH, TRACE_START
from pad_engine.kernels.accept_path import LENGTH, RUNNING
from pad_engine.kernels.relaxed import TRACE_FIELDS
from pad_engine.tree import DraftTree, ancestors, lay_out, to_int64

MAX_END_IDS = 32
RING = 8  # rounds whose reports are kept, more than are ever queued


class Mirror:
    """Integers on the device and their image in pinned memory, so that one asynchronous copy brings all of them.

    fields: name to (count, dtype). Every field is an attribute, a view of the device's tensor; `host[name]` is the
    numpy view of the image.
    """

    def __init__(self, fields: dict[str, tuple[int, torch.dtype]], device: torch.device) -> None:
        sizes = {name: -(-count * dtype.itemsize // 16) * 16 for name, (count, dtype) in fields.items()}
        total = sum(sizes.values())
        self.image = torch.zeros(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.memory = torch.zeros(total, dtype=torch.uint8, device=device)
        self.host: dict[str, Any] = {}
        start = 0
        for name, (count, dtype) in fields.items():
            part = slice(start, start + count * dtype.itemsize)
            self.host[name] = self.image[part].view(dtype).numpy()
            setattr(self, name, self.memory[part].view(dtype))
            start += sizes[name]

    def __getattr__(self, name: str) -> Tensor:
        raise AttributeError(name)  # fields are set in __init__; this tells the type checker what they are

    def upload(self) -> None:
        """Copy the image; the host must not change it before a later round has reported."""
        self.memory.copy_(self.image, non_blocking=True)


def forest_fields(num_seqs: int) -> dict[str, tuple[int, torch.dtype]]:
    """The rows of a pass, as tree.Forest has them; `start[s]` is the first row of sequence s, rows past the last start
    are padding."""
    rows = dict.fromkeys(("token", "parent", "depth", "seq"), (MAX_ROWS, torch.int32))
    return {**rows, "mask_bits": (MAX_ROWS, torch.int64), "start": (num_seqs + 1, torch.int32)}


class DeviceForest(Mirror):
    """The rows of one pass, at first a root alone for every sequence."""

    def __init__(self, num_seqs: int, device: torch.device) -> None:
        super().__init__(forest_fields(num_seqs), device)
        self.fill([DraftTree.chain([0])] * num_seqs)
        self.upload()

    def fill(self, trees: Sequence[DraftTree]) -> None:
        """Put one tree a sequence into the image. Plain integers: this is the host's part of a round, and tensors would
        make it ten times as long."""
        rows, starts = lay_out(trees, range(len(trees)))
        count, host = len(rows["token"]), self.host
        for name, values in rows.items():
            host[name][:count] = values
            host[name][count:] = 0
        host["mask_bits"][:count] = [to_int64(word) for word in ancestors(rows["parent"])]
        host["mask_bits"][count:] = 0
        host["start"][:] = [*starts, count]


class SequenceState(NamedTuple):
    """What a pass reads of its S sequences: cache_len int32, seed int64 and temperature fp32, all `[S]`."""

    cache_len: Tensor
    seed: Tensor
    temperature: Tensor


class DeviceRequests(Mirror):
    """One request a sequence: cache_len (committed tokens), limit (the most ids it may hold), done (a status of
    kernels/accept_path.py), root (the last committed id), end_ids (padded with -1), seed, history (bit b: the token
    emitted b tokens ago was an override), temperature (0: greedy). ids: int32 `[num_seqs, capacity + 1]`, prompt and
    answer."""

    def __init__(self, num_seqs: int, capacity: int, device: torch.device) -> None:
        counts = dict.fromkeys(("cache_len", "limit", "done"), (num_seqs, torch.int32))
        super().__init__(
            {
                **counts,
                "root": (MAX_ROWS, torch.int32),  # read as the ids of a pass's rows, padding included
                "end_ids": (MAX_END_IDS, torch.int32),
                "seed": (num_seqs, torch.int64),
                "history": (num_seqs, torch.int64),
                "temperature": (num_seqs, torch.float32),
            },
            device,
        )
        self.host["end_ids"][:] = -1
        self.host["done"][:] = LENGTH
        self.upload()
        self.ids = torch.zeros(num_seqs, capacity + 1, dtype=torch.int32, device=device)
        self.ids_image = torch.zeros(num_seqs, capacity + 1, dtype=torch.int32, pin_memory=device.type == "cuda")

    @property
    def state(self) -> SequenceState:
        """What a pass over these sequences reads."""
        return SequenceState(self.cache_len, self.seed, self.temperature)

    def fill(
        self, seq: int, ids: Sequence[int], limit: int, end_ids: Sequence[int], seed: int, temperature: float
    ) -> None:
        """Begin a request on a sequence: put it into the image, and its ids on the device."""
        host = self.host
        host["cache_len"][seq], host["limit"][seq], host["done"][seq] = len(ids) - 1, limit, RUNNING
        host["root"][seq], host["seed"][seq], host["temperature"][seq] = ids[-1], to_int64(seed % 2**64), temperature
        host["history"][seq] = 0
        host["end_ids"][:] = -1
        host["end_ids"][: len(end_ids)] = end_ids
        self.ids_image[seq, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self.ids[seq, : len(ids)].copy_(self.ids_image[seq, : len(ids)], non_blocking=True)


class Reports:
    """What each round says to the host, in memory that both see: the host polls `counter` and never synchronises.

    ring: int32 `[RING, num_seqs, REPORT_WIDTH]`, a header (kernels/accept.py) and the emitted ids. counter: int64
    `[1]`, the number of rounds whose reports are complete. round: int64 `[1]` on the device, the same number.
    """

    def __init__(self, num_seqs: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.ring = torch.zeros(RING, num_seqs, REPORT_WIDTH, dtype=torch.int32, pin_memory=pinned)
        self.counter = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self.round = torch.zeros(1, dtype=torch.int64, device=device)
        self.ring_view: Any = self.ring.numpy()
        self.counter_view: Any = self.counter.numpy()

    def read(self, round_index: int, seq: int) -> tuple[list[int], int, int, int]:
        """(ids emitted, how many of them were drafted, status, rows of the tree) of a round that is complete."""
        report = self.ring_view[round_index % RING, seq]
        emitted, accepted, status, rows = (int(value) for value in report[:REPORT_HEADER])
        return report[REPORT_HEADER : REPORT_HEADER + emitted].tolist(), accepted, status, rows

    def overrides(self, round_index: int, seq: int, accepted: int) -> list[tuple[int, float, float, float, float]]:
        """Of a relaxed rule's round that is complete: place among the drafted tokens that were emitted, margin,
        entropy, probability and pivot_prob of each override."""
        trace = self.ring_view[round_index % RING, seq, TRACE_START:].reshape(TRACE_FIELDS, MAX_ROWS)[:, :accepted]
        values = trace[1:].view(np.float32)
        return [(int(place), *map(float, values[:, place])) for place in np.flatnonzero(trace[0])]  # type: ignore[misc]
