"""A draft model whose steps are kernels of the captured round: the host decides how many, and sees none of them.

The first pass reads the sequence's last two tokens, because the last drafted one was not read if all were accepted; it
and every later one leaves a pick, which is the next one's row. All rows go behind the draft model's prefix by position,
so a rejected one is overwritten when its place is read again, and nothing is committed. Tokens of plain rounds in
between are read by passes of their own before the next draft.
Next to read: kernels/draft_chain.py, then captured.py, which asks for the rounds.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pad_engine.controller import RoundPlan
from pad_engine.device_round import RING, DeviceForest, DeviceRequests, SequenceState
from pad_engine.drafters.draft_model import DraftModel
from pad_engine.graphs import Rounds
from pad_engine.kernels.accept import MAX_ROWS
from pad_engine.kernels.draft_chain import begin_draft, take_draft
from pad_engine.models.decoder import Decoder
from pad_engine.models.fused import FusedPass, row_pad, unsupported
from pad_engine.state import Commit

FIRST_ROWS = 2  # of a draft's first pass
ChainRows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # of kernels/draft_chain.py


class DeviceDraftModel(DraftModel):
    """The chain of a DraftModel, drafted on the device where a request allows it, and as there where it does not
    (captured.serves). depth: tokens drafted in a row at most. The other arguments are DraftModel's."""

    captured = True

    def __init__(self, decoder: Decoder, *, depth: int, num_tokens: int, **options: Any) -> None:
        super().__init__(decoder, num_tokens=num_tokens, **options)
        device = decoder.device
        self.depth = depth
        self.fused = FusedPass(decoder, self.cache, num_tokens=num_tokens)
        # the rows of the passes over committed tokens, and the one row of every other pass
        self.rows, self.row = DeviceForest(1, device), DeviceForest(1, device)
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
            # the last token but one may be a drafted one that was not read, and the last two places of a cache hold
            # whatever a sequence wrote that has outgrown it
            self.valid = max(self.valid, min(len(self.ids), self.cache.capacity) - FIRST_ROWS)

    def queue(self, rounds: Rounds, plan: RoundPlan) -> int:
        """Queue a round of this plan: the draft and its verification, or a plain step. Returns its index."""
        depth = min(self.depth, plan.budget - 1)
        if depth < 1:
            self.behind += 1
            return rounds.queue_plain()
        if self.behind:
            rows = row_pad(min(max(self.behind, FIRST_ROWS), MAX_ROWS))
            for skip in reversed(range(FIRST_ROWS, FIRST_ROWS + self.behind, rows)):
                self.send_skip(skip)
                rounds.replay(Reading(self, rows), rows)
            self.behind = self.sent = 0
        return rounds.queue(Chain(self, depth), depth + 1)

    def send_skip(self, skip: int) -> None:
        """Tell the device how many of the last tokens the next reading leaves out."""
        if self.sent == RING and self.skip.is_cuda:
            torch.cuda.current_stream(self.skip.device).synchronize()  # the first image is about to be used again
            self.sent = 0
        image = self.skip_images[self.sent % RING]
        image[0] = skip
        self.skip.copy_(image, non_blocking=True)
        self.sent += 1

    def sequences(self, requests: DeviceRequests) -> SequenceState:
        """The request's noise at the draft model's own length."""
        return SequenceState(self.draft_len, requests.seed, requests.temperature)

    def queue_reading(self, requests: DeviceRequests, rows: int) -> None:
        """Queue a pass over tokens that plain rounds committed."""
        self.begin_draft(requests, None, self.skip, rows, rows, 0)
        self.fused.launch(
            rows, self.rows.token, self.rows, self.sequences(requests), to_prefix=True, head=False
        )  # fmt: skip

    def queue_chain(self, requests: DeviceRequests, forest: DeviceForest, rows: int, depth: int) -> None:
        """Queue the passes of a draft, which write the round's chain."""
        first = row_pad(FIRST_ROWS)
        chain = (forest.token[:rows], forest.parent, forest.depth, forest.mask_bits, forest.start)
        self.begin_draft(requests, chain, None, FIRST_ROWS, first, depth)
        for step in range(1, depth + 1):
            passed, count = (self.rows, first) if step == 1 else (self.row, 1)
            self.fused.launch(count, passed.token, passed, self.sequences(requests), to_prefix=True)
            scores, ids = self.fused.partials(count)
            take_draft(
                scores, ids, passed.start, requests.cache_len, self.row.token, self.draft_len, forest.token[:rows],
                forest.start, step=step, capacity=self.cache.capacity, pdl=self.fused.pdl[count],
            )  # fmt: skip

    def begin_draft(
        self, requests: DeviceRequests, chain: ChainRows | None, skip: Tensor | None, feed: int, rows: int,
        depth: int,
    ) -> None:  # fmt: skip
        """Queue the kernel that lays out a pass over committed tokens."""
        forest = self.rows
        begin_draft(
            requests.ids, requests.cache_len, requests.limit, requests.done, forest.token[:rows], forest.parent,
            forest.depth, forest.mask_bits, forest.start, self.draft_len, chain, skip, feed=feed, depth=depth,
            capacity=self.cache.capacity, vocab_size=self.decoder.config.vocab_size,
        )  # fmt: skip


@dataclass(frozen=True)
class Chain:
    """A draft of `depth` tokens, as graphs.DeviceDraft has it."""

    model: DeviceDraftModel
    depth: int

    @property
    def nodes(self) -> int:
        """Rows of the chain."""
        return self.depth + 1

    def queue_draft(self, requests: DeviceRequests, forest: DeviceForest, rows: int) -> None:
        """Queue its kernels."""
        self.model.queue_chain(requests, forest, rows, self.depth)


@dataclass(frozen=True)
class Reading:
    """The draft model's reading of at most `rows` tokens, which proposes nothing."""

    model: DeviceDraftModel
    rows: int
    nodes = 0

    def queue_draft(self, requests: DeviceRequests, forest: DeviceForest, rows: int) -> None:
        """Queue its kernels."""
        self.model.queue_reading(requests, self.rows)


def unsupported_on_device(decoder: Decoder, capacity: int) -> str | None:
    """Why this draft model's steps cannot be part of a captured round, or None."""
    windows = [decoder.config.windows[layer.index] for layer in decoder.layers]
    if any(window is not None and window < capacity for window in windows):
        return "a ring of keys has no room for rows that may yet be rejected"
    return unsupported(decoder)
