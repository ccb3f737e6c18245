"""Prompt lookup (Saxena 2023): what followed the same words earlier in this sequence may follow them again.

The longest match wins, of equally long ones the latest. An index from every n-gram to the places where it ended makes a
lookup cost the same at any length. With a branching tree, several matches share one tree.
"""

from typing import Literal

from pad_engine.state import Commit, State
from pad_engine.tree import DraftTree
from pad_engine.trees.builder import Candidate, TreeBuilder, tree_of

# The evidence class is the match's length, and matches longer than this count as one class.
MAX_EVIDENCE = 8
# How far back a match is followed, and how many places are looked at for each n-gram, latest first.
MAX_MATCH, MAX_PLACES = 32, 16
# log-probability of one copied token when matches compete for rows, and of one more place in the ranking of matches
COPY_LOG_PROB, RANK_LOG_PROB = -0.1, -1.0


class NGram:
    """min_match: shortest match that is used, in tokens."""

    captured = False
    draft_probs: Literal["none"] = "none"
    taps: tuple[int, ...] = ()

    def __init__(self, builder: TreeBuilder, min_match: int = 2) -> None:
        self.builder, self.min_match = builder, min_match
        self.reset()

    @property
    def nbytes(self) -> int:
        """About what the index takes in Python objects."""
        return 100 * len(self.ids)

    def begin(self, prompt: list[int], reuse: bool = False) -> None:
        """Index the prompt."""
        self.reset()
        self.extend(prompt)

    def reset(self) -> None:
        """Forget the sequence."""
        self.ids: list[int] = []
        self.places: dict[tuple[int, ...], list[int]] = {}
        self.last_matches: list[tuple[int, int]] | None = None

    def extend(self, tokens: list[int]) -> None:
        """Append committed tokens to the index. The n-gram that ends the sequence has nothing behind it yet, so each is
        entered when the token behind it comes."""
        for token in tokens:
            if len(self.ids) >= self.min_match:
                self.places.setdefault(tuple(self.ids[-self.min_match :]), []).append(len(self.ids))
            self.ids.append(token)
        self.last_matches = None

    def matches(self) -> list[tuple[int, int]]:
        """(length, place) of the earlier occurrences of the sequence's end, longest first, then latest; `place` is
        where what followed begins. Looked for once a round, which asks twice."""
        if self.last_matches is None:
            places = self.places.get(tuple(self.ids[-self.min_match :]), [])[: -MAX_PLACES - 1 : -1]
            self.last_matches = sorted(((self.match_length(place), place) for place in places), reverse=True)
        return self.last_matches

    def match_length(self, place: int) -> int:
        """How many tokens before a place are those that end the sequence, MAX_MATCH at most."""
        ids, longest, length = self.ids, min(MAX_MATCH, place), self.min_match
        if ids[place - longest : place] == ids[len(ids) - longest :]:  # the usual case where a text repeats itself
            return longest
        while ids[place - 1 - length] == ids[-1 - length]:
            length += 1
        return length

    def evidence(self, state: State) -> int:
        """The length of the longest match."""
        matches = self.matches()
        return min(matches[0][0], MAX_EVIDENCE) if matches else -1

    def propose(self, state: State) -> DraftTree:
        """What followed the best matches, as one tree."""
        matches = self.matches()
        if not matches or state.plan.depth < 1:
            return DraftTree.chain([state.root])
        candidates: list[Candidate] = []
        children: dict[tuple[int, int], int] = {}
        for rank, (_, place) in enumerate(matches[: self.builder.branches]):
            parent = -1
            for depth, token in enumerate(self.continuation(place, state.plan.depth), start=1):
                if (parent, token) not in children:
                    children[parent, token] = len(candidates)
                    candidates.append(Candidate(token, parent, COPY_LOG_PROB * depth + RANK_LOG_PROB * rank, depth))
                parent = children[parent, token]
        kept = self.builder.select(candidates, state.plan.budget - 1)
        return tree_of(state.root, candidates, kept, min(matches[0][0], MAX_EVIDENCE))

    def continuation(self, place: int, count: int) -> list[int]:
        """`count` tokens from `place`; a match that reaches the end of the sequence repeats its period."""
        period = len(self.ids) - place
        return [self.ids[place + i % period] for i in range(count)]

    def observe(self, commit: Commit) -> None:
        """Index what was committed."""
        self.extend(commit.tokens)
