"""Prompt lookup with the search as part of the captured round, so that the device never waits for a draft.

The host keeps ngram.py's index, whose matches tell the controller when a round should draft; what is drafted, the
device finds in the ids that it holds, which are newer by the round at work.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pad_engine.controller import RoundPlan
from pad_engine.device_round import DeviceForest, DeviceRequests
from pad_engine.drafters.ngram import NGram
from pad_engine.graphs import Rounds
from pad_engine.kernels.ngram_lookup import ngram_lookup
from pad_engine.trees.builder import TreeBuilder


@dataclass(frozen=True)
class Lookup:
    """The search for at most nodes - 1 tokens, as part of a round. most: that number, int32 `[1]` on the device."""

    drafter: "DeviceNGram"
    nodes: int
    most: Tensor = field(compare=False)

    def queue_draft(self, requests: DeviceRequests, forest: DeviceForest, rows: int) -> None:
        """Queue the search, which writes the round's chain."""
        own = self.drafter
        ngram_lookup(
            requests.ids, requests.cache_len, requests.limit, self.most, requests.done, forest.token[:rows],
            forest.parent[:rows], forest.depth[:rows], forest.mask_bits[:rows], forest.start, own.best, own.ticket,
            own.min_match,
        )  # fmt: skip


class DeviceNGram(NGram):
    """An NGram of chains, which drafts on the device where a request allows it, and on the host where it does not
    (captured.serves). depth: tokens drafted at most."""

    captured, readings = True, 0

    def __init__(self, builder: TreeBuilder, device: torch.device, depth: int, min_match: int = 2) -> None:
        super().__init__(builder, min_match)
        self.device, self.depth = device, depth
        self.lookups: dict[int, Lookup] = {}
        # the kernel's own: the best match so far, and how many of its programs have finished
        self.best = torch.zeros(1, dtype=torch.int64, device=device)
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device)

    def queue(self, rounds: Rounds, plan: RoundPlan) -> tuple[int, int]:
        """See CapturedDrafter. The budget decides, of which there are few: what room an answer has left, the kernel
        knows."""
        depth = min(self.depth, plan.budget - 1)
        if depth < 1:
            return rounds.queue_plain(), 0
        if depth not in self.lookups:
            most = torch.tensor([depth], dtype=torch.int32, device=self.device)
            self.lookups[depth] = Lookup(self, depth + 1, most)
        return rounds.queue(self.lookups[depth], depth + 1), depth
