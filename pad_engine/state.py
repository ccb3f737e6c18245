"""One sequence being generated: its tokens, where it may end, and what each round added. Next to read: engine.py."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pad_engine.config import SamplingParams
from pad_engine.controller import RoundPlan
from pad_engine.tree import DraftTree

HISTORY = 64  # emitted tokens of which it is remembered whether they were overrides


class Overridden(NamedTuple):
    """A node of a tree that was kept though the base rejects it, and what its judging row said: margin (largest logit
    less the second), entropy in nats, the token's probability, and the classifier's (1 without one)."""

    node: int
    margin: float
    entropy: float
    probability: float
    pivot_prob: float


@dataclass(frozen=True)
class Commit:
    """What one round added to a sequence.

    tree: what was verified. path: the tree's nodes that were kept, root first. tokens: what was emitted, that is the
    path's drafted tokens and the token after them, cut at the end of the request. accepted: how many of `tokens` were
    drafted. overridden: those of the path's nodes that the base rule would have rejected.
    """

    tree: DraftTree
    path: list[int]
    tokens: list[int]
    accepted: int
    overridden: tuple[Overridden, ...] = ()


@dataclass
class State:
    """A sequence. ids: prompt and committed tokens. limit: the most tokens that ids may hold. end_ids: tokens that end
    the answer. seq: its place in the cache. round: how many rounds it has had. draws_from_q: the rule weighs a draft's
    own probabilities, so a drafter that can should draw from them. keeps_q: it reads them, and nothing is drawn. plan:
    what the controller wants of the next one. history: bit b says that the token emitted b tokens ago was an
    override."""

    ids: list[int]
    prompt_length: int
    limit: int
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]
    seq: int = 0
    round: int = 0
    draws_from_q: bool = False
    keeps_q: bool = False
    finish_reason: str | None = None
    plan: RoundPlan = field(default_factory=RoundPlan)
    history: int = 0

    @property
    def root(self) -> int:
        """The last committed token, which the target has not read yet."""
        return self.ids[-1]

    @property
    def generated(self) -> list[int]:
        """The tokens after the prompt."""
        return self.ids[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """How many more tokens may be emitted."""
        return min(self.prompt_length + self.params.max_tokens, self.limit) - len(self.ids)

    def commit(
        self, tree: DraftTree, path: list[int], end_token: int, overridden: tuple[Overridden, ...] = ()
    ) -> Commit:
        """Append the path's tokens and the token after it; stop at the first that ends the answer, or at the limit."""
        tokens = [tree.tokens[node] for node in path[1:]] + [end_token]
        tokens = tokens[: self.remaining]
        ends = [i for i, token in enumerate(tokens) if token in self.end_ids]
        if ends:
            tokens = tokens[: ends[0] + 1]
            self.finish_reason = "stop"
        self.ids += tokens
        self.round += 1
        if self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = "length"
        # the last emitted token becomes the next root: the target has not read it, so its row is not kept
        kept = among_first(tree, overridden, len(tokens))
        flags = sum(1 << len(tokens) - tree.depth[override.node] for override in kept)
        self.history = (self.history << len(tokens) | flags) & (1 << HISTORY) - 1
        return Commit(tree, path[: len(tokens)], tokens, min(len(tokens), len(path) - 1), kept)

    def cut(self, commit: Commit, count: int) -> Commit:
        """Take back all but the first `count` tokens of the last commit: the answer ends there."""
        del self.ids[len(self.ids) - len(commit.tokens) + count :]
        self.finish_reason = "stop"
        return replace(
            commit, path=commit.path[:count], tokens=commit.tokens[:count], accepted=min(commit.accepted, count),
            overridden=among_first(commit.tree, commit.overridden, count),
        )  # fmt: skip


def among_first(tree: DraftTree, overridden: tuple[Overridden, ...], count: int) -> tuple[Overridden, ...]:
    """Those of a path's overrides that are among the first `count` emitted tokens: a node of depth d is the d-th."""
    return tuple(override for override in overridden if tree.depth[override.node] <= count)
