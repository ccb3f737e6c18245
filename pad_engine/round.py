"""A round once its trees are drafted: verify, accept, commit. engine.py plays it with one tree, forest.py with many.

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

    rounds: the captured pass of the target and cache, if there is one.

    NonFiniteError when a sequence's own path leads over a row of logits that is not finite.
    """
    record = verify(target, cache, states, trees, num_tokens, taps, rounds)
    commits, rows = [], []
    for state, tree, kept in zip(states, trees, accept_each(record, rules, states, trees), strict=True):
        if kept.end_token < 0:
            position = len(state.ids) + len(kept.path) - 2
            raise NonFiniteError(f"the target's logits after position {position} are not finite", seq=state.seq)
        commit = state.commit(tree, kept.path, kept.end_token, kept.overridden)
        if rounds is not None and rounds.strict and not taps:
            cache.advance(state.seq, [tree.tokens[node] for node in commit.path])  # the rows are in their places
        else:
            rows.append((state.seq, commit.path))
        commits.append(commit)
    commit_forest(cache, rows)
    return commits, record
