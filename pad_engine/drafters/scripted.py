"""A drafter for tests: it proposes what a function says, so the accepted length of every round is known beforehand."""

from collections.abc import Callable
from typing import Literal

from pad_engine.state import Commit, State
from pad_engine.tree import DraftTree


class Scripted:
    """script: from the committed ids to the tokens that should follow, or to a whole tree rooted at the last id."""

    captured = False
    draft_probs: Literal["none"] = "none"
    taps: tuple[int, ...] = ()
    nbytes = 0

    def __init__(self, script: Callable[[list[int]], list[int] | DraftTree]) -> None:
        self.script = script
        self.commits: list[Commit] = []

    def begin(self, prompt: list[int], reuse: bool = False) -> None:
        """A new sequence."""
        self.commits = []

    def evidence(self, state: State) -> int:
        """Always the same class."""
        return 0

    def propose(self, state: State) -> DraftTree:
        """The script's tokens, cut to the plan."""
        draft = self.script(list(state.ids))
        tree = draft if isinstance(draft, DraftTree) else DraftTree.chain([state.root, *draft])
        return tree.clip(state.plan.depth, state.plan.budget)

    def observe(self, commit: Commit) -> None:
        """Keep it for the test."""
        self.commits.append(commit)

    def reset(self) -> None:
        """Forget the commits."""
        self.commits = []
