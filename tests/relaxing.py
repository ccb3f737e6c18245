"""Random records for the tests of relaxed rules, and what a node of one is judged by, in double precision."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pad_engine import SamplingParams
from pad_engine.record import Record
from pad_engine.rules.select import RelaxedRule, make_rule
from pad_engine.state import State
from pad_engine.tree import DraftTree, make_forest

VOCAB, WIDTH, LAYER = 6, 8, 1


def rule_of(spec: str) -> Any:
    rule = make_rule(spec, VOCAB)
    assert isinstance(rule, RelaxedRule)
    return rule.on(SamplingParams())


def random_rows(rng: np.random.Generator, count: int) -> Tensor:
    """Raw logits: sharp and flat, with ties, impossible tokens and rows that are not finite."""
    rows = rng.normal(0, rng.choice([0.3, 2.0]), (count, VOCAB)) + rng.choice([-3.0, 0.0, 5.0])
    rows = np.where(rng.random((count, 1)) < 0.3, np.round(rows), rows)
    rows[rng.random((count, VOCAB)) < 0.1] = -np.inf
    rows[np.isinf(rows).all(1), 0] = 1.0
    rows[rng.random(count) < 0.06] = np.nan
    return torch.tensor(rows, dtype=torch.float32)


def random_record(rng: np.random.Generator, chains: bool = False) -> tuple[Record, list[State], list[DraftTree]]:
    trees = []
    for _ in range(int(rng.integers(1, 4))):
        size, reach = int(rng.integers(1, 22)), 1 if chains else int(rng.choice([1, 2, 30]))
        parents = [-1, *(int(rng.integers(max(0, node - reach), node)) for node in range(1, size))]
        trees.append(DraftTree(rng.integers(0, VOCAB, size).tolist(), parents))
    forest = make_forest(trees, list(range(len(trees))))
    rows = random_rows(rng, len(forest.token))
    # the target's own pick, which at a temperature is not the largest logit
    picks = torch.where(torch.tensor(rng.random(len(rows)) < 0.2), torch.tensor(rng.integers(0, VOCAB, len(rows))), 0)
    picks = torch.where(picks > 0, picks, rows.nan_to_num(-9.0).argmax(1))
    picks[rows.isnan().any(1)] = -1
    taps = {LAYER: torch.tensor(rng.normal(0, 1, (len(rows), WIDTH)), dtype=torch.float32)}
    # drafts are likely to be right, else no path is long
    for tree, start in zip(trees, forest.starts, strict=True):
        for node in range(1, len(tree)):
            if rng.random() < 0.5 and (pick := int(picks[start + tree.parents[node]])) >= 0:
                tree.tokens[node] = pick
    forest = make_forest(trees, list(range(len(trees))))
    states = [State([0], 1, 99, SamplingParams(), 0, frozenset(), seq) for seq in range(len(trees))]
    for state in states:
        state.history = int(rng.integers(0, 2**63)) & int(rng.integers(0, 2**63))
    return Record(forest, rows, rows, picks.int(), taps), states, trees


@dataclass
class Node:
    """What a node is judged by, in double precision: all tokens of its parent's row, likeliest first."""

    token: int
    row: list[float]
    pivot: float

    @property
    def ranked(self) -> list[int]:
        return sorted(range(VOCAB), key=lambda token: (-self.row[token], token))

    @property
    def z(self) -> list[float]:
        return [self.row[token] for token in self.ranked]

    def p(self, token: int) -> float:
        return math.exp(self.row[token] - max(self.row)) / sum(math.exp(z - max(self.row)) for z in self.row)

    def entropy(self, count: int = VOCAB) -> float:
        terms = [self.p(token) for token in self.ranked[:count]]
        return -sum(p * math.log(p) for p in terms if p > 0)
