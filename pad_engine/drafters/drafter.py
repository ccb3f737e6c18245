"""What a drafter is, and how one is made of its name. Next to read: ngram.py, then draft_model.py."""

from typing import Literal, Protocol

from pad_engine.controller import RoundPlan
from pad_engine.graphs import Rounds
from pad_engine.state import Commit, State
from pad_engine.tree import DraftTree


class Drafter(Protocol):
    """Proposes what may follow. It serves one sequence, from `begin` to the next `begin`.

    captured: whether its steps can be part of a captured graph; it is a CapturedDrafter then. draft_probs: what it
    knows of the probabilities it drew from: nothing, one number a token, or whole rows. taps: the target's layers whose
    output it wants. nbytes: memory of its own, caches and tables.
    """

    @property
    def captured(self) -> bool:
        """See above."""

    @property
    def draft_probs(self) -> Literal["none", "scalar", "rows"]:
        """See above."""

    @property
    def taps(self) -> tuple[int, ...]:
        """See above."""

    @property
    def nbytes(self) -> int:
        """See above."""

    def begin(self, prompt: list[int], reuse: bool = False) -> None:
        """A new sequence. reuse: it may go on from what a cache of the drafter still holds of the one before."""

    def evidence(self, state: State) -> int:
        """The class of what it would propose now (the controller keeps rates by class), or -1 when it has nothing."""

    def propose(self, state: State) -> DraftTree:
        """A tree whose root is the last committed token, within state.plan. One node is a plain step."""

    def observe(self, commit: Commit) -> None:
        """What became of the last round, whether or not this drafter had proposed for it."""

    def reset(self) -> None:
        """Forget the sequence and whatever was learnt from it."""


class CapturedDrafter(Drafter, Protocol):
    """One whose rounds are queued ahead, before the host knows what the round at work commits. readings: passes of its
    own that a draft would begin with (RoundPlan)."""

    @property
    def readings(self) -> int:
        """See above."""

    def queue(self, rounds: Rounds, plan: RoundPlan) -> tuple[int, int]:
        """Queue the next round, a draft with its verification or a plain step, as planned. Returns its index, and how
        deep the draft is."""
