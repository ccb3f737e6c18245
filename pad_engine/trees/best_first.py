"""The most probable paths first, as in EAGLE-2 (Li et al. 2024, section 4): expand a few nodes a level, then rerank.

A path's probability never exceeds that of its beginning, so the best nodes always form a tree.
"""

from collections.abc import Sequence

from pad_engine.trees.builder import Candidate, most_likely


class BestFirst:
    """branches continuations of each of `width` nodes a level are ranked."""

    branches = 4
    width = 4

    def select(self, candidates: Sequence[Candidate], budget: int) -> list[int]:
        """The most likely candidates of all levels."""
        return sorted(most_likely(candidates, range(len(candidates)), budget))
