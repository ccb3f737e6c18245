"""What an acceptance rule is: a local judgement of each node, what may relax it, and how the token after the accepted
path is drawn."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pad_engine.record import Record
from pad_engine.rules.override import Override, Relaxed
from pad_engine.state import Overridden, State
from pad_engine.tree import DraftTree


@dataclass(frozen=True)
class Accepted:
    """The accepted nodes of a tree, root first; the token after them, -1 where a row on the way is not finite; and
    those of the nodes that an override kept."""

    path: list[int]
    end_token: int
    overridden: tuple[Overridden, ...] = ()


# from a record, the row of a tree's root in it, the sequence, its tree, and what an override says of the nodes
WalkPath = Callable[[Record, int, State, DraftTree, Relaxed | None], Accepted]


@dataclass(frozen=True)
class AcceptanceRule:
    """judge: from a record of N nodes to (accept bool `[N]`, score fp32 `[N]`); among accepted siblings the best score
    wins, then the lowest index. end: how the token after the path is drawn. rows: the full rows that it must read.
    walk: whether a node's judgement depends on its own row and judge alone. lossless: the output equals the target's.
    walk_path: for sequential rules, which judge a node by what became of its siblings, the walk itself. override: what
    may keep a node that `judge` rejects. reads_q: it compares the draft model's own rows, at temperature 0 too.
    """

    name: str
    judge: Callable[[Record], tuple[Tensor, Tensor]]
    end: Literal["argmax", "sample", "residual(p - q)", "residual(h - q)"]
    rows: Literal["none", "stop", "walk", "all"] = "none"
    walk: Literal["local", "sequential"] = "local"
    lossless: bool = False
    walk_path: WalkPath | None = None
    override: Override | None = None
    reads_q: bool = False

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose states it looks at."""
        classifier = None if self.override is None else self.override.classifier
        return () if classifier is None else (classifier.tap_layer,)
