"""Forced acceptance: rounds have exactly the tokens that were asked for, and the answer is that of plain decoding."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from benches import bench_module
from tiny import CPU, some_ids

from pad_engine import SamplingParams
from pad_engine.captured import Played
from pad_engine.drafters.draft_model import DraftModel
from pad_engine.drafters.none import NoDrafter
from pad_engine.models.decoder import Decoder
from pad_engine.trees.chain import Chain

forced, rig = bench_module("forced"), bench_module("rig")
VOCAB = 96
PROMPT = [*(token % VOCAB for token in some_ids(12)), 0]


def answer(
    target: Decoder, drafter: Any, count: int, temperature: float, depth: int = 4
) -> tuple[list[int], list[int]]:
    """The new ids, and how many of them each round emitted."""
    rounds: list[Played] = []
    engine = rig.engine_on(target, drafter, depth, fused=False)
    params = SamplingParams(count, temperature=temperature, seed=1, ignore_eos=True)
    out = engine.generate(PROMPT, params, on_round=rounds.append)
    return out.token_ids, [len(played.commit.tokens) for played in rounds]


@pytest.mark.parametrize(("asked", "period"), [(1.0, 1), (3.5, 2), (3.77, 100), (2.6, 5), (5.0, 1)])
def test_lengths_have_the_mean_that_was_asked_for(asked: float, period: int) -> None:
    lengths = forced.segment_lengths(asked, 4)
    assert len(lengths) == period and sum(lengths) == pytest.approx(asked * period, abs=1e-9)
    assert max(lengths) - min(lengths) <= 1 and max(lengths) <= 5


@pytest.mark.parametrize("asked", [0.99, 5.01, 3.333])
def test_what_rounds_cannot_give_is_refused(asked: float) -> None:
    with pytest.raises(ValueError, match=r"expected hundredths in \[1, 5\]"):
        forced.segment_lengths(asked, 4)


def test_the_draft_model_errs_at_the_end_of_each_segment() -> None:
    assert forced.wrong_after([3, 4], 16) == [2, 6, 9, 13]
    # the last row's successor is id 0
    forced.successor_decoder("tiny", CPU, torch.float32, 64, wrong=forced.wrong_after([4], VOCAB))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_emit_what_was_asked_for(dtype: torch.dtype, temperature: float) -> None:
    target, draft, lengths = forced.pair("tiny", "tiny", None, 3.5, 4, 256, CPU, dtype)
    drafter = DraftModel(draft, Chain(), num_tokens=VOCAB, capacity=256, budget=5, chunk=64)
    count = 6 * sum(lengths)
    plain, ones = answer(target, NoDrafter(), count, temperature)
    assert plain == [*range(1, count + 1)] and ones == [1] * count
    ids, emitted = answer(target, drafter, count, temperature)
    assert ids == plain and emitted == 6 * lengths
    assert sum(emitted) / len(emitted) == 3.5


def test_other_lengths_and_a_draft_that_is_always_right() -> None:
    for asked, depth in ((5.0, 4), (1.5, 2)):
        target, draft, lengths = forced.pair("tiny", "tiny", None, asked, depth, 256, CPU, torch.float32)
        drafter = DraftModel(draft, Chain(), num_tokens=VOCAB, capacity=256, budget=depth + 1, chunk=64)
        _, emitted = answer(target, drafter, 10 * sum(lengths), 0.0, depth)
        assert emitted == 10 * lengths and list(accumulate(emitted))[-1] == 10 * sum(lengths)


def test_models_of_other_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match="vocabularies differ"):
        forced.pair("8b", "135m", None, 3.5, 4, 256, CPU)
