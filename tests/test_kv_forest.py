"""Many sequences in one pass: rows see what they would see alone, and prefixes that are copied read like their own."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Make, sequential, some_ids, tiny_decoder

from pad_engine.kv_cache import KVCache, RowGroup
from pad_engine.kv_forest import adopt_prefix, commit_forest, moved_slots, place_forest
from pad_engine.models.decoder import Decoder
from pad_engine.tree import DraftTree
from pad_engine.verify import prefill_forest

SEQS, LENGTH, SCRATCH = 5, 34, 9


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_rows_equal_those_of_their_sequence_alone(make_model: Make, family: str, softcap: float | None) -> None:
    """Chunks of prompts and trees of other sizes side by side, before and behind the end of a sliding window."""
    if softcap and family != "gemma3_text":
        pytest.skip("only Gemma has a soft cap")
    options = {"attn_logit_softcapping": softcap} if softcap else {}
    decoder, rng = tiny_decoder(make_model(family, **options)), random.Random(3)
    cache = decoder.new_cache(num_seqs=SEQS, capacity=LENGTH, scratch=SCRATCH)
    ids = [some_ids(LENGTH, seq) for seq in range(SEQS)]
    expected = [sequential(decoder, one) for one in ids]
    branched = 0
    with torch.inference_mode():
        while alive := [seq for seq in range(SEQS) if cache.lengths[seq] < LENGTH]:
            seqs, direct = rng.sample(alive, rng.randint(1, len(alive))), rng.random() < 0.4
            groups = []
            for seq in seqs:
                start = cache.lengths[seq]
                # a tree: the sequence's own tokens, and beside each now and then one that leads astray
                own = ids[seq][start : start + rng.randint(1, 5)]
                tokens, parents, last = [], [], -1
                for token in own:
                    if not direct and last >= 0 and rng.random() < 0.4:
                        tokens.append(250)
                        parents.append(last)
                        branched += 1
                    tokens.append(token)
                    parents.append(last)
                    last = len(tokens) - 1
                tree = DraftTree(tokens[:SCRATCH], parents[:SCRATCH])
                group = RowGroup(seq, tree.tokens, tree.depth, None if direct else tree.mask(), direct)
                groups.append(group)
            hidden, _ = decoder.forward(place_forest(cache, groups), cache)
            rows = decoder.logits(hidden).split([len(group.tokens) for group in groups])
            kept = []
            for group, logits in zip(groups, rows, strict=True):
                start = cache.lengths[group.seq]
                path = [
                    n
                    for n, (t, d) in enumerate(zip(group.tokens, group.depth, strict=True))
                    if t == ids[group.seq][start + d]
                ]
                torch.testing.assert_close(
                    logits[path], expected[group.seq][start : start + len(path)], atol=2e-4, rtol=0
                )
                kept.append((group.seq, path[: rng.randint(1, len(path))]))
            commit_forest(cache, [], groups) if direct else commit_forest(cache, kept)
    assert branched > 5 and cache.tokens == ids


def numbered(windows: list[int | None]) -> KVCache:
    return KVCache(
        windows, 1, 1, 2, num_seqs=3, capacity=20, scratch=6, dtype=torch.float32, device=torch.device("cpu")
    )


def fill(cache: KVCache, seq: int, tokens: list[int]) -> None:
    """Each token's key is its own id."""
    for token in tokens:
        span = cache.place([RowGroup(seq, [token], [0])]).spans[0]
        for layer in range(len(cache.layers)):
            cache.write(layer, span, torch.full((1, 1, 2), float(token)), torch.zeros(1, 1, 2))
        cache.commit(seq, [0])


def keys_seen(cache: KVCache, seq: int) -> list[list[float]]:
    """By the next row, in each layer, its own key left out."""
    span = cache.place([RowGroup(seq, [9], [0])]).spans[0]
    found = []
    for layer in range(len(cache.layers)):
        keys, _, view = cache.read(layer, span)
        row = keys[0, 1:, 0]
        found.append(sorted((row if view.mask is None else row[view.mask[0, 1:] == 0]).tolist()))
    cache.discard(seq)
    return found


@given(
    windows=st.sampled_from([[None], [4], [None, 4], [6, 4]]),
    held=st.lists(st.lists(st.integers(1, 2), max_size=11), min_size=3, max_size=3),
    ids=st.lists(st.integers(1, 2), max_size=11),
)
@settings(max_examples=150, deadline=None)
def test_an_adopted_prefix_reads_like_its_own(windows: list[int | None], held: list[list[int]], ids: list[int]) -> None:
    cache, fresh = numbered(windows), numbered(windows)
    for seq, tokens in enumerate(held):
        fill(cache, seq, tokens)
    # what a failed sequence leaves
    for buffer in cache.buffers.values():
        buffer[:, :, 1, :, : cache.scratch] = torch.nan
    before = [keys_seen(cache, seq) for seq in (0, 2)]
    kept = adopt_prefix(cache, 1, ids)
    assert cache.tokens[1] == ids[:kept] and cache.lengths[1] == kept
    best = max(cache.common_prefix(seq, ids) for seq in (0, 1, 2))
    assert kept == best or 2 * (best - kept) <= len(ids) - kept
    fill(cache, 1, ids[kept:])
    fill(fresh, 0, ids)
    assert keys_seen(cache, 1) == keys_seen(fresh, 0)
    assert [keys_seen(cache, seq) for seq in (0, 2)] == before
    assert not any(buffer.isnan().any() for buffer in cache.buffers.values())


def test_short_prompts_are_not_padded_to_a_long_one(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, forward, shapes = tiny_decoder(make_model("llama")), Decoder.forward, []

    def counted(self: Decoder, placement, cache, *rest):  # type: ignore[no-untyped-def]
        shapes.append(len(getattr(placement, "rows", placement.tokens)))
        return forward(self, placement, cache, *rest)

    monkeypatch.setattr(Decoder, "forward", counted)
    cache = decoder.new_cache(num_seqs=6, capacity=60, scratch=8)
    parts = {seq: some_ids(count, seq) for seq, count in enumerate((50, 3, 0, 4, 2, 4))}
    with torch.inference_mode():
        hidden = prefill_forest(decoder, cache, parts, 20)
    assert shapes == [16, 20, 20, 10] and cache.tokens == [parts[seq] for seq in range(6)]
    for seq, rows in hidden.items():
        logits = decoder.logits(rows)
        torch.testing.assert_close(logits, sequential(decoder, parts[seq]), atol=2e-4, rtol=0)
    assert sorted(hidden) == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("window", [None, 4, 60])
def test_rows_of_many_move_as_those_of_one(window: int | None) -> None:
    """To the slots of KVCache.slots_of, before and behind the end of a ring, and where more rows come than it holds."""
    rng = random.Random(1)
    cache = KVCache(
        [window], 1, 1, 2, num_seqs=40, capacity=50, scratch=SCRATCH, dtype=torch.float32, device=torch.device("cpu")
    )
    cache.lengths = [rng.randint(0, 41) for _ in range(40)]
    moves = [(seq, sorted(rng.sample(range(SCRATCH), rng.randint(0, SCRATCH)))) for seq in rng.sample(range(40), 30)]
    expected = [(seq, *slots) for seq, rows in moves for slots in zip(*cache.slots_of(window, seq, rows), strict=True)]
    found = moved_slots(cache, window, moves)
    assert list(zip(*(column.tolist() for column in found), strict=True)) == expected and len(expected) > 60
