"""The draft model of many sequences: a chain for each, one batched pass a level. Each is what draft_model.py drafts for
its sequence alone. Next to read: forest.py, which it serves.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pad_engine.drafters.draft_model import known_tokens, rank_scores
from pad_engine.kv_cache import RowGroup
from pad_engine.kv_forest import commit_forest
from pad_engine.models.decoder import Decoder
from pad_engine.sampling import gumbel_pick, gumbel_picks
from pad_engine.state import Commit, State
from pad_engine.transforms import changes_logits
from pad_engine.tree import DraftTree
from pad_engine.verify import place, prefill_forest, read_prompts


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
        room = [min(self.depth, s.remaining - 1, self.cache.capacity - len(s.ids)) for s in states]
        chains = [[state.root] for state in states]
        q_rows: list[list[Tensor]] = [[] for _ in states]
        running = [i for i, depth in enumerate(room) if depth > 0]
        if running:
            logits = self.catch_up([states[i] for i in running])
        for depth in range(1, max(room, default=0) + 1):
            drawn = self.pick([states[i] for i in running], logits, [chains[i][1:] for i in running], depth)
            for i, (token, q) in zip(running, drawn, strict=True):
                if token >= 0:
                    chains[i].append(token)
                    q_rows[i] += [] if q is None else [q]
            # a row that is not finite proposes nothing, and so does what would stand behind it
            running = [i for i in running if len(chains[i]) == depth + 1 and depth < room[i]]
            if not running:
                break
            logits = self.read([(states[i].seq, chains[i][-1]) for i in running], depth)
        trees = []
        for chain, rows in zip(chains, q_rows, strict=True):
            drawn_from = torch.cat([*rows, rows[-1]]) if rows else None
            trees.append(DraftTree(chain, list(range(-1, len(chain) - 1)), q_rows=drawn_from))
        return trees

    def catch_up(self, states: Sequence[State]) -> Tensor:
        """Read the committed tokens that the cache lacks; returns the logits `[B, num_tokens]` after them."""
        parts = {}
        for state in states:
            self.cache.discard(state.seq)
            parts[state.seq] = known_tokens(self.decoder, state.ids[self.cache.lengths[state.seq] :])
        hidden = prefill_forest(self.decoder, self.cache, parts, self.chunk)
        return self.logits(torch.cat([hidden[state.seq][-1:] for state in states]))

    def read(self, tokens: Sequence[tuple[int, int]], depth: int) -> Tensor:
        """Run the draft model over one drafted token of each of some sequences; returns logits `[B, num_tokens]`."""
        # the root is committed here, so a token of depth 1 stands right behind the prefix
        groups = [RowGroup(seq, [token], [depth - 1]) for seq, token in tokens]
        return self.logits(self.decoder.forward(place(self.cache, groups), self.cache)[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """`[B, num_tokens]`."""
        return self.decoder.logits(hidden)[:, : self.num_tokens]

    def pick(
        self, states: Sequence[State], logits: Tensor, paths: Sequence[list[int]], depth: int
    ) -> list[tuple[int, Tensor | None]]:
        """The token that follows each path, -1 where its row is not finite, and the row that it was drawn from."""
        q_rows: list[Tensor | None] = [None] * len(states)
        positions = torch.tensor([len(state.ids) + depth - 1 for state in states], device=logits.device)
        if any(changes_logits(state.params) or state.draws_from_q or state.keeps_q for state in states):
            each = zip(states, logits.split(1), paths, strict=True)
            ranked = [rank_scores(state, row, [path], depth, draws=True) for state, row, path in each]
            q_rows = [q for _, q in ranked]
            picks = gumbel_pick(torch.cat([scores for scores, _ in ranked]), positions, 0, 0.0)
        else:
            temperatures = [0.0 if state.params.greedy else state.params.temperature for state in states]
            picks = gumbel_picks(logits, positions, [s.seed for s in states], temperatures, [1] * len(states))
        return list(zip(picks.tolist(), q_rows, strict=True))

    def observe(self, states: Sequence[State], commits: Sequence[Commit]) -> None:
        """Keep the rows of accepted tokens that were read."""
        kept = []
        for state, commit in zip(states, commits, strict=True):
            # node n is scratch row n - 1, and the last one of a chain was not read
            read = len(self.cache.depths[state.seq])
            kept.append((state.seq, [node - 1 for node in commit.path[1:] if node <= read]))
        commit_forest(self.cache, kept)
