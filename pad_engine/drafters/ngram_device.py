"""Prompt lookup on the device: the search is a kernel of the captured round, and the host decides nothing.

Every round drafts as deep as it may, match or not: a round without one costs what a round with one does. ngram.py,
whose drafts the controller weighs, is the default; this one is for texts that repeat themselves and short steps.
"""

import torch

from pad_engine.controller import RoundPlan
from pad_engine.device_round import DeviceForest, DeviceRequests
from pad_engine.drafters.none import NoDrafter
from pad_engine.errors import RequestError
from pad_engine.graphs import Rounds
from pad_engine.kernels.ngram_lookup import ngram_lookup


class DeviceNGram(NoDrafter):
    """On the host it proposes nothing, and requests whose rounds the host decides are decoded plainly.

    min_match: shortest match that is used, in tokens. depth: tokens drafted at most.
    """

    def __init__(self, device: torch.device, depth: int, min_match: int = 2) -> None:
        if device.type != "cuda":
            raise RequestError("drafter ngram-device needs a GPU", "choose drafter ngram")
        self.nodes, self.min_match = depth + 1, min_match
        self.depth = torch.tensor([depth], dtype=torch.int32, device=device)
        # the kernel's own: the best match so far, and how many of its programs have finished
        self.best = torch.zeros(1, dtype=torch.int64, device=device)
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device)

    def queue(self, rounds: Rounds, plan: RoundPlan) -> tuple[int, int]:
        """See CapturedDrafter; every round is the same."""
        return rounds.queue(self, self.nodes), self.nodes - 1

    def queue_draft(self, requests: DeviceRequests, forest: DeviceForest, rows: int) -> None:
        """Queue the search, which writes the round's chain."""
        ngram_lookup(
            requests.ids, requests.cache_len, requests.limit, self.depth, requests.done, forest.token[:rows],
            forest.parent[:rows], forest.depth[:rows], forest.mask_bits[:rows], forest.start, self.best, self.ticket,
            self.min_match,
        )  # fmt: skip
