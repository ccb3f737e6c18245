"""Where a draft model would have gone on otherwise: answers read by both models, teacher-forced, several at once.

Next to read: labels.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pad_engine.drafters.draft_model import known_tokens
from pad_engine.forest import SCRATCH, Pair
from pad_engine.kernels.row_stats import row_stats_ref
from pad_engine.kv_cache import KVCache, prefill_chunk
from pad_engine.kv_forest import adopt_prefix
from pad_engine.models.decoder import Decoder
from pad_engine.sampling import gumbel_pick
from pad_engine.training.rollouts import READ_BATCH, Read
from pad_engine.verify import prefill_forest

LOGIT_ROWS = 256  # rows that get logits at once


@dataclass(frozen=True)
class Mismatch:
    """A place of an answer where the draft model's greedy token is another. index: among the answer's tokens.

    margin, entropy (nats), probability (of draft_id): of the target's row that judges the place, raw, at temperature 1.
    """

    index: int
    draft_id: int
    target_id: int
    margin: float
    entropy: float
    probability: float


class MismatchReader:
    """Reads answers of up to max_length tokens, prompt included. What the draft model cannot read it does not judge."""

    def __init__(self, pair: Pair, max_length: int) -> None:
        assert pair.draft is not None, "labels need a draft model"
        self.pair, self.target, self.draft = pair, pair.target.decoder, pair.draft
        self.draft_length = min(max_length, pair.draft.max_length)
        self.target_cache = self.target.new_cache(num_seqs=READ_BATCH, capacity=max_length, scratch=SCRATCH)
        self.draft_cache = self.draft.new_cache(num_seqs=READ_BATCH, capacity=self.draft_length, scratch=SCRATCH)

    @torch.inference_mode()
    def __call__(self, reads: Sequence[Read]) -> list[list[Mismatch]]:
        """The mismatches of each answer, READ_BATCH of them at most, in order."""
        known = [Read(known_tokens(self.draft, r.ids[: self.draft_length]), r.prompt_length) for r in reads]
        hidden = read_answers(self.draft, self.draft_cache, known)
        places: list[tuple[int, int, int]] = []  # answer, index of the token in it, the draft model's token
        for number, (read, rows) in enumerate(zip(reads, hidden, strict=True)):
            picks = self.greedy(rows)
            answer = read.ids[read.prompt_length :]
            places += [(number, i, token) for i, token in enumerate(picks) if token not in (-1, answer[i])]
        found: list[list[Mismatch]] = [[] for _ in reads]
        rows_of = read_answers(self.target, self.target_cache, reads)
        for first in range(0, len(places), LOGIT_ROWS):
            part = places[first : first + LOGIT_ROWS]
            rows = torch.stack([rows_of[number][index] for number, index, _ in part])
            for (number, index, token), numbers in zip(part, self.scalars(rows, [p[2] for p in part]), strict=True):
                read = reads[number]
                found[number].append(Mismatch(index, token, read.ids[read.prompt_length + index], *numbers))
        return found

    def greedy(self, rows: Tensor) -> list[int]:
        """The draft model's likeliest token after each row, -1 where it is not finite."""
        picks: list[int] = []
        for part in rows.split(LOGIT_ROWS):
            logits = self.draft.logits(part)[:, : self.pair.shared_tokens]
            picks += gumbel_pick(logits, torch.zeros(len(part), dtype=torch.int64, device=part.device), 0, 0.0).tolist()
        return picks

    def scalars(self, rows: Tensor, tokens: Sequence[int]) -> list[list[float]]:
        """Margin, entropy and probability of a token for each of the target's rows."""
        logits = self.target.logits(rows)[:, : self.pair.target.num_tokens]
        stats = row_stats_ref(logits)
        logit = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
        numbers: list[list[float]] = torch.stack((stats.margin, stats.entropy, (logit - stats.lse).exp()), 1).tolist()
        return numbers


def read_answers(decoder: Decoder, cache: KVCache, reads: Sequence[Read]) -> list[Tensor]:
    """For each answer the hidden states `[n, hidden_size]` of the rows that its tokens follow."""
    parts = {}
    for seq, read in enumerate(reads):
        adopt_prefix(cache, seq, [])
        cache.prompt_lengths[seq] = read.prompt_length
        parts[seq] = read.ids[:-1]
    hidden = prefill_forest(decoder, cache, parts, prefill_chunk(decoder.device))
    return [hidden[seq][read.prompt_length - 1 :] for seq, read in enumerate(reads)]
