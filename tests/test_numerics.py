"""C09: tiny temperatures, and logits that are not finite, of the target, of a rejected branch, of the drafter."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny import Make, some_ids, tiny_engine
from torch import Tensor

from pad_engine import Engine, SamplingParams
from pad_engine.drafters.scripted import Scripted
from pad_engine.errors import NonFiniteError
from pad_engine.rules.rejection import target_probs
from pad_engine.state import State

PROMPT, TOKENS, V = some_ids(6) * 3, 16, 300
NAN, INF = math.nan, math.inf
PLACES = {"nan-first": (NAN, [0]), "nan-middle": (NAN, [150]), "nan-last": (NAN, [V - 1]), "inf": (INF, [40])}
BAD: dict[str, tuple[float, Sequence[int]]] = PLACES | {
    "all-minus-inf": (-INF, range(V)),
    "all-nan": (NAN, range(V)),
    "two-inf": (INF, [3, 9]),
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram:min=1", "budget": 6},
    "self": {"drafter": "draft-model", "draft_model": "self:layers=0,1,2", "budget": 6},
    "self-tree": {"drafter": "draft-model", "draft_model": "self:layers=0,1,2", "budget": 6, "trees": "best-first"},
}


def poison(
    decoder: Any, position: int, value: float, places: Sequence[int], only: Callable[[int], bool] = lambda token: True
) -> None:
    """The row of the token at a position (if `only` says so) gets the value at some ids."""
    forward, logits, last = decoder.forward, decoder.logits, []

    def remember(placement: Any, *rest: Any) -> Any:
        last[:] = [placement]
        return forward(placement, *rest)

    def spoiled(hidden: Tensor) -> Tensor:
        out: Tensor = logits(hidden)
        first = len(last[0].positions) - len(out)
        for row in range(len(out)):
            if last[0].positions[first + row] == position and only(int(last[0].tokens[first + row])):
                out[row, list(places)] = value
        return out

    decoder.forward, decoder.logits = remember, spoiled


def heal(decoder: Any) -> None:
    del decoder.forward, decoder.logits


@pytest.fixture(scope="module")
def plain(make_model: Make) -> dict[float, list[int]]:
    engine = tiny_engine(make_model("mistral"))
    return {t: engine.generate(PROMPT, SamplingParams(TOKENS, t, 3, True)).token_ids for t in (0.0, 0.8)}


@pytest.mark.parametrize("rule", ["auto", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_target_on_the_path(
    make_model: Make, plain: dict[float, list[int]], name: str, bad: str, temperature: float, rule: str
) -> None:
    """A named error, and the engine is as good as new; what was streamed before it stays right."""
    engine = tiny_engine(make_model("mistral"), rule=rule, **DRAFTERS[name])
    params = SamplingParams(TOKENS, temperature, 3, True)
    poison(engine.target, len(PROMPT) + 5, *BAD[bad])
    got: list[int] = []
    with pytest.raises(NonFiniteError, match=str(len(PROMPT) + 5)) as failed:
        for delta in engine.stream(PROMPT, params):
            got += delta.token_ids
    assert "\n" not in str(failed.value)
    assert len(got) <= 6
    heal(engine.target)
    again = engine.generate(PROMPT, params).token_ids
    if rule == "auto":
        assert got == plain[temperature][: len(got)]
        assert again == plain[temperature]
    else:
        fresh = tiny_engine(make_model("mistral"), rule=rule, **DRAFTERS[name])
        assert again == fresh.generate(PROMPT, params).token_ids


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"repetition_penalty": 1.2}, {"logit_bias": {150: -100.0}}],
    ids=str,
)
@pytest.mark.parametrize("bad", BAD)
def test_no_control_hides_it(make_model: Make, bad: str, fields: dict[str, Any]) -> None:
    engine = tiny_engine(make_model("mistral"), "ngram:min=1", budget=6)
    poison(engine.target, len(PROMPT) + 2, *BAD[bad])
    with pytest.raises(NonFiniteError):
        engine.generate(PROMPT, SamplingParams(TOKENS, 0.8, 3, True, **fields))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_target_on_a_rejected_branch(
    make_model: Make, plain: dict[float, list[int]], temperature: float, bad: str
) -> None:
    """Rows of wrong tokens are bad; those of the run's own are not."""
    expected = plain[temperature]
    full, wrong = PROMPT + expected, next(token for token in range(V) if token not in PROMPT + expected)
    script = Scripted(lambda ids: [*full[len(ids) : len(ids) + 2], wrong, wrong])
    engine = tiny_engine(make_model("mistral"), script, budget=6)
    for position in range(len(PROMPT), len(full)):
        poison(engine.target, position, *BAD[bad], only=lambda token: token == wrong)
    params = SamplingParams(TOKENS, temperature, 3, True)
    assert engine.generate(PROMPT, params).token_ids == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_hidden_states_of_a_rejected_branch(
    make_model: Make, plain: dict[float, list[int]], temperature: float
) -> None:
    """A token whose embedding is NaN spoils its own row's keys and values, which no other row may see."""
    expected = plain[temperature]
    full, wrong = PROMPT + expected, next(token for token in range(V) if token not in PROMPT + expected)
    script = Scripted(lambda ids: [*full[len(ids) : len(ids) + 2], wrong, wrong])
    engine = tiny_engine(make_model("mistral"), script, budget=6)
    engine.target.embedding = engine.target.embedding.clone()
    engine.target.embedding[wrong] = NAN
    assert engine.generate(PROMPT, SamplingParams(TOKENS, temperature, 3, True)).token_ids == expected


@pytest.mark.parametrize("rule", ["auto", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("trees", ["chain", "best-first"])
def test_the_drafters_logits_cost_only_the_draft(
    make_model: Make, plain: dict[float, list[int]], trees: str, bad: str, temperature: float, rule: str
) -> None:
    options = {"draft_model": "self:layers=0,1,2", "budget": 6, "trees": trees, "rule": rule}
    engine = tiny_engine(make_model("mistral"), "draft-model", **options)
    draft: Any = engine.drafter
    for position in (len(PROMPT) - 1, len(PROMPT) + 3, len(PROMPT) + 4, len(PROMPT) + 8):
        poison(draft.decoder, position, *BAD[bad])
    params = SamplingParams(TOKENS, temperature, 3, True, logprobs=0)
    out = engine.generate(PROMPT, params)
    assert out.stats.accepted_tokens > 0
    assert len(out.token_ids) == TOKENS
    assert all(math.isfinite(entry.logprob) for entry in out.logprobs or [])
    if rule == "auto":
        assert out.token_ids == plain[temperature]


@pytest.mark.parametrize("rule", ["auto", "rejection"])
@pytest.mark.parametrize("temperature", [1e-30, 1e-8, 9.9e-6, 1e-5])
@pytest.mark.parametrize("name", DRAFTERS)
def test_tiny_temperatures_are_greedy(
    make_model: Make, plain: dict[float, list[int]], name: str, temperature: float, rule: str
) -> None:
    engine = tiny_engine(make_model("mistral"), rule=rule, **DRAFTERS[name])
    out = engine.generate(PROMPT, SamplingParams(TOKENS, temperature, 3, True, top_k=5, top_p=0.9, min_p=0.1))
    assert out.token_ids == plain[0.0]


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1.0, 100.0])
def test_large_logits_of_half_precision(temperature: float) -> None:
    """Logits up to +-60, at the ends of the allowed temperatures: probabilities stay finite and sum to one."""
    logits = torch.linspace(-60, 60, V).half().float()
    state = State([1], 1, 10, SamplingParams(temperature=temperature), 0, frozenset())
    p = target_probs(logits, state)
    assert torch.isfinite(p).all()
    assert float(p.sum()) == pytest.approx(1)
    assert p.argmax() == V - 1


@pytest.mark.parametrize("name", ["self", "self-tree"])
def test_both_bad(make_model: Make, name: str) -> None:
    engine: Engine = tiny_engine(make_model("mistral"), **DRAFTERS[name])
    poison(engine.drafter.decoder, len(PROMPT) + 1, NAN, [7])  # type: ignore[attr-defined]
    poison(engine.target, len(PROMPT) + 1, NAN, [7])
    with pytest.raises(NonFiniteError):
        engine.generate(PROMPT, SamplingParams(TOKENS))
