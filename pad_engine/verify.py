"""Read a prompt, and verify a forest of draft trees in one pass of the target.

Next to read: rules/greedy.py for what is accepted, accept.py for the path, models/decoder.py for the pass.
"""

import threading
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from pad_engine.graphs import Rounds
from pad_engine.kv_cache import KVCache, Placement, RowGroup
from pad_engine.kv_forest import ForestPlacement, adopt_prefix, best_prefix, commit_forest, place_forest, worth_sharing
from pad_engine.models.decoder import Decoder
from pad_engine.record import Record, rows_at_once
from pad_engine.sampling import gumbel_picks
from pad_engine.state import State
from pad_engine.transforms import changes_logits, transform
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

    rounds: the captured passes of the target and cache, which take the last rows if they are not many: a short prompt
    costs a few steps. Returns the last token's hidden state `[1, hidden_size]`, `[0]` when nothing was read or
    the captured pass read it.
    """
    hidden, start = torch.empty(0), 0
    while start < len(tokens) and not (cancelled is not None and cancelled.is_set()):
        left = len(tokens) - start
        if rounds is not None and (rows := rounds.read_rows(seq, left)):
            rounds.read(seq, tokens[start : start + rows])
            hidden, start = torch.empty(0), start + rows
            continue
        part = tokens[start : start + cache.rows_at_once(seq, min(chunk, left))]
        placement = cache.place([RowGroup(seq, part, range(len(part)), direct=True)])
        hidden, _ = target.forward(placement, cache)
        cache.commit_direct(seq, part)
        start += len(part)
    return hidden[-1:]


def place(cache: KVCache, groups: Sequence[RowGroup]) -> Placement | ForestPlacement:
    """One group by itself, several as a batch."""
    return cache.place(groups) if len(groups) == 1 else place_forest(cache, groups)


def prefill_forest(
    target: Decoder, cache: KVCache, parts: Mapping[int, Sequence[int]], chunk: int
) -> dict[int, Tensor]:
    """prefill of several sequences at once: the tokens of each go behind what it holds. A pass has `chunk` rows at
    most, with the padding of shorter parts. Returns the tokens' hidden states, `[n, hidden_size]` for each sequence."""
    left = {seq: list(tokens) for seq, tokens in parts.items() if tokens}
    if len(left) * max(map(len, left.values()), default=0) > chunk:
        left = dict(sorted(left.items(), key=lambda part: len(part[1])))  # else padding is not worth a second pass
    read: dict[int, list[Tensor]] = {seq: [] for seq in left}
    while left:
        groups: list[RowGroup] = []
        longest = 0
        for seq, tokens in left.items():
            count = cache.rows_at_once(seq, min(chunk, len(tokens)))
            longest = max(longest, count)
            if groups and (len(groups) + 1) * longest > chunk:
                break
            groups.append(RowGroup(seq, tokens[:count], range(count), direct=True))
        hidden, _ = target.forward(place(cache, groups), cache)
        commit_forest(cache, [], groups)
        for group, rows in zip(groups, hidden.split([len(group.tokens) for group in groups]), strict=True):
            read[group.seq].append(rows)
            left[group.seq] = left[group.seq][len(group.tokens) :]
        left = {seq: tokens for seq, tokens in left.items() if tokens}
    return {seq: parts[0] if len(parts) == 1 else torch.cat(parts) for seq, parts in read.items()}


def read_prompts(target: Decoder, cache: KVCache, prompts: Mapping[int, list[int]], chunk: int) -> None:
    """Begin sequences anew, each with its prompt but for the last token, which the first round reads.

    What another sequence holds is copied, and what several prompts begin with is read for one of them first.
    """
    left = {seq: prompt[:-1] for seq, prompt in prompts.items()}
    while left:
        now: dict[int, list[int]] = {}
        for seq, ids in left.items():
            held = len(ids) if target.dynamic else best_prefix(cache, seq, ids)[1]
            wanted = worth_sharing(ids, held)
            if held == len(ids) or not any(ids[:wanted] == other[:wanted] for other in now.values()):
                now[seq] = ids
        unread = {}
        for seq, ids in now.items():
            # with rotary frequencies that depend on the length, keys of one prompt are none of another
            unread[seq] = ids[adopt_prefix(cache, seq, [] if target.dynamic else ids) :]
            cache.prompt_lengths[seq] = len(ids) + 1
        prefill_forest(target, cache, unread, chunk)
        left = {seq: ids for seq, ids in left.items() if seq not in now}


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
    single = len(trees) == 1
    groups = [
        RowGroup(state.seq, tree.tokens, tree.depth, tree.mask() if single or not tree.is_chain else None)
        for state, tree in zip(states, trees, strict=True)
    ]
    tapped: dict[int, Tensor] = {}
    # the token picked after a row stands one position behind it
    places = [cache.lengths[group.seq] + depth + 1 for group in groups for depth in group.depth]
    if rounds is None or taps:
        hidden, tapped = target.forward(place(cache, groups), cache, taps)
        logits = logits_of(target, hidden, num_tokens)
    else:
        for group in groups:
            cache.claim(group)
        logits = rounds.logits_of(trees)
    counts = [len(tree) for tree in trees]
    processed = logits
    if any(changes_logits(state.params) for state in states):
        each = zip(logits.split(counts), states, trees, strict=True)
        changed = [transform(rows, state, tree.paths) for rows, state, tree in each]
        processed = changed[0] if len(changed) == 1 else torch.cat(changed)
    temperatures = [0.0 if state.params.greedy else state.params.temperature for state in states]
    positions = torch.tensor(places).to(logits.device, non_blocking=True)
    picks = gumbel_picks(processed, positions, [state.seed for state in states], temperatures, counts)
    return Record(forest, logits, processed, picks.cpu(), tapped, [tree.q_rows for tree in trees])


def logits_of(target: Decoder, hidden: Tensor, num_tokens: int) -> Tensor:
    """The logits of rows, fp32 `[N, num_tokens]`; those of a large forest part by part."""
    count = rows_at_once(target.config.vocab_size)
    if len(hidden) <= count:
        return target.logits(hidden)[:, :num_tokens]
    logits = torch.empty(len(hidden), num_tokens, dtype=torch.float32, device=hidden.device)
    for rows, part in zip(logits.split(count), hidden.split(count), strict=True):
        rows.copy_(target.logits(part)[:, :num_tokens])
    return logits
