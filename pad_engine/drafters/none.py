"""No draft: every round is a plain decoding step."""

from typing import Literal

from pad_engine.controller import RoundPlan
from pad_engine.graphs import Rounds
from pad_engine.state import Commit, State
from pad_engine.tree import DraftTree


class NoDrafter:
    """Proposes nothing."""

    captured, readings = True, 0
    draft_probs: Literal["none"] = "none"
    taps: tuple[int, ...] = ()
    nbytes = 0

    def begin(self, prompt: list[int], reuse: bool = False) -> None:
        """Nothing to remember."""

    def evidence(self, state: State) -> int:
        """Never any."""
        return -1

    def propose(self, state: State) -> DraftTree:
        """The root alone."""
        return DraftTree.chain([state.root])

    def queue(self, rounds: Rounds, plan: RoundPlan) -> tuple[int, int]:
        """See CapturedDrafter."""
        return rounds.queue_plain(), 0

    def observe(self, commit: Commit) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing to forget."""
