"""KVCache.keep_prefix: what is kept reads like a fresh cache; a wrapped ring is kept whole or not at all."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pad_engine.kv_cache import KVCache, RowGroup


def cache_of(windows: list[int | None], capacity: int = 40) -> KVCache:
    return KVCache(windows, 1, 1, 2, capacity=capacity, scratch=8, dtype=torch.float32, device=torch.device("cpu"))


def fill(cache: KVCache, tokens: list[int]) -> None:
    """Each token's key is its own id, so that what is kept can be seen."""
    for token in tokens:
        placement = cache.place([RowGroup(0, [token], [0])])
        for layer in range(len(cache.layers)):
            cache.write(layer, placement.spans[0], torch.full((1, 1, 2), float(token)), torch.zeros(1, 1, 2))
        cache.commit(0, [0])


@given(
    windows=st.sampled_from([[None], [4], [None, 4], [6, 4], [64]]),
    held=st.lists(st.integers(0, 2), max_size=12),
    ids=st.lists(st.integers(0, 2), max_size=12),
)
@settings(max_examples=200, deadline=None)
def test_keep_prefix(windows: list[int | None], held: list[int], ids: list[int]) -> None:
    cache = cache_of(windows)
    fill(cache, held)
    cache.place([RowGroup(0, [9, 9], [0, 1])])
    kept = cache.keep_prefix(0, ids)
    common = next((i for i, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b), min(len(held), len(ids)))
    wrapped = any(window is not None and len(held) > window for window in windows)
    assert kept == (0 if wrapped and common < len(held) else common)
    assert (cache.lengths, cache.tokens, cache.depths) == ([kept], [ids[:kept]], [[]])
    # going on from there reads the very keys of a fresh cache
    fresh = cache_of(windows)
    fill(cache, ids[kept:])
    fill(fresh, ids)
    for one in (cache, fresh):
        one.last = one.place([RowGroup(0, [7], [0])]).spans[0]  # type: ignore[attr-defined]
    for layer in range(len(windows)):
        (a, _, mask_a), (b, _, mask_b) = (one.read(layer, one.last) for one in (cache, fresh))  # type: ignore[attr-defined]
        assert torch.equal(a[:, 1:], b[:, 1:])
        assert (mask_a is None) == (mask_b is None)
