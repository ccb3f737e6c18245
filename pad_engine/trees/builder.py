"""What a tree builder is: it says which candidates a drafter should look behind, and which of them are worth a row."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pad_engine.errors import RequestError
from pad_engine.tree import DraftTree


class Candidate(NamedTuple):
    """A token that may follow. parent: index of the candidate before it, -1 behind the root. log_prob: the drafter's
    log-probability of the whole path to it, so it never exceeds its parent's."""

    token: int
    parent: int
    log_prob: float
    depth: int


class TreeBuilder(Protocol):
    """branches: how many continuations of a node are worth ranking. width: how many nodes of a level are continued."""

    branches: int
    width: int

    def select(self, candidates: Sequence[Candidate], budget: int) -> list[int]:
        """At most `budget` candidates that are worth a row, each with its parent, in the order of their indices."""


def most_likely(candidates: Sequence[Candidate], chosen: Sequence[int], count: int) -> list[int]:
    """The `count` most likely of the chosen candidates; of equals the earlier one, so that parents precede children."""
    return sorted(chosen, key=lambda c: (-candidates[c].log_prob, c))[:count]


def tree_of(
    root: int,
    candidates: Sequence[Candidate],
    kept: Sequence[int],
    evidence: int = 0,
    q_rows: Sequence[Tensor] = (),
) -> DraftTree:
    """The tree of the kept candidates, given in the order of their indices: node i + 1 is candidate kept[i].

    q_rows: `[1, V']` each, for a chain whose tokens were drawn: what the children of its nodes, in order, came from.
    """
    node_of = {-1: 0} | {candidate: node for node, candidate in enumerate(kept, start=1)}
    tokens = [root] + [candidates[c].token for c in kept]
    parents = [-1] + [node_of[candidates[c].parent] for c in kept]
    drawn = torch.cat([*q_rows, q_rows[-1]])[: len(tokens)] if q_rows else None
    return DraftTree(tokens, parents, evidence, drawn)


def make_builder(name: str) -> TreeBuilder:
    """A builder by its name."""
    from pad_engine.trees.best_first import BestFirst
    from pad_engine.trees.chain import Chain

    builders: dict[str, type[Chain] | type[BestFirst]] = {"chain": Chain, "best-first": BestFirst}
    if name not in builders:
        raise RequestError(f"trees must be one of {', '.join(builders)}, got {name!r}")
    return builders[name]()
