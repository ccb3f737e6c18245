"""Prompt lookup on the device: the search is a kernel of the captured round, and the host decides nothing.

Every round drafts as deep as it may, match or not: a round without one costs what a round with one does. ngram.py,
whose drafts the controller weighs, is the default; this one is for texts that repeat themselves and short steps.
"""

from typing import Literal

import torch

from pad_engine.device_round import DeviceForest, DeviceRequests
from pad_engine.errors import RequestError
from pad_engine.kernels.ngram_lookup import ngram_lookup
from pad_engine.state import Commit, State
from pad_engine.tree import DraftTree


class DeviceNGram:
    """min_match: shortest match that is used, in tokens. depth: tokens drafted at most."""

    captured = True
    draft_probs: Literal["none"] = "none"
    taps: tuple[int, ...] = ()
    nbytes = 0

    def __init__(self, device: torch.device, depth: int, min_match: int = 2) -> None:
        if device.type != "cuda":
            raise RequestError("drafter ngram-device needs a GPU", "choose drafter ngram")
        self.nodes, self.min_match = depth + 1, min_match
        self.depth = torch.tensor([depth], dtype=torch.int32, device=device)
        # the kernel's own: the best match so far, and how many of its programs have finished
        self.best = torch.zeros(1, dtype=torch.int64, device=device)
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device)

    def queue_draft(self, requests: DeviceRequests, forest: DeviceForest, rows: int) -> None:
        """Queue the search, which writes the round's chain."""
        ngram_lookup(
            requests.ids, requests.cache_len, requests.limit, self.depth, requests.done, forest.token[:rows],
            forest.parent[:rows], forest.depth[:rows], forest.mask_bits[:rows], forest.start, self.best, self.ticket,
            self.min_match,
        )  # fmt: skip

    def begin(self, prompt: list[int], reuse: bool = False) -> None:
        """Nothing to remember: the device holds the sequence's ids."""

    def evidence(self, state: State) -> int:
        """None on the host."""
        return -1

    def propose(self, state: State) -> DraftTree:
        """The root alone, in requests whose rounds the host decides."""
        return DraftTree.chain([state.root])

    def observe(self, commit: Commit) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing to forget."""
