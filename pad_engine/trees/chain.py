"""One continuation at each depth, the likeliest."""

from collections.abc import Sequence

from pad_engine.trees.builder import Candidate


class Chain:
    """A tree without branches."""

    branches = 1
    width = 1

    def select(self, candidates: Sequence[Candidate], budget: int) -> list[int]:
        """The first child of the root, its first child, and so on."""
        kept: list[int] = []
        for index, candidate in enumerate(candidates):
            if len(kept) < budget and candidate.parent == (kept[-1] if kept else -1):
                kept.append(index)
        return kept
