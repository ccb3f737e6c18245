"""Random forests, rules and the numbers that rules look at, odd values among them: for tests of libpad's tail."""

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from pad_engine import native_tail as tail
from pad_engine.native_tail import Judged, Kind, Rule, make_rule
from pad_engine.tree import DraftTree, Forest, make_forest

INF = float("inf")


VOCAB = 12


def parents_of(shape: str, n: int, rng: random.Random) -> list[int]:
    return [-1] + [{"chain": i - 1, "star": 0, "tree": rng.randrange(max(0, i - 4), i)}[shape] for i in range(1, n)]


def random_forest(rng: random.Random) -> tuple[Forest, list[DraftTree]]:
    trees = []
    for _ in range(rng.randint(1, 3)):
        n = rng.randint(1, 21)
        shape = rng.choice(["chain", "star", "tree"])
        trees.append(DraftTree([rng.randrange(VOCAB) for _ in range(n)], parents_of(shape, n, rng)))
    return make_forest(trees, rng.sample(range(9), len(trees))), trees


def random_logits(n: int, rng: random.Random) -> Tensor:
    """Some rows with ties, with masks, or with few likely tokens."""
    rows = torch.randn(n, VOCAB) * rng.choice([0.3, 1.0, 4.0])
    for row in rows:
        kind = rng.randrange(4)
        if kind == 0:
            row.round_()
        elif kind == 1:
            row[torch.rand(VOCAB) < 0.4] = -INF
            row[rng.randrange(VOCAB)] = 1.0
    return rows


def random_judged(forest: Forest, rng: random.Random) -> tuple[Judged, Tensor]:
    """Numbers of every node, and row_pick int32 `[N]`. A row in ten is not finite."""
    n = len(forest.token)
    logits = random_logits(n, rng)
    for row in range(n):
        if rng.random() < 0.1:
            logits[row, rng.randrange(VOCAB)] = rng.choice([math.nan, INF])
    stats = tail.row_stats(logits)
    judged = tail.gather_judged(stats, logits, forest.token, forest.parent)
    drawn = torch.tensor([rng.randrange(VOCAB) for _ in range(n)], dtype=torch.int32)
    mostly = torch.rand(n) < 0.7
    pick = torch.where(mostly, stats.top_id[:, 0], drawn)
    pick[stats.lse.isnan()] = -1
    prob = torch.tensor([rng.choice([0.0, 0.25, 0.5, 1.0, rng.random(), math.nan]) for _ in range(n)])
    return judged._replace(pivot_prob=prob), pick


THRESHOLDS: dict[Kind, Callable[[random.Random], tuple[float, ...]]] = {
    Kind.BASE: lambda rng: (),
    Kind.MARGIN_PAPER: lambda rng: (rng.choice([0.0, 0.5, 0.9, 1.0]),),
    Kind.MARGIN_RATIO: lambda rng: (rng.choice([-INF, -1.0, math.log(0.7), 0.0]),),
    Kind.MARGIN_GAP: lambda rng: (rng.choice([0.0, 0.1, 0.5, 1.1]),),
    Kind.PIVOT: lambda rng: (rng.choice([0.0, 0.25, 0.5, 1.0]),),
    Kind.TYPICAL: lambda rng: (rng.choice([-INF, -2.0, 0.0, INF]), rng.choice([-1.0, 0.0, INF])),
    Kind.TOPK: lambda rng: (float(rng.randint(1, 3)),),
    Kind.FLY_PAPER: lambda rng: (rng.choice([0.0, 0.5, 1.5, 9.0]),),
    Kind.FLY_RELEASED: lambda rng: (rng.choice([0.0, 0.3, 0.9, 9.0]),),
}


def random_rule(kind: Kind, rng: random.Random) -> Rule:
    return make_rule(
        kind,
        *THRESHOLDS[kind](rng),
        log_floor=rng.choice([-INF, -INF, -3.0, -1.0]),
        outer_floor=rng.random() < 0.2,
        lookahead=rng.choice([0, 0, 1, 3]),
        reach=rng.choice([0, 0, 1, 3]),
        max_overrides=rng.choice([0, 0, 1, 2]),
        window=rng.choice([1, 2, 8, 64]),
    )
