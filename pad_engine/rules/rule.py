"""What an acceptance rule is: a local judgement of each node, and how the token after the accepted path is drawn."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pad_engine.record import Record
from pad_engine.state import State
from pad_engine.tree import DraftTree

# from a record, the row of a tree's root in it, the sequence and its tree, to the accepted nodes and the token behind
WalkPath = Callable[[Record, int, State, DraftTree], tuple[list[int], int]]


@dataclass(frozen=True)
class AcceptanceRule:
    """judge: from a record of N nodes to (accept bool `[N]`, score fp32 `[N]`); among accepted siblings the best score
    wins, then the lowest index. end: how the token after the path is drawn. rows: the full rows that it must read.
    walk: whether a node's judgement depends on its own row and judge alone. lossless: the output equals the target's.
    walk_path: for sequential rules, which judge a node by what became of its siblings, the walk itself.
    """

    name: str
    judge: Callable[[Record], tuple[Tensor, Tensor]]
    end: Literal["argmax", "sample", "residual(p - q)", "residual(h - q)"]
    rows: Literal["none", "stop", "walk", "all"] = "none"
    walk: Literal["local", "sequential"] = "local"
    lossless: bool = False
    walk_path: WalkPath | None = None
