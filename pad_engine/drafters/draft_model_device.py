"""A draft model whose steps are kernels of the captured round: the host decides how many, and sees none of them.

Next to read: draft_recipes.py for what is queued, captured.py, which asks for the rounds.
"""

from typing import Any

import torch

from pad_engine.controller import RoundPlan
from pad_engine.device_round import RING, DeviceForest
from pad_engine.drafters.draft_model import DraftModel
from pad_engine.drafters.draft_recipes import (
    CHAIN_FEED,
    MAX_TREE_DEPTH,
    Chain,
    Reading,
    Tree,
    TreeBuffers,
    tree_feed,
)
from pad_engine.graphs import Rounds
from pad_engine.kernels.accept import MAX_ROWS
from pad_engine.models.decoder import Decoder
from pad_engine.models.fused import FusedPass, row_pad, unsupported
from pad_engine.state import Commit


class DeviceDraftModel(DraftModel):
    """A DraftModel that drafts on the device where a request allows it, and on the host where it does not
    (captured.serves). depth: tokens drafted in a row at most. The other arguments are DraftModel's. Its trees have
    draft_recipes.WIDTH branches and nodes a level, the builder's on the host have its own."""

    captured = True

    def __init__(self, decoder: Decoder, *, depth: int, num_tokens: int, **options: Any) -> None:
        super().__init__(decoder, num_tokens=num_tokens, **options)
        device = decoder.device
        self.depth = depth
        self.fused = FusedPass(decoder, self.cache, num_tokens=num_tokens)
        # the rows of passes over committed tokens, a chain's one row, and a tree's rows
        self.rows, self.row, self.branches = (DeviceForest(1, device) for _ in range(3))
        self.buffers: TreeBuffers | None = None
        # how many of the last tokens a draft's first pass reads
        self.feed = tree_feed(depth) if self.builder.branches > 1 else CHAIN_FEED
        self.draft_len = torch.zeros(1, dtype=torch.int32, device=device)
        self.skip = torch.zeros(1, dtype=torch.int32, device=device)
        self.skip_images = torch.zeros(RING, 1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.sent = 0  # of these images, by the draft at work
        self.behind = 0  # plain rounds queued since the last draft: tokens that the draft model has not read
        self.ids: list[int] = []  # prompt and committed tokens
        self.valid = 0  # of these, how many lie in the cache for sure

    def begin(self, prompt: list[int], reuse: bool = False) -> None:
        """See DraftModel."""
        held = self.cache.lengths[0]
        if reuse and self.valid > held:
            self.cache.advance(0, self.ids[held : self.valid])
        super().begin(prompt, reuse)
        self.ids, self.valid, self.behind = list(prompt), self.cache.lengths[0], 0

    def reset(self) -> None:
        """See DraftModel."""
        super().reset()
        self.ids, self.valid = [], 0

    def observe(self, commit: Commit) -> None:
        """See DraftModel; of a round on the device the rows are in their places already."""
        drafted_here = commit.tree is self.tree
        super().observe(commit)
        self.ids += commit.tokens
        if not drafted_here and len(commit.tree) > 1:
            # what the next draft reads first may not be there, nor may, where the sequence has outgrown the cache, what
            # its last places held
            self.valid = max(self.valid, min(len(self.ids), self.cache.capacity) - self.feed)

    @property
    def readings(self) -> int:
        """See CapturedDrafter."""
        return -(-self.behind // MAX_ROWS)

    def queue(self, rounds: Rounds, plan: RoundPlan) -> tuple[int, int]:
        """See CapturedDrafter."""
        depth = min(self.depth, plan.budget - 1)
        if depth < 1:
            self.behind += 1
            return rounds.queue_plain(), 0
        if self.behind:
            rows = row_pad(min(max(self.behind, CHAIN_FEED), MAX_ROWS))
            for skip in reversed(range(self.feed, self.feed + self.behind, rows)):
                self.send_skip(skip)
                rounds.replay(Reading(self, rows), rows)
            self.behind = self.sent = 0
        draft = Tree(self, depth, plan.budget) if self.builder.branches > 1 else Chain(self, depth)
        return rounds.queue(draft, draft.nodes), depth

    def send_skip(self, skip: int) -> None:
        """Tell the device how many of the last tokens the next reading leaves out."""
        if self.sent == RING and self.skip.is_cuda:
            torch.cuda.current_stream(self.skip.device).synchronize()  # the first image is about to be used again
            self.sent = 0
        image = self.skip_images[self.sent % RING]
        image[0] = skip
        self.skip.copy_(image, non_blocking=True)
        self.sent += 1

    def tree_buffers(self) -> TreeBuffers:
        """Made at the first tree."""
        if self.buffers is None:
            self.buffers = TreeBuffers(self.depth, max(self.fused.programs.values()), self.decoder.device)
        return self.buffers


def unsupported_on_device(decoder: Decoder, capacity: int, depth: int, branches: int) -> str | None:
    """Why this draft model's steps cannot be part of a captured round, or None."""
    if branches > 1 and depth > MAX_TREE_DEPTH:
        return f"trees are grown to a depth of {MAX_TREE_DEPTH}"
    windows = [decoder.config.windows[layer.index] for layer in decoder.layers]
    if any(window is not None and window < capacity for window in windows):
        return "a ring of keys has no room for rows that may yet be rejected"
    return unsupported(decoder)
