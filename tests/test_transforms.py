"""What a request does to the logits, against transformers' own processors and against plain loops written here."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pad_engine import SamplingParams
from pad_engine.kernels.gumbel import gumbel_pick_ref
from pad_engine.state import State
from pad_engine.transforms import transform
from pad_engine.tree import DraftTree

V = 40
PROMPT, ANSWER = [1, 2, 3, 2, 39, 0], [5, 2, 5, 5, 7]
EVERYTHING: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 9,
    "top_p": 0.85,
    "min_p": 0.02,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.5,
    "logit_bias": {4: 3.0, 11: -100.0, 39: 1.5},
    "min_tokens": 7,
}


def rows(count: int = 1, seed: int = 0, vocab: int = V) -> Tensor:
    return 3 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))


def state_of(
    prompt: list[int] = PROMPT, answer: Sequence[int] = (), end_ids: Sequence[int] = (), **fields: Any
) -> State:
    params = SamplingParams(**fields)
    return State([*prompt, *answer], len(prompt), 1000, params, 0, frozenset(end_ids) | set(params.stop_token_ids))


def one(logits: Tensor, **fields: Any) -> Tensor:
    return transform(logits, state_of(**fields), [[]])


def by_transformers(logits: Tensor, ids: Sequence[int], prompt_length: int, ends: Sequence[int], p: Any) -> Tensor:
    """The processors in the order of `generate`; the result is at the request's temperature."""
    from transformers import (
        LogitsProcessorList,
        MinNewTokensLengthLogitsProcessor,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    steps: list[Any] = [RepetitionPenaltyLogitsProcessor(p.repetition_penalty)]
    if ends:
        steps.append(MinNewTokensLengthLogitsProcessor(prompt_length, p.min_tokens, list(ends)))
    if not p.greedy:
        steps.append(TemperatureLogitsWarper(float(p.temperature)))
        steps += [TopKLogitsWarper(p.top_k)] if p.top_k else []
        steps += [TopPLogitsWarper(p.top_p)] if p.top_p < 1 else []
        steps += [MinPLogitsWarper(p.min_p)] if p.min_p else []
    out: Tensor = LogitsProcessorList(steps)(torch.tensor([list(ids)]), logits.clone())
    return out


def by_loop(
    logits: Sequence[float], prompt: Sequence[int], answer: Sequence[int], ends: Sequence[int], p: Any
) -> list[float]:
    """The whole definition for one row, a token at a time, in Python's doubles."""
    out = list(logits)
    for token in set(prompt) | set(answer):
        out[token] = out[token] / p.repetition_penalty if out[token] > 0 else out[token] * p.repetition_penalty
    for token in answer:
        out[token] -= p.frequency_penalty
    for token in set(answer):
        out[token] -= p.presence_penalty
    for token, bias in p.logit_bias.items():
        out[token] += bias
    if len(answer) < p.min_tokens:
        for token in ends:
            out[token] = -float("inf")
    if p.greedy:
        return out
    ranked = sorted(range(len(out)), key=lambda i: (-out[i], i))[: p.top_k or None]
    weight = torch.tensor([out[i] for i in ranked], dtype=torch.float64).div(p.temperature).softmax(0).tolist()
    before = [0.0, *itertools.accumulate(weight)]
    kept = {
        token
        for rank, token in enumerate(ranked)
        if (rank == 0 or p.top_p == 1 or before[rank] < p.top_p) and weight[rank] >= p.min_p * weight[0]
    }
    return [value if token in kept else -float("inf") for token, value in enumerate(out)]


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": V},
        {"top_k": V + 5},
        {"top_p": 0.05},
        {"top_p": 0.8},
        {"top_p": 0.9999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.5},
        {"min_tokens": 9},
        {"min_tokens": 5},
        {"repetition_penalty": 1.7, "top_k": 20, "top_p": 0.7, "min_p": 0.01, "min_tokens": 6},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_as_transformers(fields: dict[str, Any], temperature: float) -> None:
    for seed in range(8):
        logits, ends = rows(seed=seed), [9, 17]
        state = state_of(answer=ANSWER, end_ids=ends, temperature=temperature, **fields)
        got = transform(logits, state, [[]])
        expected = by_transformers(logits, state.ids, state.prompt_length, ends, state.params)
        torch.testing.assert_close(got / (temperature or 1), expected)
        assert torch.equal(got == -torch.inf, expected == -torch.inf)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_combination_as_a_plain_loop(data: st.DataObject) -> None:
    draw = data.draw
    vocab = draw(st.integers(2, 12))
    token = st.integers(0, vocab - 1)
    # few different values, so that ties are common
    logits = draw(st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.5, 1.0, 3.0]), min_size=vocab, max_size=vocab))
    prompt, answer = draw(st.lists(token, min_size=1, max_size=6)), draw(st.lists(token, max_size=6))
    state = state_of(
        prompt,
        answer,
        draw(st.lists(token, max_size=vocab - 1)),
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        top_k=draw(st.integers(0, vocab + 2)),
        top_p=draw(st.sampled_from([0.13, 0.57, 0.91, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.07, 0.43])),
        repetition_penalty=draw(st.sampled_from([0.7, 1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([-0.3, 0.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([-0.2, 0.0, 0.45])),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-100.0, -1.1, 2.3]), max_size=3)),
        min_tokens=draw(st.integers(0, 8)),
    )
    got = transform(torch.tensor([logits]), state, [[]])
    ends = sorted(state.end_ids)
    before = torch.tensor(by_loop(logits, prompt, answer, ends, replace(state.params, temperature=0.0)))
    ours = transform(torch.tensor([logits]), replace(state, params=replace(state.params, temperature=0.0)), [[]])[0]
    # sums that are equal but for rounding, in one of the two, rank either way
    if not near_tie(before) and not near_tie(ours):
        torch.testing.assert_close(got, torch.tensor([by_loop(logits, prompt, answer, ends, state.params)]))


def near_tie(values: Tensor) -> bool:
    """Whether two different values of a row are nearer than fp32 rounding."""
    gaps = values.double().sort().values.diff().abs()
    return bool(((gaps > 0) & (gaps < 1e-5)).any())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_untouched_requests_return_the_same_tensor(temperature: float) -> None:
    logits = rows(3)
    assert transform(logits, state_of(temperature=temperature), [[], [1], [1, 2]]) is logits
    # filters say nothing at temperature 0
    if temperature == 0:
        assert transform(logits, state_of(top_k=3, top_p=0.5, min_p=0.3), [[], [1], [1, 2]]) is logits
    # the minimum is reached, and no ends are known
    assert transform(logits, state_of(answer=[1] * 4, end_ids=[3], min_tokens=4), [[], [1], [1, 2]]) is logits
    assert transform(logits, state_of(min_tokens=4), [[], [1], [1, 2]]) is logits


@pytest.mark.parametrize(
    "fields", [{name: value, "temperature": 0.7} for name, value in EVERYTHING.items()] + [EVERYTHING], ids=str
)
def test_the_input_is_never_written_to(fields: dict[str, Any]) -> None:
    logits = rows(2)
    before = logits.clone()
    transform(logits, state_of(answer=ANSWER, end_ids=[3], **fields), [[], [3]])
    assert torch.equal(logits, before)


def test_ties_keep_the_lowest_ids() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 2.0, 0.0]])
    kept = lambda **fields: torch.nonzero(one(logits, prompt=[0], temperature=1.0, **fields)[0] > -9).flatten().tolist()  # noqa: E731
    assert kept(top_k=1) == [1]
    assert kept(top_k=3) == [1, 2, 3]
    assert kept(top_k=5) == [0, 1, 2, 3, 4]
    assert kept(top_p=0.01) == [1]
    assert kept(top_p=0.3) == [1, 2]
    assert kept(min_p=1.0) == [1, 2, 3, 4]
    assert kept(min_p=0.3) == [0, 1, 2, 3, 4]
    # a second filter looks at what the first has left
    assert kept(top_k=4, top_p=0.5) == [1, 2]
    assert kept(top_k=2, min_p=1.0) == [1, 2]


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 100.0])
@pytest.mark.parametrize("fields", [{"top_k": 2}, {"top_p": 1e-9}, {"top_p": 0.999}, {"min_p": 1.0}], ids=str)
def test_extreme_values_keep_something(fields: dict[str, Any], temperature: float) -> None:
    for scale in (1e-6, 1.0, 60.0):
        logits = scale * rows(4).clamp(-1, 1)
        out = transform(logits, state_of(temperature=temperature, **fields), [[]] * 4)
        assert (out > -torch.inf).any(1).all()
        assert torch.equal(out.argmax(1), logits.argmax(1))


def test_presence_and_frequency_count_the_answer_and_repetition_the_prompt_too() -> None:
    logits = rows().abs()
    presence = one(logits, answer=ANSWER, presence_penalty=0.5)
    frequency = one(logits, answer=ANSWER, frequency_penalty=0.25)
    repetition = one(logits, answer=ANSWER, repetition_penalty=2.0)
    assert torch.nonzero((presence != logits)[0]).flatten().tolist() == [2, 5, 7]
    torch.testing.assert_close((logits - frequency)[0, [2, 5, 7]], torch.tensor([0.25, 0.75, 0.25]))
    assert torch.nonzero((repetition != logits)[0]).flatten().tolist() == [0, 1, 2, 3, 5, 7, 39]
    # a negative logit is made smaller as well
    assert (one(-logits, answer=ANSWER, repetition_penalty=2.0) <= -logits).all()


def test_logit_bias_forbids_and_forces() -> None:
    logits = rows()
    assert one(logits, logit_bias={7: 100.0}).argmax() == 7
    best = int(logits.argmax())
    assert one(logits, logit_bias={best: -100.0}).argmax() != best
    # a bias comes before the filters, so it can lift a token into them
    worst = int(logits.argmin())
    assert one(logits, logit_bias={worst: 50.0}, temperature=1.0, top_k=1)[0, worst] > -torch.inf
    # and never past a minimum length
    assert one(logits, logit_bias={3: 100.0}, min_tokens=1, end_ids=[3])[0, 3] == -torch.inf


@pytest.mark.parametrize("count", range(5))
def test_min_tokens_forbids_every_end_until_then(count: int) -> None:
    """`count` tokens are there; a row whose path is longer stands further on."""
    state = state_of(answer=[1] * count, end_ids=[9, 17], stop_token_ids=[20], min_tokens=3)
    paths = [[], [4], [4, 5], [6]]
    out = transform(rows(4), state, paths)
    for row, path in enumerate(paths):
        early = count + len(path) < 3
        assert ((out[row] == -torch.inf).nonzero().flatten().tolist() == [9, 17, 20]) == early
        assert torch.isfinite(out[row]).all() == (not early)


def trees(seed: int) -> DraftTree:
    rng = random.Random(seed)
    parents = [-1, *(rng.randrange(node) for node in range(1, 14))]
    return DraftTree([ANSWER[-1], *(rng.choice([2, 5, 6, 8, 9]) for _ in parents[1:])], parents)


@pytest.mark.parametrize(
    "fields", [{name: value, "temperature": 0.7} for name, value in EVERYTHING.items()] + [EVERYTHING], ids=str
)
@pytest.mark.parametrize("seed", range(3))
def test_a_row_of_a_tree_is_that_of_its_path_decoded_plainly(fields: dict[str, Any], seed: int) -> None:
    """C10: prompt, committed and own ancestors; nothing of another branch, though branches share tokens."""
    tree, ends = trees(seed), [9, 17]
    logits = rows(len(tree), seed)
    got = transform(logits, state_of(answer=ANSWER, end_ids=ends, **fields), tree.paths)
    for row, path in enumerate(tree.paths):
        plain = transform(logits[row : row + 1], state_of(answer=[*ANSWER, *path], end_ids=ends, **fields), [[]])
        assert torch.equal(got[row], plain[0])


@pytest.mark.parametrize("vocab", [6, V])
def test_ids_that_these_logits_do_not_have(vocab: int) -> None:
    """C16: a draft model's vocabulary may be shorter than the ids of prompt, answer, biases and ends."""
    fields = EVERYTHING | {"logit_bias": {4: 3.0, 39: 1.5, 1000: 2.0}}
    state = state_of([1, 900, 2], [5, 901, 5], [3, 902], **fields)
    got = transform(rows(2, vocab=vocab), state, [[], [903]])
    fields["logit_bias"] = {token: bias for token, bias in fields["logit_bias"].items() if token < vocab}
    inside = state_of([1, 2], [5, 5], [3], **fields)
    assert torch.equal(got[:1], transform(rows(2, vocab=vocab)[:1], inside, [[]]))


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.7, "top_k": 3}, EVERYTHING], ids=["none", "top-k", "all"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, V // 2, V - 1])
def test_rows_that_are_not_finite_stay_so(fields: dict[str, Any], bad: float, place: int) -> None:
    """C09: no filter hides a NaN or an infinity from the pick."""
    logits = rows(2)
    logits[0, place] = bad
    out = transform(logits, state_of(answer=ANSWER, end_ids=[9], **fields), [[], [4]])
    picks = gumbel_pick_ref(out, torch.arange(2), 0, 0.7).tolist()
    assert picks[0] == -1
    assert picks[1] >= 0
    nothing = transform(torch.full((1, V), -torch.inf), state_of(answer=ANSWER, **fields), [[]])
    assert gumbel_pick_ref(nothing, torch.arange(1), 0, 0.7).tolist() == [-1]
