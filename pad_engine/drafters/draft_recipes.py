"""What a draft model on the device does in a round, as graphs.DeviceDraft has it: draft a chain, grow a tree, or read.

Every draft begins with a pass over the last committed tokens, those that may not have been read: their rows go behind
the prefix by position, where they stay. A chain's later rows follow them there, one a pass. A tree's are read anew in
every pass, all levels together, and leave nothing behind: a pass of 16 rows costs little more than one of four.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pad_engine.device_round import DeviceForest, DeviceRequests, SequenceState
from pad_engine.kernels.accept import MAX_ROWS
from pad_engine.kernels.draft_chain import begin_draft, take_draft
from pad_engine.kernels.draft_tree import candidate_count, empty_candidates, rank_level
from pad_engine.kernels.keep_nodes import keep_nodes
from pad_engine.kernels.lm_head import Judging
from pad_engine.kernels.row_stats import TOP, empty_parts
from pad_engine.models.fused import row_pad

if TYPE_CHECKING:
    from pad_engine.drafters.draft_model_device import DeviceDraftModel

CHAIN_FEED = 2  # the last drafted token of a chain was not read, if all of it was accepted
WIDTH = TOP  # nodes of a level that are continued, and continuations of each
MAX_TREE_DEPTH = 14  # its first pass then has 16 rows


def tree_feed(depth: int) -> int:
    """Tokens that a tree's first pass reads: of the tree before it, which may have been so deep, nothing was kept."""
    return depth + 2


@dataclass(frozen=True)
class Chain:
    """`depth` tokens, each the draft model's pick after the one before."""

    model: "DeviceDraftModel"
    depth: int

    @property
    def nodes(self) -> int:
        """Rows of the chain."""
        return self.depth + 1

    def queue_draft(self, requests: DeviceRequests, forest: DeviceForest, rows: int) -> None:
        """Queue the passes, which write the round's chain."""
        model, chain = self.model, forest.token[:rows]
        begin(
            model,
            requests,
            CHAIN_FEED,
            (chain, forest.parent, forest.depth, forest.mask_bits, forest.start),
            self.depth,
        )
        for step in range(1, self.depth + 1):
            passed, count = (model.rows, row_pad(CHAIN_FEED)) if step == 1 else (model.row, 1)
            model.fused.launch(count, passed.token, passed, sequences(model, requests), to_prefix=True)
            scores, ids = model.fused.partials(count)
            take_draft(
                scores, ids, passed.start, requests.cache_len, model.row.token, model.draft_len, chain, forest.start,
                step=step, capacity=model.cache.capacity, pdl=model.fused.pdl[count],
            )  # fmt: skip


@dataclass(frozen=True)
class Tree:
    """The `nodes` likeliest nodes, root included, of a tree `depth` levels deep (trees/best_first.py)."""

    model: "DeviceDraftModel"
    depth: int
    nodes: int

    def queue_draft(self, requests: DeviceRequests, forest: DeviceForest, rows: int) -> None:
        """Queue the passes, which write the round's tree."""
        model, buffers, branch = self.model, self.model.tree_buffers(), self.model.branches
        begin(model, requests, model.feed, None, 0)
        for level in range(1, self.depth + 1):
            passed, count = (model.rows, row_pad(model.feed)) if level == 1 else (branch, row_pad(WIDTH * (level - 1)))
            stats = buffers.stats.sized(model.fused.programs[count], count)
            state, ranking = sequences(model, requests), Judging(stats, scored=True)
            model.fused.launch(count, passed.token, passed, state, to_prefix=level == 1, judging=ranking)
            rank_level(
                stats, passed.start, requests.cache_len, requests.limit, requests.done, model.draft_len,
                buffers.candidates, branch.token, branch.depth, branch.mask_bits, branch.start, buffers.ticket,
                level=level, width=WIDTH, last=level == self.depth, max_len=model.cache.capacity - self.depth,
                pdl=model.fused.pdl[count],
            )  # fmt: skip
        keep_nodes(
            buffers.candidates, requests.ids, requests.cache_len, forest.token[:rows], forest.parent, forest.depth,
            forest.mask_bits, forest.start, levels=self.depth, width=WIDTH, nodes=self.nodes,
        )  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """No draft: `rows` tokens that plain rounds committed are read, all but the last `model.skip` of the sequence."""

    model: "DeviceDraftModel"
    rows: int
    nodes = 0

    def queue_draft(self, requests: DeviceRequests, forest: DeviceForest, rows: int) -> None:
        """Queue the pass."""
        model = self.model
        begin(model, requests, self.rows, None, 0, model.skip)
        model.fused.launch(
            self.rows, model.rows.token, model.rows, sequences(model, requests), to_prefix=True, head=False
        )


class TreeBuffers:
    """What growing a tree takes: candidates, and the statistics of a pass's rows."""

    def __init__(self, depth: int, programs: int, device: torch.device) -> None:
        self.candidates = empty_candidates(candidate_count(depth, WIDTH), MAX_ROWS, device)
        self.stats = empty_parts(programs, MAX_ROWS, device)
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device)


def sequences(model: "DeviceDraftModel", requests: DeviceRequests) -> SequenceState:
    """The request's noise at the draft model's own length."""
    return SequenceState(model.draft_len, requests.seed, requests.temperature)


def begin(
    model: "DeviceDraftModel",
    requests: DeviceRequests,
    feed: int,
    chain: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None,
    depth: int,
    skip: Tensor | None = None,
) -> None:
    """Queue the kernel that lays out a pass over committed tokens."""
    forest, rows = model.rows, row_pad(feed)
    begin_draft(
        requests.ids, requests.cache_len, requests.limit, requests.done, forest.token[:rows], forest.parent,
        forest.depth, forest.mask_bits, forest.start, model.draft_len, chain, skip, feed=feed, depth=depth,
        capacity=model.cache.capacity, vocab_size=model.decoder.config.vocab_size,
    )  # fmt: skip
