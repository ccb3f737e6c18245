"""Prompt lookup on the device finds what its reference and the host's drafter find."""

import random

import pytest
import torch
from launches import DEVICE, ints

from pad_engine.config import SamplingParams
from pad_engine.controller import RoundPlan
from pad_engine.drafters.ngram import NGram
from pad_engine.kernels import ngram_lookup
from pad_engine.kernels.ngram_lookup import ngram_lookup_ref, ngram_match_ref
from pad_engine.state import State
from pad_engine.tree import DraftTree, column, make_forest
from pad_engine.trees.chain import Chain

PDL = DEVICE.type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)


def lookup(
    ids: list[int], capacity: int, limit: int, max_depth: int, rows: int, min_match: int, done: int = 0
) -> tuple:
    """(tokens of the chain, all outputs) of one launch."""
    held = torch.full((1, capacity), ids[-1], dtype=torch.int32)
    held[0, : len(ids)] = column(ids)
    out = {name: torch.full((rows,), -77, dtype=torch.int32, device=DEVICE) for name in ("token", "parent", "depth")}
    out["mask_bits"] = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    out["seq_start"] = ints([-77, -77])
    best, ticket = ints([0], torch.int64), ints([0])
    scalars = dict(cache_len=len(ids) - 1, limit=limit, max_depth=max_depth, done=done)
    ngram_lookup.ngram_lookup(
        ids=held.to(DEVICE),
        **{name: ints([value]) for name, value in scalars.items()},
        **out,
        best=best,
        ticket=ticket,
        min_match=min_match,
        pdl=PDL,
    )
    assert (int(best), int(ticket)) == (0, 0)
    first, count = out["seq_start"].tolist()
    assert first == 0
    return out["token"][:count].tolist(), out


def some_text(rng: random.Random, length: int) -> list[int]:
    """Few tokens, with copies of earlier parts, some of them long."""
    ids = [rng.randrange(4) for _ in range(min(length, 3))]
    while len(ids) < length:
        start = rng.randrange(len(ids))
        copied = ids[start : start + rng.choice([1, 5, 50])] if rng.random() < 0.7 else [rng.randrange(30)]
        ids += copied
    return ids[:length]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 33, 256, 257, 700, 1500])
@pytest.mark.parametrize("min_match", [1, 2, 3])
def test_lookup_equals_the_reference(length: int, min_match: int) -> None:
    rng = random.Random(length * min_match)
    for rows, max_depth, room, done in [
        (16, 15, 100, 0),
        (16, 40, 100, 0),
        (64, 63, 9, 0),
        (4, 2, 100, 0),
        (7, 6, 0, 0),
    ]:
        ids = some_text(rng, length)
        limit = length + room
        tokens, out = lookup(ids, max(length, 1600), limit, max_depth, rows, min_match, done)
        count = max(0, min(max_depth, limit - length - 1, rows - 1))
        assert tokens == ngram_lookup_ref(torch.tensor(ids), min_match, count).tolist()
        expected = make_forest([DraftTree.chain([*tokens, *[ids[-1]] * (rows - len(tokens))])], [0])
        for name in ("token", "parent", "depth"):
            assert torch.equal(out[name].cpu(), getattr(expected, name)), name
        assert torch.equal(out["mask_bits"].cpu(), expected.tree_mask_bits[:, 0])


@pytest.mark.parametrize("min_match", [1, 2, 3])
def test_lookup_proposes_what_the_drafter_does(min_match: int) -> None:
    rng, compared = random.Random(min_match), 0
    for _ in range(30):
        ids = some_text(rng, rng.randint(1, 300))
        drafter = NGram(Chain(), min_match)
        drafter.begin(ids)
        depth = rng.randint(0, 12)
        state = State(ids, 0, 10**6, SamplingParams(), 0, frozenset(), plan=RoundPlan(budget=16, depth=depth))
        # the drafter looks at the latest 16 places only
        latest = drafter.matches()[:1]
        if latest == [ngram_match_ref(torch.tensor(ids), min_match)] or not latest:
            compared += 1
            assert lookup(ids, 320, 10**6, depth, 16, min_match)[0] == drafter.propose(state).tokens
    assert compared >= 10


def test_lookup_prefers_the_longest_then_the_latest() -> None:
    #      0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16
    ids = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3, 7, 2, 3, 6, 1, 2, 3]
    assert lookup(ids, 300, 100, 3, 8, 2)[0] == [3, 7, 2, 3]
    assert lookup([5, 5, 5, 5], 300, 100, 4, 8, 1)[0] == [5, 5, 5, 5, 5]
    assert lookup([4, 6, 4, 6, 4], 300, 100, 5, 8, 2)[0] == [4, 6, 4, 6, 4, 6]
    assert lookup([5, 5, 5, 5], 300, 100, 4, 8, 1, done=2)[0] == [5]
    # beyond MAX_MATCH no length counts, so the latest of two long matches wins
    run = list(range(100, 150))
    assert lookup([0, *run, 1, *run[-32:], 2, *run], 300, 1000, 1, 8, 2)[0] == [149, 2]
