"""One sequence being generated: its tokens, where it may end, and what each round added. Next to read: engine.py."""

from dataclasses import dataclass, field

from pad_engine.config import SamplingParams
from pad_engine.controller import RoundPlan
from pad_engine.tree import DraftTree


@dataclass(frozen=True)
class Commit:
    """What one round added to a sequence.

    tree: what was verified. path: the tree's nodes that were kept, root first. tokens: what was emitted, that is the
    path's drafted tokens and the token after them, cut at the end of the request. accepted: how many of `tokens` were
    drafted.
    """

    tree: DraftTree
    path: list[int]
    tokens: list[int]
    accepted: int


@dataclass
class State:
    """A sequence. ids: prompt and committed tokens. limit: the most tokens that ids may hold. seq: its place in the
    cache. plan: what the controller wants of the next round."""

    ids: list[int]
    prompt_length: int
    limit: int
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    seq: int = 0
    finish_reason: str | None = None
    plan: RoundPlan = field(default_factory=RoundPlan)

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

    def commit(self, tree: DraftTree, path: list[int], end_token: int) -> Commit:
        """Append the path's tokens and the token after it; stop at the first end-of-sequence or at the limit."""
        tokens = [tree.tokens[node] for node in path[1:]] + [end_token]
        tokens = tokens[: self.remaining]
        if not self.params.ignore_eos:
            for i, token in enumerate(tokens):
                if token in self.eos_token_ids:
                    tokens = tokens[: i + 1]
                    self.finish_reason = "stop"
                    break
        self.ids += tokens
        if self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = "length"
        # the last emitted token becomes the next root: the target has not read it, so its row is not kept
        return Commit(tree, path[: len(tokens)], tokens, min(len(tokens), len(path) - 1))
