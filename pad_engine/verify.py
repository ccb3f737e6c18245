"""Read a prompt, and verify a forest of draft trees in one pass of the target.

Next to read: rules/greedy.py for what is accepted, accept.py for the path, models/decoder.py for the pass.
"""

import threading
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from pad_engine.graphs import Rounds
from pad_engine.kv_cache import KVCache, RowGroup
from pad_engine.models.decoder import Decoder
from pad_engine.record import Record
from pad_engine.sampling import gumbel_pick
from pad_engine.state import State
from pad_engine.transforms import transform
from pad_engine.tree import DraftTree, make_forest


def prefill(
    target: Decoder,
    cache: KVCache,
    seq: int,
    tokens: Sequence[int],
    chunk: int,
    cancelled: threading.Event | None = None,
    rounds: Rounds | None = None,
) -> Tensor:
    """Read the tokens of a sequence into its committed prefix, `chunk` rows a pass at most, until it is told to stop.

    rounds: the captured passes of the target and cache, which take the last rows if they are few: a short prompt costs
    hardly more than a step. Returns the last token's hidden state `[1, hidden_size]`, `[0]` when nothing was read or
    the captured pass read it.
    """
    hidden, start = torch.empty(0), 0
    while start < len(tokens) and not (cancelled is not None and cancelled.is_set()):
        part = tokens[start : start + cache.rows_at_once(seq, min(chunk, len(tokens) - start))]
        if rounds is not None and rounds.can_read(seq, len(part)):
            rounds.read(seq, part)
            start += len(part)
            continue
        placement = cache.place([RowGroup(seq, part, range(len(part)), direct=True)])
        hidden, _ = target.forward(placement, cache)
        cache.commit_direct(seq, part)
        start += len(part)
    return hidden[-1:]


def verify(
    target: Decoder,
    cache: KVCache,
    states: Sequence[State],
    trees: Sequence[DraftTree],
    num_tokens: int,
    taps: Collection[int] = (),
    rounds: Rounds | None = None,
) -> Record:
    """One pass over the trees of several sequences, one stream being a forest of one.

    num_tokens: ids from here on are padding of the vocabulary and are never picked. rounds: the captured pass of the
    same target and cache, used where nobody wants taps. The rows stay in the scratch until the cache's commit. Returns
    the record of all nodes, in the order of the trees.
    """
    forest = make_forest(trees, [state.seq for state in states])
    groups = [
        RowGroup(state.seq, tree.tokens, tree.depth, tree.mask()) for state, tree in zip(states, trees, strict=True)
    ]
    tapped: dict[int, Tensor] = {}
    lengths = [cache.lengths[state.seq] for state in states]
    if rounds is None or taps:
        hidden, tapped = target.forward(cache.place(groups), cache, taps)
        logits = target.logits(hidden)[:, :num_tokens]
    else:
        for group in groups:
            cache.claim(group)
        logits = rounds.logits_of(trees)
    processed, picks = [], []
    for state, start, tree, length in zip(states, forest.starts, trees, lengths, strict=True):
        processed.append(transform(logits[start : start + len(tree)], state, tree.paths))
        temperature = 0.0 if state.params.greedy else state.params.temperature
        # the token picked after a row stands one position behind it
        positions = torch.tensor([length + depth + 1 for depth in tree.depth], device=logits.device)
        picks.append(gumbel_pick(processed[-1], positions, state.seed, temperature))
    changed = processed[0] if len(processed) == 1 else torch.cat(processed)
    return Record(forest, logits, changed, torch.cat(picks).cpu(), tapped)
