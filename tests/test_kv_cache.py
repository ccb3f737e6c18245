"""The cache: what is kept by layer, the bounds of prefix and scratch, rings that wrap, and rows thrown away."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pad_engine.errors import ModelError
from pad_engine.kv_cache import KVCache, RowGroup

WINDOW = 8
LAYERS = [None, WINDOW, None, WINDOW]


def make_cache(**options: int) -> KVCache:
    sizes = {"capacity": 40, "scratch": 16} | options
    return KVCache(LAYERS, 1, 1, 2, dtype=torch.float32, device=torch.device("cpu"), **sizes)


def put(cache: KVCache, values: list[int], depth: list[int] | None = None, seq: int = 0) -> list[list[int]]:
    """Write one number a row into every layer; returns what the last row then reads in layers 0 and 1, sorted."""
    placement = cache.place([RowGroup(seq, values, depth or list(range(len(values))))])
    span, seen = placement.spans[0], []
    for layer in range(len(LAYERS)):
        rows = torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, 1, 2)
        cache.write(layer, span, rows, -rows)
        keys, got, view = cache.read(layer, span)
        assert torch.equal(keys, -got)
        if layer < 2:
            seen.append(sorted(visible(keys, view.mask)))
    return seen


def visible(keys: Tensor, mask: Tensor | None) -> list[int]:
    row = keys[0, :, 0]
    return row[mask[-1] == 0].int().tolist() if mask is not None else row.int().tolist()


# position p holds the number p + 1, so that a slot never written or a wrong one is seen
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=12))
@settings(max_examples=80, deadline=None)
def test_a_row_reads_what_was_committed_and_its_own_draft(rounds: list[tuple[int, int]]) -> None:
    cache, length = make_cache(), 0
    for count, accepted in rounds:
        accepted = min(count, accepted)
        if length + count > cache.capacity:
            break
        full, sliding = put(cache, list(range(length + 1, length + count + 1)))
        last = length + count
        assert full == list(range(1, last + 1))
        assert sliding == list(range(max(1, last - WINDOW + 1), last + 1))
        cache.commit(0, range(accepted))
        length += accepted
        assert cache.lengths == [length]


@pytest.mark.parametrize("prompt", [0, 5, 8, 30])
def test_sliding_layers_keep_a_window_and_no_more(prompt: int) -> None:
    cache = make_cache(capacity=1000)
    assert cache.buffers[WINDOW].shape[-2] == WINDOW + cache.scratch
    put(cache, list(range(1, prompt % 16 + 1)) or [1])
    cache.commit(0, [])
    for position in range(prompt):
        put(cache, [position + 1])
        cache.commit(0, [0])
    span = cache.place([RowGroup(0, [0] * 4, range(4))]).spans[0]
    keys, _, _ = cache.read(1, span)
    assert keys.shape[1] <= WINDOW + 4
    assert cache.nbytes == 4 * 2 * 2 * (2 * (1000 + 16) + 2 * (WINDOW + 16))


def test_a_window_beyond_the_capacity_is_not_allocated() -> None:
    cache = KVCache([4096], 1, 1, 2, capacity=10, scratch=4, dtype=torch.float32, device=torch.device("cpu"))
    assert cache.buffers[4096].shape[-2] == 14


def test_rejected_rows_never_overwrite_the_ring() -> None:
    cache = make_cache()
    for position in range(20):
        put(cache, [position + 1])
        cache.commit(0, [0])
    for _ in range(5):
        put(cache, [100 + i for i in range(16)])
        cache.discard(0)
    assert put(cache, [21]) == [list(range(1, 22)), list(range(14, 22))]


@pytest.mark.parametrize("start", [0, 5, 20])
def test_a_path_through_a_tree_is_committed_in_its_own_order(start: int) -> None:
    cache = make_cache()
    for position in range(start):
        put(cache, [position + 1])
        cache.commit(0, [0])
    # rows 0, 3, 4 are the path; the others are siblings
    put(cache, [start + 1, 91, 92, start + 2, start + 3], depth=[0, 1, 1, 1, 2])
    cache.commit(0, [0, 3, 4])
    last = start + 4
    assert put(cache, [last]) == [list(range(1, last + 1)), list(range(max(1, last - WINDOW + 1), last + 1))]


def test_a_commit_longer_than_the_window_keeps_its_end() -> None:
    cache = make_cache()
    put(cache, list(range(1, 17)))
    cache.commit(0, range(16))
    assert put(cache, [17])[1] == list(range(10, 18))


def test_scratch_overflow_is_refused_and_leaves_the_cache_usable() -> None:
    cache = make_cache()
    put(cache, list(range(1, 11)))
    with pytest.raises(ValueError, match="17 rows of sequence 0 do not fit a scratch of 16"):
        cache.place([RowGroup(0, [0] * 7, range(7))])
    cache.commit(0, range(10))
    assert put(cache, [11])[0] == list(range(1, 12))


def test_commit_beyond_the_capacity_is_refused_before_anything_moves() -> None:
    cache = make_cache(capacity=10)
    put(cache, list(range(1, 9)))
    cache.commit(0, range(8))
    put(cache, [9, 10, 11])
    with pytest.raises(ValueError, match="11 tokens do not fit a cache of 10"):
        cache.commit(0, range(3))
    assert cache.lengths == [8]
    cache.commit(0, range(2))
    assert cache.lengths == [10]


def test_an_overflow_in_the_second_group_leaves_the_first_as_it_was() -> None:
    cache = make_cache(num_seqs=2)
    with pytest.raises(ValueError, match="sequence 1"):
        cache.place([RowGroup(0, [1, 2], range(2)), RowGroup(1, [0] * 17, range(17))])
    assert cache.depths == [[], []]


def test_a_cache_that_does_not_fit_is_one_clear_error() -> None:
    with pytest.raises(ModelError, match=r"no memory on cpu for the keys and values of 1 x 1\d{14} tokens"):
        make_cache(capacity=10**14)


def test_reset_and_discard_forget_one_sequence_only() -> None:
    cache = make_cache(num_seqs=2)
    for seq in (0, 1):
        put(cache, [1, 2, 3], seq=seq)
        cache.commit(seq, range(3))
        put(cache, [4], seq=seq)
    cache.discard(0)
    assert cache.depths == [[], [0]]
    cache.reset(0)
    assert cache.lengths == [0, 3]
    assert put(cache, [1], seq=0)[0] == [1]
    cache.discard(1)
    assert put(cache, [4], seq=1)[0] == [1, 2, 3, 4]
