"""Rounds as CUDA graphs: captured once, then queued with one call each and followed by a counter that the host polls.

Nothing else in the project captures a graph. A round is a pass over a forest (models/fused.py), the accept kernel, and
the commit of the path's keys and values. What differs between rounds lies in device memory (device_round.py), so the
host can queue a round before it has read the one before; a sequence that is done turns further rounds into no-ops.
Where a graph cannot be captured its kernels are launched one by one: slower, and the same.
Next to read: captured.py, which plays a request's rounds.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pad_engine.device_judge import DeviceJudge
from pad_engine.device_round import DeviceForest, DeviceRequests, Reports
from pad_engine.errors import ModelError, RequestError
from pad_engine.kernels.accept import MAX_ROWS, accept_forest
from pad_engine.kernels.accept_path import LENGTH
from pad_engine.kernels.kv_commit import kv_commit
from pad_engine.kernels.row_tiles import OFF
from pad_engine.kv_cache import KVCache
from pad_engine.models.decoder import Decoder
from pad_engine.models.fused import FusedPass, row_pad
from pad_engine.rules.override import Override
from pad_engine.tree import DraftTree

POLLS_A_CHECK = 100_000  # polls of the counter between two looks at whether the device has failed
PLAIN, TREE, LOGITS, READ = "plain", "tree", "logits", "read"
# Microseconds that a layer takes to be launched by the library (450 to 930 were seen, bench/results/*/prefill.json) and
# in a captured pass of 64 rows, but for reading its weights at so many bytes a microsecond.
LAUNCHES_US, LAYER_US, READ_BYTES_A_US = 350.0, 20.0, 3e6


class DeviceDraft(Protocol):
    """A draft that is made by kernels of the captured round; equal ones share a graph. nodes: rows of its trees at
    most, or 0 if it proposes nothing, and no round follows: a drafter's own reading."""

    @property
    def nodes(self) -> int:
        """See above."""

    def queue_draft(self, requests: DeviceRequests, forest: DeviceForest, rows: int) -> None:
        """Queue the kernels that write a forest of at most `rows` rows."""


class Rounds:
    """The graphs of one decoder and one cache, by kind and padded rows, and the buffers that they share.

    kinds: "plain" is a root alone, taken from where the last round left it; "tree" a forest that the host uploads;
    "logits" the pass over such a forest alone, with its logits; "read" the layers alone over a chain that is surely
    kept; a DeviceDraft makes its own forest. strict: see FusedPass; all rounds then have the rows of max_budget.
    override: of a relaxed rule, by which rounds over drafted nodes are decided.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        num_tokens: int,
        max_budget: int,
        strict: bool = False,
        override: Override | None = None,
    ) -> None:
        device, num_seqs = decoder.device, len(cache.lengths)
        self.device, self.cache, self.strict = device, cache, strict
        self.max_rows = row_pad(max_budget)
        self.fused = FusedPass(decoder, cache, num_tokens=num_tokens, strict=strict)
        self.most_read = most_read(self.fused.layer_bytes, decoder.dtype)
        self.judge: DeviceJudge | None = None
        if override is not None:
            hidden, dtype = decoder.config.hidden_size, decoder.dtype
            self.judge = DeviceJudge(override, self.fused.programs, hidden, dtype, device)
        self.requests = DeviceRequests(num_seqs, cache.capacity, device)
        self.root, self.forest = DeviceForest(num_seqs, device), DeviceForest(num_seqs, device)
        self.reports = Reports(num_seqs, device)
        self.pick = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        self.paths = torch.zeros(num_seqs, MAX_ROWS, dtype=torch.int32, device=device)
        self.old_len, self.n_commit, self.ticket = torch.zeros(3, num_seqs, dtype=torch.int32, device=device)
        self.logits: Tensor | None = None
        self.replays: dict[tuple[str | DeviceDraft, int], Callable[[], None]] = {}
        self.queued = 0  # rounds that will report

    def rows_for(self, nodes: int) -> int:
        """The padded rows of a round over so many nodes. A root alone has a graph of its own, except in strict mode."""
        if self.strict or nodes > 1:
            return max(row_pad(nodes), self.max_rows if self.strict else 16)
        return 1

    def begin(
        self, seq: int, ids: Sequence[int], limit: int, end_ids: Sequence[int], seed: int, temperature: float
    ) -> None:
        """Tell the device of a request. All but the last of its ids are in the cache."""
        self.requests.fill(seq, ids, limit, end_ids, seed, temperature)
        self.requests.upload()

    def queue(self, kind: str | DeviceDraft, nodes: int) -> int:
        """Queue a round over so many nodes (a plain one: the sequences' roots); returns the index to wait for."""
        self.replay(kind, self.rows_for(nodes))
        self.queued += 1
        return self.queued - 1

    def queue_plain(self) -> int:
        """Queue a plain step of every sequence."""
        return self.queue(PLAIN, len(self.cache.lengths))

    def queue_tree(self, trees: Sequence[DraftTree]) -> int:
        """Queue a round over the trees of all sequences."""
        self.fill(trees)
        return self.queue(TREE, sum(len(tree) for tree in trees))

    def logits_of(self, trees: Sequence[DraftTree]) -> Tensor:
        """fp32 `[N, num_tokens]` of a forest whose rows go to the scratch, to be committed by the cache."""
        nodes = sum(len(tree) for tree in trees)
        rows = self.rows_for(nodes)
        self.upload_lengths()
        self.fill(trees)
        if self.logits is None:
            self.logits = torch.empty(MAX_ROWS, self.fused.num_tokens, device=self.device)
        self.replay(LOGITS, rows)
        return self.logits[:nodes]

    def read_rows(self, seq: int, left: int) -> int:
        """How many of a sequence's next `left` tokens `read` takes at once: none where the library is quicker with all
        of them, or a ring wraps."""
        rows = min(left, MAX_ROWS + 1 - len(self.cache.lengths))
        in_order = all(self.cache.in_order(window, seq, rows) for window in self.cache.buffers)
        return rows if left <= self.most_read and in_order else 0

    def read(self, seq: int, tokens: Sequence[int]) -> None:
        """Read tokens into a sequence's prefix, and count them there."""
        # the other sequences have a row each, which is padding of theirs and lies behind their prefix
        trees = [DraftTree.chain(tokens if other == seq else [0]) for other in range(len(self.cache.lengths))]
        self.upload_lengths()
        self.fill(trees)
        self.replay(READ, MAX_ROWS if len(tokens) + len(trees) - 1 > 16 else 16)
        self.cache.advance(seq, tokens)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the images are free for the next upload

    def upload_lengths(self) -> None:
        """Tell the device how many tokens of each sequence the cache holds, where no accept kernel has counted them."""
        self.requests.host["cache_len"][:] = self.cache.lengths
        self.requests.upload()

    def fill(self, trees: Sequence[DraftTree]) -> None:
        """Put the trees into the image that a round uploads. RequestError for a branch in strict mode."""
        if self.strict and any(parent != node - 1 for tree in trees for node, parent in enumerate(tree.parents)):
            raise RequestError("strict mode verifies chains, and this drafter's tree has branches")
        self.forest.fill(trees)

    def wait(self, index: int) -> None:
        """Until the round has reported; raises what the device has failed with."""
        counter, polls = self.reports.counter_view, 0
        while counter[0] <= index:
            polls += 1
            if polls % POLLS_A_CHECK == 0 and self.device.type == "cuda":
                finished = torch.cuda.current_stream(self.device).query()
                if finished and counter[0] <= index:
                    raise RuntimeError(f"round {index} was queued and never reported")
                time.sleep(0)

    def replay(self, kind: str | DeviceDraft, rows: int) -> None:
        """Queue a graph, made at its first use."""
        if (kind, rows) not in self.replays:
            self.replays[kind, rows] = self.make(kind, rows)
        self.replays[kind, rows]()

    def make(self, kind: str | DeviceDraft, rows: int) -> Callable[[], None]:
        """Compile a round's kernels by a run that changes nothing, and capture it."""

        def launch() -> None:
            self.launch(kind, rows)

        if self.device.type != "cuda":
            return launch
        done = self.requests.done.clone()
        self.requests.done.fill_(LENGTH)
        try:
            launch()
            self.queued += reports(kind)
        except torch.OutOfMemoryError as error:
            raise ModelError("no memory on the GPU for a round's buffers", "choose a smaller max_length") from error
        finally:
            self.requests.done.copy_(done)
        try:
            return capture(launch).replay
        except RuntimeError as error:
            warnings.warn(f"a round of {rows} rows runs without a CUDA graph, slower: {error}", stacklevel=2)
            return launch

    def launch(self, kind: str | DeviceDraft, rows: int) -> None:
        """Queue the kernels of one round, one by one."""
        requests, pdl = self.requests, self.fused.pdl[rows] != OFF
        forest, token = (self.root, requests.root) if kind == PLAIN else (self.forest, self.forest.token)
        if kind in (TREE, LOGITS, READ):
            forest.upload()
        if not isinstance(kind, str):
            kind.queue_draft(requests, forest, rows)
        if kind == READ:
            self.fused.launch(rows, token, forest, requests.state, to_prefix=True, head=False)
        if kind == LOGITS:
            assert self.logits is not None
            self.fused.launch(rows, token, forest, requests.state, self.strict, self.logits[:rows])
        if not reports(kind):
            return
        # a root alone has nothing to relax
        judge = None if kind == PLAIN else self.judge
        judging, tap_layer = (None, None) if judge is None else (judge.judging(rows, forest), judge.tap_layer)
        to_prefix = self.fused.to_prefix(rows)
        self.fused.launch(rows, token, forest, requests.state, to_prefix, judging=judging, tap_layer=tap_layer)
        scores, ids = self.fused.partials(rows)
        relaxation = None
        if judge is not None:
            scores, ids, relaxation = judge.queue(rows, forest, scores, ids, self.fused.pdl[rows])
        path = self.paths.view(-1)[: rows * len(self.cache.lengths)].view(-1, rows)
        accept_forest(
            scores, ids, token[:rows], forest.parent[:rows], forest.depth[:rows], forest.mask_bits[:rows], forest.start,
            requests.limit, requests.end_ids, requests.ids, requests.cache_len, requests.done, requests.root, self.pick,
            path, self.old_len, self.n_commit, self.reports.ring, self.reports.round, self.reports.counter, self.ticket,
            pdl=pdl, relaxation=relaxation, history=None if self.judge is None else requests.history,
        )  # fmt: skip
        if not self.fused.to_prefix(rows):
            for buffer in self.cache.buffers.values():
                kv_commit(buffer, path, forest.start, self.old_len, self.n_commit, self.cache.scratch, pdl=pdl)

    @property
    def num_graphs(self) -> int:
        """How many rounds were captured, or are launched one by one."""
        return len(self.replays)


def most_read(layer_bytes: int, dtype: torch.dtype) -> int:
    """Tokens of a prompt that captured passes read sooner than one pass of the library, whose launches are what takes
    time. Nothing of it is measured, so that a prompt is always read in the same way. In fp32, whose products do not run
    on the tensor core, it is one pass."""
    passes = int(LAUNCHES_US / (LAYER_US + layer_bytes / READ_BYTES_A_US)) if dtype.itemsize == 2 else 1
    return MAX_ROWS * max(1, passes)


def reports(kind: str | DeviceDraft) -> bool:
    """Whether rounds of this kind end in the accept kernel, which tells the host."""
    return kind in (PLAIN, TREE) if isinstance(kind, str) else kind.nodes > 0


def capture(queue: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of what `queue` launches. Its kernels must have been compiled, and every buffer must outlive it."""
    graph = torch.cuda.CUDAGraph()
    # what other threads do on the device meanwhile is theirs
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        queue()
    return graph
