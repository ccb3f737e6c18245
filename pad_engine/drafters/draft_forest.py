"""The draft model of many sequences: a chain for each, one batched pass a level. Each is what draft_model.py drafts for
its sequence alone. Next to read: forest.py, which it serves.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from pad_engine.drafters.draft_model import known_tokens, rank_scores
from pad_engine.kv_cache import RowGroup
from pad_engine.kv_chains import begin_chains, place_level
from pad_engine.kv_forest import commit_forest, uploaded
from pad_engine.models.decoder import Decoder
from pad_engine.sampling import gumbel_pick, gumbel_picks
from pad_engine.state import Commit, State
from pad_engine.transforms import changes_logits
from pad_engine.tree import DraftTree
from pad_engine.verify import prefill_forest, read_prompts


class DraftForest:
    """decoder: the draft model. num_tokens: ids below this mean the same to both models, and only they are proposed.
    capacity: tokens that its cache can hold of a sequence; beyond them it proposes nothing for it. depth: drafted
    tokens in a row at most."""

    def __init__(
        self, decoder: Decoder, *, num_seqs: int, num_tokens: int, capacity: int, depth: int, scratch: int, chunk: int
    ) -> None:
        self.decoder, self.num_tokens, self.depth, self.chunk = decoder, num_tokens, depth, chunk
        self.cache = decoder.new_cache(num_seqs=num_seqs, capacity=capacity, scratch=scratch)

    def begin(self, prompts: Mapping[int, list[int]]) -> None:
        """New sequences, by their places in the cache."""
        known = {seq: known_tokens(self.decoder, prompt) for seq, prompt in prompts.items()}
        read_prompts(self.decoder, self.cache, {s: ids[: self.cache.capacity] for s, ids in known.items()}, self.chunk)

    def propose(self, states: Sequence[State]) -> list[DraftTree]:
        """A chain for each sequence: as deep as its remaining tokens and the caches allow."""
        room = {s.seq: min(self.depth, s.remaining - 1, self.cache.capacity - len(s.ids)) for s in states}
        deepest = max(room.values(), default=0)
        # those that may draft nothing now are read along: all places at once need no copies
        reading = [state for state in states if len(state.ids) < self.cache.capacity] if deepest > 0 else []
        trees = {state.seq: DraftTree.chain([state.root]) for state in states}
        for state, drawn, q_rows in zip(reading, *self.draft(reading, deepest), strict=True):
            # a row that is not finite proposes nothing, and so does what would stand behind it
            tokens = list(takewhile(lambda token: token >= 0, drawn[: room[state.seq]]))
            read = tokens[: room[state.seq] - 1]  # the last one was not
            self.cache.claim(RowGroup(state.seq, read, range(len(read))))
            if tokens:
                if q_rows is not None and len(q_rows) > len(tokens) + 1:  # most are whole, and a view costs time
                    q_rows = q_rows[: len(tokens) + 1]
                trees[state.seq] = DraftTree([state.root, *tokens], list(range(-1, len(tokens))), q_rows=q_rows)
        return list(trees.values())

    def draft(self, states: Sequence[State], depth: int) -> tuple[list[list[int]], Sequence[Tensor | None]]:
        """`depth` tokens that follow each sequence, -1 where a row is not finite, and the rows `[depth + 1,
        num_tokens]` that they were drawn from, if anybody wants them; the last of these rows means nothing.

        The host waits for the device once, at the end.
        """
        if not states:
            return [], []
        logits, chains = self.catch_up(states), begin_chains(self.cache, [state.seq for state in states])
        apart = any(changes_logits(state.params) or state.draws_from_q for state in states)
        pick, tokens = self.pick_each if apart else self.pick, list[Tensor]()
        q_rows: list[Tensor] = []
        for level in range(depth):
            picks, q = pick(states, logits, chains.length + level, tokens)
            tokens.append(picks)
            q_rows += [] if q is None else [q]
            if level < depth - 1:
                placement = place_level(self.cache, chains, picks, level)
                logits = self.logits(self.decoder.forward(placement, self.cache)[0])
        rows = torch.stack([*q_rows, q_rows[-1]], 1).unbind() if q_rows else None
        wanted = [rows[i] if rows and (s.draws_from_q or s.keeps_q) else None for i, s in enumerate(states)]
        return torch.stack(tokens, 1).tolist(), wanted

    def catch_up(self, states: Sequence[State]) -> Tensor:
        """Read the committed tokens that the cache lacks; returns the logits `[B, num_tokens]` after them."""
        parts = {}
        for state in states:
            self.cache.discard(state.seq)
            parts[state.seq] = known_tokens(self.decoder, state.ids[self.cache.lengths[state.seq] :])
        hidden = prefill_forest(self.decoder, self.cache, parts, self.chunk)
        ends = np.cumsum([len(part) for part in parts.values()]) - 1
        (last,) = uploaded([ends], self.cache.device)
        return self.logits(torch.cat([hidden[seq] for seq in parts])[last])

    def logits(self, hidden: Tensor) -> Tensor:
        """`[B, num_tokens]`."""
        return self.decoder.logits(hidden)[:, : self.num_tokens]

    def pick(
        self, states: Sequence[State], logits: Tensor, positions: Tensor, tokens: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """The token that follows each sequence and what was drafted for it, int32 `[B]`, and the rows that they were
        drawn from, for those who want them. positions: of the tokens. tokens: int32 `[B]` for each level before."""
        temperatures = [0.0 if state.params.greedy else state.params.temperature for state in states]
        picks = gumbel_picks(logits, positions, [s.seed for s in states], temperatures, [1] * len(states))
        return picks, logits.softmax(-1) if any(state.keeps_q for state in states) else None

    def pick_each(
        self, states: Sequence[State], logits: Tensor, positions: Tensor, tokens: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """pick for requests that change logits or weigh the draft's own: one sequence after another, on the host's
        knowledge of what was drafted."""
        drafted = torch.stack(list(tokens), 1).tolist() if tokens else [[] for _ in states]
        ranked = [
            rank_scores(state, row, [[t for t in path if t >= 0]], len(tokens) + 1, draws=True)
            for state, row, path in zip(states, logits.split(1), drafted, strict=True)
        ]
        picks = gumbel_pick(torch.cat([scores for scores, _ in ranked]), positions, 0, 0.0)
        if all(q is None for _, q in ranked):
            return picks, None
        return picks, torch.cat([torch.zeros_like(scores) if q is None else q for scores, q in ranked])

    def observe(self, states: Sequence[State], commits: Sequence[Commit]) -> None:
        """Keep the rows of accepted tokens that were read."""
        kept = []
        for state, commit in zip(states, commits, strict=True):
            # node n is scratch row n - 1, and the last one of a chain was not read
            read = len(self.cache.depths[state.seq])
            kept.append((state.seq, [node - 1 for node in commit.path[1:] if node <= read]))
        commit_forest(self.cache, kept)
