"""Sampling controls through the engine: with every drafter, tree and budget a request equals its plain run."""

import json
import math
from typing import Any

import pytest
import torch
from tiny import EOS, Make, Oracle, make_tokenizer, some_ids, tiny_engine

from pad_engine import Engine, SamplingParams
from pad_engine.drafters.scripted import Scripted
from pad_engine.errors import RequestError
from pad_engine.tree import DraftTree

PROMPT = some_ids(6) * 3
TOKENS = 24
PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.5},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.5},
}
CONTROLS = PENALTIES | {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "bias": {"logit_bias": {65: 4.0, 66: -100.0, 67: 2.5, PROMPT[3]: 3.0}},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": list(range(0, 250, 7))},
    "all": {
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        **PENALTIES["penalties"],
        "logit_bias": {65: 2.0},
        "min_tokens": 4,
    },
}


def drafters(make_model: Make, budget: int) -> dict[str, dict[str, Any]]:
    near = {"drafter": "draft-model", "draft_model": make_model("mistral", noise=0.05), "budget": budget}
    return {
        "ngram": {"drafter": "ngram:min=1", "budget": budget},
        "ngram-tree": {"drafter": "ngram:min=1", "trees": "best-first", "budget": budget},
        "model": near,
        "model-tree": near | {"trees": "best-first"},
        "self": {"drafter": "draft-model", "draft_model": "self:drop=1", "budget": budget},
    }


NAMES = list(drafters(lambda *args, **options: None, 1))  # type: ignore[arg-type, return-value]


@pytest.fixture(scope="module")
def plain(make_model: Make) -> Engine:
    return tiny_engine(make_model("mistral"))


@pytest.fixture(scope="module")
def engines(make_model: Make) -> dict[tuple[str, int], Engine]:
    folder = make_model("mistral")
    return {(n, b): tiny_engine(folder, **drafters(make_model, b)[n]) for n in NAMES for b in (3, 9)}


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("name", NAMES)
def test_every_control_equals_the_plain_run(
    plain: Engine, engines: dict[tuple[str, int], Engine], name: str, control: str
) -> None:
    for temperature in (0.0, 0.8):
        params = SamplingParams(TOKENS, temperature, 7, True, **CONTROLS[control])
        expected = plain.generate(PROMPT, params)
        for budget in (3, 9):
            out = engines[name, budget].generate(PROMPT, params)
            assert (out.token_ids, out.finish_reason) == (expected.token_ids, expected.finish_reason)
            assert out.text == expected.text


def test_the_controls_matter(plain: Engine) -> None:
    """The matrix above would pass if they were ignored."""
    for name, fields in CONTROLS.items():
        changed = []
        for temperature in (0.0, 0.8):
            free = plain.generate(PROMPT, SamplingParams(TOKENS, temperature, 7, True)).token_ids
            out = plain.generate(PROMPT, SamplingParams(TOKENS, temperature, 7, True, **fields))
            changed.append(out.token_ids != free)
        assert any(changed), name


def test_penalties_as_transformers(make_model: Make, plain: Engine) -> None:
    from transformers import GenerationConfig

    oracle, ids = Oracle(make_model("mistral")), torch.tensor([PROMPT])
    with torch.inference_mode():
        config = GenerationConfig(
            max_new_tokens=TOKENS, do_sample=False, repetition_penalty=1.3, eos_token_id=None, pad_token_id=0
        )
        config.eos_token_id = None
        new = oracle.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    expected = new[0, len(PROMPT) :].tolist()
    got = plain.generate(PROMPT, SamplingParams(TOKENS, repetition_penalty=1.3, ignore_eos=True)).token_ids
    assert got[: len(expected)] == expected[: len(got)]


@pytest.mark.parametrize("control", PENALTIES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("depth", [2, 8])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_rejected_drafts_are_not_counted(
    make_model: Make, plain: Engine, control: str, temperature: float, depth: int, shape: str
) -> None:
    """C10: the rejected token is the one that the plain run emits two steps later."""
    params = SamplingParams(TOKENS, temperature, 3, True, **PENALTIES[control])
    expected = plain.generate(PROMPT, params).token_ids
    full = PROMPT + expected

    def chain(ids: list[int]) -> list[int] | DraftTree:
        at = len(ids)
        ahead, later = full[at : at + depth], full[at + 2 : at + 3]
        if shape == "chain":
            # right, then the token of two steps later in the wrong place
            return ahead[: (at % depth) + 1] + later * 2
        tokens, parents, node = [ids[-1]], [-1], 0
        for i, token in enumerate(ahead):
            wrong = full[at + i + 2 : at + i + 3] or [1]
            tokens += [*wrong, *wrong, token]
            parents += [node, len(tokens) - 3, node]
            node = len(tokens) - 1
        return DraftTree(tokens, parents)

    engine = tiny_engine(make_model("mistral"), Scripted(chain), budget=3 * depth + 1)
    out = engine.generate(PROMPT, params)
    assert out.token_ids == expected
    assert 0 < out.stats.accepted_tokens < out.stats.draft_tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["none", *NAMES])
def test_logprobs_are_those_of_the_raw_logits(
    make_model: Make, plain: Engine, engines: dict[tuple[str, int], Engine], name: str, temperature: float
) -> None:
    engine = plain if name == "none" else engines[name, 9]
    params = SamplingParams(TOKENS, temperature, 7, True, logprobs=4, top_k=30, presence_penalty=0.6)
    out = engine.generate(PROMPT, params)
    assert out.logprobs is not None
    assert [entry.token_id for entry in out.logprobs] == out.token_ids
    rows = Oracle(make_model("mistral")).logits(PROMPT + out.token_ids)[len(PROMPT) - 1 : -1].log_softmax(-1)
    for row, entry in zip(rows, out.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-4)
        best = row.topk(4)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=2e-4)
        assert [value for _, value in entry.top] == pytest.approx([float(row[t]) for t, _ in entry.top], abs=2e-4)
    parsed = json.loads(json.dumps(out.to_dict()))
    assert [entry["token_id"] for entry in parsed["logprobs"]] == parsed["token_ids"] == out.token_ids
    assert parsed["logprobs"][0]["top"][0] == list(out.logprobs[0].top[0])
    # asking for them changes nothing
    assert (
        engine.generate(PROMPT, SamplingParams(TOKENS, temperature, 7, True, top_k=30, presence_penalty=0.6)).token_ids
        == out.token_ids
    )


def test_logprobs_0_reports_the_chosen_token_alone(plain: Engine) -> None:
    out = plain.generate(PROMPT, SamplingParams(3, logprobs=0))
    assert out.logprobs is not None
    assert [entry.top for entry in out.logprobs] == [[], [], []]
    assert plain.generate(PROMPT, SamplingParams(3)).logprobs is None


@pytest.mark.parametrize("name", ["ngram", "ngram-tree", "model", "model-tree", "self"])
def test_rejection_repeats_with_its_seed_and_respects_controls(make_model: Make, name: str) -> None:
    """C11: whatever ran before; tokens outside the filter never come."""
    folder = make_model("mistral")
    make = lambda: tiny_engine(folder, rule="rejection", controller=True, **drafters(make_model, 6)[name])  # noqa: E731
    params = SamplingParams(TOKENS, 0.9, 11, True, top_k=3, repetition_penalty=1.2, logprobs=0)
    engine = make()
    first = engine.generate(PROMPT, params)
    for other in (SamplingParams(9), SamplingParams(9, 1.0, 5), SamplingParams(20, 0.3, ignore_eos=True)):
        engine.generate(some_ids(9, 4), other)
    assert engine.generate(PROMPT, params).token_ids == first.token_ids == make().generate(PROMPT, params).token_ids
    seeds = {tuple(engine.generate(PROMPT, SamplingParams(TOKENS, 0.9, seed, True)).token_ids) for seed in range(4)}
    assert len(seeds) == 4
    oracle = Oracle(folder).logits(PROMPT + first.token_ids)
    for i, token in enumerate(first.token_ids):
        row = oracle[len(PROMPT) - 1 + i].clone()
        seen = torch.tensor(sorted({*PROMPT, *first.token_ids[:i]}))
        row[seen] = torch.where(row[seen] > 0, row[seen] / 1.2, row[seen] * 1.2)
        assert row[token] >= row.topk(3).values[-1] - 1e-3
    greedy = SamplingParams(TOKENS, ignore_eos=True)
    assert engine.generate(PROMPT, greedy).token_ids == tiny_engine(folder).generate(PROMPT, greedy).token_ids


BAD: list[tuple[str, Any]] = [
    *(("top_k", v) for v in (-1, 1.5, "3", True, None)),
    *(("top_p", v) for v in (0, -0.1, 1.1, math.nan, "1", None)),
    *(("min_p", v) for v in (-0.1, 1.1, math.nan, math.inf, "0")),
    *(("repetition_penalty", v) for v in (0, -1, 11, math.nan, math.inf)),
    *(("presence_penalty", v) for v in (-2.1, 2.1, math.nan)),
    *(("frequency_penalty", v) for v in (-2.1, 2.1, math.nan, None)),
    *(("logprobs", v) for v in (-1, 21, 1.0, True, "2")),
    *(("min_tokens", v) for v in (-1, 6, 0.5, None)),
    *(("temperature", v) for v in (-1, -1e-9, math.nan, math.inf, 1e31, "hot", None)),
    *(("stop", v) for v in ("", ["a", ""], [1], b"x", None, 5, [None])),
    *(("stop_token_ids", v) for v in ([-1], [1.5], ["a"], "a", [True], None, 5, [300], [2**40])),
    *(("logit_bias", v) for v in ({-1: 1.0}, {"a": 1.0}, {1.5: 1.0}, {1: 101.0}, {1: math.nan}, {1: "x"}, {300: 1.0})),
    *(("logit_bias", v) for v in ({True: 1.0}, {1: True}, {1: None}, None, [1], "a")),
    *(("ignore_eos", v) for v in ("no", 2, None)),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=repr)
def test_a_bad_value_gets_one_error_that_names_the_field(plain: Engine, field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as refused:
        plain.generate([1], SamplingParams(**{"max_tokens": 5, field: value}))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 200


def test_rules_that_do_not_fit_are_refused_by_name(make_model: Make) -> None:
    engine = tiny_engine(make_model("mistral"), rule="greedy")
    with pytest.raises(RequestError, match=r"greedy.*temperature"):
        engine.generate(PROMPT, SamplingParams(1, 0.5))
    with pytest.raises(RequestError, match="nothing"):
        tiny_engine(make_model("mistral"), rule="nothing")


def test_eos_ids_and_biases_work_together(plain: Engine) -> None:
    """A biased end of sequence comes as soon as the minimum allows, and a forbidden one never."""
    out = plain.generate(PROMPT, SamplingParams(20, logit_bias={EOS: 100.0}, min_tokens=5))
    assert (len(out.token_ids), out.token_ids[-1], out.finish_reason) == (6, EOS, "stop")
    assert out.text == make_tokenizer().decode(out.token_ids, skip_special_tokens=True)
    out = plain.generate(PROMPT, SamplingParams(20, logit_bias={EOS: -100.0}))
    assert (len(out.token_ids), out.finish_reason) == (20, "length")
