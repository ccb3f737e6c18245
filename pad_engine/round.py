"""A round once its trees are drafted: verify, accept, commit. engine.py plays it with one tree; forest.py, where
several answers may follow a tree, with its own commit.

Next to read: verify.py, accept.py, state.py for the commit.
"""

from collections.abc import Sequence

from pad_engine.accept import accept_each
from pad_engine.errors import NonFiniteError
from pad_engine.graphs import Rounds
from pad_engine.kv_cache import KVCache
from pad_engine.kv_forest import commit_forest
from pad_engine.models.decoder import Decoder
from pad_engine.record import Record
from pad_engine.rules.rule import AcceptanceRule
from pad_engine.state import Commit, State
from pad_engine.tree import DraftTree
from pad_engine.verify import verify


def commit_each(
    record: Record,
    rules: Sequence[AcceptanceRule],
    states: Sequence[State],
    trees: Sequence[DraftTree],
    places: Sequence[int] | None = None,
) -> list[Commit]:
    """Commit to each state what its rule accepts of its tree. places: as of accept_each.

    NonFiniteError when a state's own path leads over a row of logits that is not finite.
    """
    each = range(len(states)) if places is None else places
    commits = []
    for state, place, kept in zip(states, each, accept_each(record, rules, states, trees, places), strict=True):
        if kept.end_token < 0:
            position = len(state.ids) + len(kept.path) - 2
            raise NonFiniteError(f"the target's logits after position {position} are not finite", seq=state.seq)
        commits.append(state.commit(trees[place], kept.path, kept.end_token, kept.overridden))
    return commits


def decode_round(
    target: Decoder,
    cache: KVCache,
    rules: Sequence[AcceptanceRule],
    states: Sequence[State],
    trees: Sequence[DraftTree],
    num_tokens: int,
    taps: Sequence[int] = (),
    rounds: Rounds | None = None,
) -> tuple[list[Commit], Record]:
    """Verify a forest, one tree a sequence, and commit what each accepted by its own rule; returns the commits, and
    what was verified.

    rounds: the captured pass of the target and cache, if there is one. NonFiniteError as of commit_each.
    """
    record = verify(target, cache, states, trees, num_tokens, taps, rounds)
    commits = commit_each(record, rules, states, trees)
    if rounds is not None and rounds.strict and not taps:
        for state, tree, commit in zip(states, trees, commits, strict=True):
            cache.advance(state.seq, [tree.tokens[node] for node in commit.path])  # the rows are in their places
    else:
        commit_forest(cache, [(state.seq, commit.path) for state, commit in zip(states, commits, strict=True)])
    return commits, record
