"""Reading a prompt: what it leaves in the cache, and that it equals transformers."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILY, Make, Oracle, read, some_ids, tiny_decoder
from torch import Tensor

from pad_engine.kv_cache import KVCache, RowGroup
from pad_engine.models.decoder import Decoder
from pad_engine.verify import prefill

TOLERANCE = 1e-4
WINDOW, CAPACITY, SCRATCH = 8, 60, 6


def make_cache(num_seqs: int = 1) -> KVCache:
    options = {"num_seqs": num_seqs, "capacity": CAPACITY, "scratch": SCRATCH}
    return KVCache([None, WINDOW], 1, 1, 2, dtype=torch.float32, device=torch.device("cpu"), **options)  # type: ignore[arg-type]


def chain(values: list[int], direct: bool, seq: int = 0) -> RowGroup:
    return RowGroup(seq, values, range(len(values)), direct=direct)


def put(cache: KVCache, group: RowGroup) -> list[list[list[int]]]:
    """Write each token's number as its key; returns what each row sees in the full and in the sliding layer, sorted."""
    span, seen = cache.place([group]).spans[0], []
    rows = torch.tensor(group.tokens, dtype=torch.float32)[:, None, None].expand(-1, 1, 2)
    n = len(group.tokens)
    for layer in range(len(cache.layers)):
        cache.write(layer, span, rows, -rows)
        keys, values, view = cache.read(layer, span)
        assert torch.equal(keys, -values)
        numbers = keys[0, :, 0]
        allowed = torch.ones(n, len(numbers), dtype=torch.bool)
        if view.causal:
            allowed.tril_(len(numbers) - n)
        elif view.mask is not None:
            allowed = view.mask == 0
        seen.append([sorted(numbers[row].int().tolist()) for row in allowed])
    return seen


def expect(seen: list[list[list[int]]], length: int) -> None:
    """Position p holds p + 1: each row sees everything up to itself, or the window."""
    for row in range(len(seen[0])):
        last = length + row + 1
        assert seen[0][row] == list(range(1, last + 1))
        assert seen[1][row] == list(range(max(1, last - WINDOW + 1), last + 1))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 6)), max_size=12))
@settings(max_examples=150, deadline=None)
def test_direct_rows_and_drafts_in_any_order(rounds: list[tuple[bool, int, int]]) -> None:
    """Each round reads a prompt's chunk, or drafts and keeps some of it; sometimes a chunk is read and not kept."""
    cache, length = make_cache(), 0
    for direct, count, kept in rounds:
        count = cache.rows_at_once(0, count) if direct else min(count, SCRATCH)
        if length + count > CAPACITY:
            break
        values = list(range(length + 1, length + count + 1))
        expect(put(cache, chain(values, direct)), length)
        if direct:
            assert cache.depths == [[]]
            if kept == 0:
                continue
            cache.commit_direct(0, values)
            length += count
        else:
            cache.commit(0, range(min(count, kept)))
            length += min(count, kept)
        assert cache.lengths == [length]
        assert cache.tokens == [list(range(1, length + 1))]


def test_a_direct_group_that_is_not_kept_is_not_seen() -> None:
    """As after an error in the middle of a pass, before and behind the end of the ring."""
    for length in (0, 3, 20):
        cache = make_cache()
        for value in range(1, length + 1):
            put(cache, chain([value], True))
            cache.commit_direct(0, [value])
        put(cache, chain([90, 91, 92], True))
        expect(put(cache, chain([length + 1], False)), length)


def test_sequences_are_placed_together() -> None:
    cache = make_cache(2)
    groups = [chain([1, 2, 3], True, 0), chain([7, 8], False, 1)]
    placement = cache.place(groups)
    for span in placement.spans:
        assert [view.causal for view in span.views.values()] == [span.seq == 0] * 2
    assert placement.positions.tolist() == [0, 1, 2, 0, 1]
    assert cache.depths == [[], [0, 1]]
    cache.commit_direct(0, [1, 2, 3])
    assert (cache.lengths, cache.depths) == ([3, 0], [[], [0, 1]])


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    cache = make_cache()
    cache.advance(0, list(range(1, 5)))
    assert (cache.rows_at_once(0, 4), cache.rows_at_once(0, 5), cache.rows_at_once(0, 50)) == (4, 5, SCRATCH)
    with pytest.raises(ValueError, match="61 tokens do not fit a cache of 60"):
        cache.place([chain([0] * 57, True)])
    with pytest.raises(ValueError, match="7 rows of sequence 0 do not fit a scratch of 6"):
        cache.place([chain([0] * 7, True)])
    with pytest.raises(ValueError, match="61 tokens do not fit a cache of 60"):
        cache.advance(0, [0] * 57)
    assert (cache.lengths, cache.tokens, cache.depths) == ([4], [[1, 2, 3, 4]], [[]])
    cache.place([chain([5, 6], False)])
    with pytest.raises(ValueError, match="the scratch of sequence 0 holds 2 rows"):
        cache.place([chain([5], True)])
    cache.advance(0, [5])
    assert (cache.lengths, cache.tokens, cache.depths) == ([5], [[1, 2, 3, 4, 5]], [[]])


def finish(decoder: Decoder, cache: KVCache, ids: list[int]) -> Tensor:
    """Logits of the last tokens, drafted behind what the cache holds."""
    with torch.inference_mode():
        return decoder.logits(decoder.forward(cache.place([RowGroup(0, ids, range(len(ids)))]), cache)[0])


# 8 is the window of the tiny models: below it, at it, past it, and past it with more rows than the scratch has
@pytest.mark.parametrize("chunk", [1, 5, 8, 64])
@pytest.mark.parametrize("length", [1, 8, 9, 40])
@pytest.mark.parametrize("family", FAMILY)
def test_a_prompt_equals_transformers(make_model: Make, family: str, length: int, chunk: int) -> None:
    folder, ids = make_model(family), some_ids(length + 3)
    decoder = tiny_decoder(folder)
    cache = decoder.new_cache(capacity=length + 3, scratch=7)
    with torch.inference_mode():
        hidden = prefill(decoder, cache, 0, ids[:length], chunk)
        got = torch.cat((decoder.logits(hidden), finish(decoder, cache, ids[length:])))
    assert (cache.lengths, cache.tokens) == ([length], [ids[:length]])
    torch.testing.assert_close(got, Oracle(folder).logits(ids)[length - 1 :], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("options", [{"attn_logit_softcapping": 0.5}, {"rope": "dynamic"}], ids=str)
def test_a_prompt_equals_its_reading_through_the_scratch(make_model: Make, options: dict[str, Any]) -> None:
    """A soft cap, which flash attention lacks, and frequencies that depend on the prompt's length."""
    if "rope" in options:
        rope = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
        folder = make_model("llama", rope_parameters=rope, max_position_embeddings=32)
    else:
        folder = make_model("gemma3_text", **options)
    decoder, ids = tiny_decoder(folder), some_ids(50)
    caches = [decoder.new_cache(capacity=50, scratch=16) for _ in range(2)]
    for cache in caches:
        cache.reset(0, 48)
    read(decoder, caches[0], ids[:45], 16)
    with torch.inference_mode():
        prefill(decoder, caches[1], 0, ids[:45], 16)
    first, second = (finish(decoder, cache, ids[45:]) for cache in caches)
    torch.testing.assert_close(second, first, atol=TOLERANCE, rtol=0)


def test_what_a_captured_pass_reads_has_no_hidden_state(make_model: Make) -> None:
    """Not that of a pass before it, either."""
    decoder, ids = tiny_decoder(make_model("llama")), some_ids(20)
    cache = decoder.new_cache(capacity=20, scratch=8)

    class Captured:
        def read_rows(self, seq: int, left: int) -> int:
            return left if left <= 4 else 0

        def read(self, seq: int, tokens: list[int]) -> None:
            cache.advance(seq, tokens)

    rounds: Any = Captured()
    with torch.inference_mode():
        hidden = prefill(decoder, cache, 0, ids, 16, rounds=rounds)
    assert hidden.shape == (0,) and cache.tokens == [ids]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_prefix_that_is_kept_is_read_on(make_model: Make, family: str) -> None:
    folder, ids, other = make_model(family), some_ids(30), some_ids(8, 1)
    decoder = tiny_decoder(folder)
    cache = decoder.new_cache(capacity=40, scratch=8)
    with torch.inference_mode():
        prefill(decoder, cache, 0, ids[:5] + [251, 252, 253], 8)
        assert cache.keep_prefix(0, ids) == 5
        prefill(decoder, cache, 0, ids[5:], 8)
        got = finish(decoder, cache, other)
    torch.testing.assert_close(got, Oracle(folder).logits(ids + other)[30:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_prompt_that_fails_or_is_cancelled_leaves_what_was_read(
    make_model: Make, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ids = make_model(family), some_ids(30)
    decoder, forward, cancelled = tiny_decoder(folder), Decoder.forward, threading.Event()
    cache = decoder.new_cache(capacity=40, scratch=5)

    def third_time(action: Callable[[], None]) -> None:
        passes = iter(range(9))

        def stop(*args: Any) -> Any:
            out = forward(*args)
            if next(passes) == 2:
                action()
            return out

        monkeypatch.setattr(Decoder, "forward", stop)

    def fail() -> None:
        raise RuntimeError("out of memory")

    with torch.inference_mode():
        third_time(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            prefill(decoder, cache, 0, ids, 5)
        assert (cache.lengths, cache.tokens, cache.depths) == ([10], [ids[:10]], [[]])
        third_time(cancelled.set)
        prefill(decoder, cache, 0, ids[10:], 5, cancelled)
        assert cache.lengths == [25]
        monkeypatch.undo()
        got = finish(decoder, cache, ids[25:])
    torch.testing.assert_close(got, Oracle(folder).logits(ids)[25:], atol=TOLERANCE, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILY)
def test_cuda_prompts_equal_those_of_the_cpu(make_model: Make, family: str) -> None:
    from pad_engine.models.loader import load_model

    folder, ids = make_model(family, head_dim=16), some_ids(60)
    exact = Oracle(folder).logits(ids)[-1]
    for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 0.5)):
        decoder = load_model(folder, device="cuda", dtype=dtype).decoder
        cache = decoder.new_cache(capacity=60, scratch=16)
        with torch.inference_mode():
            got = decoder.logits(prefill(decoder, cache, 0, ids, 25)).cpu()
        torch.testing.assert_close(got[0], exact, atol=bound, rtol=0)
