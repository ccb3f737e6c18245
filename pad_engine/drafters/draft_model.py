"""A second, cheaper model drafts: its likeliest continuations, or, at a temperature, its own picks under the target's
noise (rules/match.py), which is where the two agree most often.

The draft model has a cache of its own. Tokens that it has not read yet, the last drafted one after a round that was
accepted whole, or all those of plain rounds in between, are read when the next draft begins.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from pad_engine.kernels.gumbel import DRAFT
from pad_engine.kv_cache import PREFILL_SCRATCH, RowGroup
from pad_engine.models.decoder import Decoder
from pad_engine.sampling import gumbel_noise
from pad_engine.state import Commit, State
from pad_engine.transforms import transform
from pad_engine.tree import DraftTree
from pad_engine.trees.builder import Candidate, TreeBuilder, most_likely, tree_of
from pad_engine.verify import prefill


class DraftModel:
    """decoder: the draft model. num_tokens: ids below this mean the same to both models, and only they are proposed.
    capacity: tokens that its cache can hold; beyond them it proposes nothing. budget: nodes of a tree at most."""

    captured = False
    draft_probs: Literal["rows"] = "rows"
    taps: tuple[int, ...] = ()

    def __init__(
        self, decoder: Decoder, builder: TreeBuilder, *, num_tokens: int, capacity: int, budget: int, chunk: int
    ) -> None:
        self.decoder, self.builder, self.num_tokens, self.chunk = decoder, builder, num_tokens, chunk
        self.tree: DraftTree | None = None  # the last one proposed, until it is observed
        self.row_of_node: list[int | None] = []  # scratch row of each of its nodes, if it was read
        self.q_rows: list[Tensor] = []  # of the root and of every candidate that was read, where tokens are drawn
        scratch = max(min(chunk, PREFILL_SCRATCH), budget * builder.width)
        self.cache = decoder.new_cache(capacity=capacity, scratch=scratch)

    @property
    def nbytes(self) -> int:
        """The cache; the weights are counted with the models."""
        return self.cache.nbytes

    def begin(self, prompt: list[int], reuse: bool = False) -> None:
        """A new sequence; what the cache lacks of its prompt is read at once, as part of the target's own reading."""
        self.tree = None
        if reuse:
            self.cache.keep_prefix(0, prompt[:-1])
        else:
            self.cache.reset(0)
        self.cache.prompt_lengths[0] = len(prompt)
        self.read_committed(prompt[: min(len(prompt), self.cache.capacity) - 1])

    def reset(self) -> None:
        """Forget the sequence."""
        self.cache.reset(0)
        self.tree = None

    def evidence(self, state: State) -> int:
        """Always the same class, while the cache has room for a draft."""
        return 0 if len(state.ids) < self.cache.capacity else -1

    def propose(self, state: State) -> DraftTree:
        """Draft up to plan.depth tokens deep and let the builder choose plan.budget of them."""
        depth = min(state.plan.depth, self.cache.capacity - len(state.ids))
        if depth < 1:
            self.tree = None
            return DraftTree.chain([state.root])
        candidates: list[Candidate] = []
        rows: dict[int, int] = {}  # candidate -> scratch row
        self.q_rows = []
        parents, logits = [-1], self.catch_up(state.ids)
        for level in range(1, depth + 1):
            fresh = self.rank(state, candidates, parents, logits, level)
            if level == depth or not fresh:
                break
            parents = sorted(most_likely(candidates, fresh, self.builder.width))
            logits = self.read(candidates, parents, rows)
        kept = self.builder.select(candidates, state.plan.budget - 1)
        self.tree = tree_of(state.root, candidates, kept, q_rows=self.q_rows)
        self.row_of_node = [None, *(rows.get(candidate) for candidate in kept)]
        return self.tree

    def catch_up(self, ids: list[int]) -> Tensor:
        """Read the committed tokens that the cache lacks; returns the logits `[1, num_tokens]` after them."""
        return self.decoder.logits(self.read_committed(ids))[:, : self.num_tokens]

    def read_committed(self, ids: list[int]) -> Tensor:
        """The same, up to the last token's hidden state `[1, hidden_size]`."""
        self.cache.discard(0)
        tokens = known_tokens(self.decoder, ids[self.cache.lengths[0] :])
        return prefill(self.decoder, self.cache, 0, tokens, self.chunk)

    def rank(
        self, state: State, candidates: list[Candidate], parents: Sequence[int], logits: Tensor, depth: int
    ) -> list[int]:
        """Append the best continuations of each parent, whose rows of logits are given; returns their indices."""
        paths = [path_to(candidates, parent) for parent in parents]
        scores, q = rank_scores(state, logits, paths, depth, draws=self.builder.branches == 1)
        if q is not None:
            self.q_rows.append(q)
        top_tokens, top_values = largest(scores.log_softmax(-1), min(self.builder.branches, self.num_tokens))
        first = len(candidates)
        for parent, tokens, values in zip(parents, top_tokens, top_values, strict=True):
            before = candidates[parent].log_prob if parent >= 0 else 0.0
            # a row that is not finite proposes nothing
            finite = [(t, v) for t, v in zip(tokens, values, strict=True) if math.isfinite(v)]
            candidates += [Candidate(t, parent, before + v, depth) for t, v in finite]
        return list(range(first, len(candidates)))

    def read(self, candidates: list[Candidate], chosen: Sequence[int], rows: dict[int, int]) -> Tensor:
        """Run the draft model over chosen candidates; returns logits `[len(chosen), num_tokens]`. `rows` gains their
        scratch rows."""
        used = len(rows)
        mask = torch.zeros(len(chosen), used + len(chosen), dtype=torch.bool)
        for i, candidate in enumerate(chosen):
            rows[candidate] = used + i
            ancestor = candidate
            while ancestor >= 0:
                mask[i, rows[ancestor]] = True
                ancestor = candidates[ancestor].parent
        tokens = [candidates[c].token for c in chosen]
        # the root is committed here, so a candidate of depth 1 stands right behind the prefix
        depth = [candidates[c].depth - 1 for c in chosen]
        chain = self.builder.width == 1
        placement = self.cache.place([RowGroup(0, tokens, depth, None if chain else mask)])
        hidden, _ = self.decoder.forward(placement, self.cache)
        return self.decoder.logits(hidden)[:, : self.num_tokens]

    def observe(self, commit: Commit) -> None:
        """Keep the rows of accepted tokens that were read."""
        if commit.tree is self.tree:
            rows = [row for node in commit.path[1:] if (row := self.row_of_node[node]) is not None]
            self.cache.commit(0, rows)
        self.tree = None


def known_tokens(decoder: Decoder, ids: Sequence[int]) -> list[int]:
    """A token that only the target knows is read as another: that costs acceptance, nothing else."""
    return [token if token < decoder.config.vocab_size else 0 for token in ids]


def rank_scores(
    state: State, logits: Tensor, paths: Sequence[list[int]], depth: int, draws: bool
) -> tuple[Tensor, Tensor | None]:
    """By what continuations at a depth are ranked, `[n, V']`, from the draft model's logits `[n, V']` after paths from
    the root; and the distribution that the best one is drawn from, where the rule weighs it and the drafter draws, or
    the model's own, where the rule reads that."""
    scores, temperature = transform(logits, state, paths), state.params.temperature
    position, vocab, q = len(state.ids) + depth - 1, logits.shape[1], None
    if state.draws_from_q and draws:
        q = (scores / temperature).softmax(-1)
        noise = gumbel_noise(state.seed, position, vocab, logits.device, DRAFT, state.round)
        scores = scores + temperature * noise
    elif not state.params.greedy and not state.draws_from_q:
        scores = scores + temperature * gumbel_noise(state.seed, position, vocab, logits.device)
    if state.keeps_q and draws:
        q = logits.softmax(-1)
    return scores, q


def largest(rows: Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
    """Indices and values of the largest entries of each row of `[n, V]`, equal ones by index, which topk does not
    promise."""
    left, indices, values = rows.clone(), [], []
    for _ in range(count):
        value, index = left.max(dim=-1)
        indices.append(index)
        values.append(value)
        left.scatter_(1, index[:, None], -torch.inf)
    return torch.stack(indices, 1).tolist(), torch.stack(values, 1).tolist()


def path_to(candidates: Sequence[Candidate], candidate: int) -> list[int]:
    """The tokens from the root's child to a candidate; none for the root (-1)."""
    path: list[int] = []
    while candidate >= 0:
        path.append(candidates[candidate].token)
        candidate = candidates[candidate].parent
    return path[::-1]
