"""generate with libpad deciding: generate's own ids where the rule is lossless, a plain loop's where it is not."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny import EOS, VOCAB, Make, Oracle, some_ids

from pad_engine import native
from pad_engine.errors import NonFiniteError, RequestError
from pad_engine.integrations.transformers import Speculative, speculative

pytestmark = pytest.mark.skipif(not native.available(), reason=native.missing_reason())

PROMPTS = [some_ids(1), some_ids(12, 1), some_ids(9, 2) * 3, [5, 6, 7, 8] * 6]
COUNT = 26


@pytest.fixture(scope="module")
def model(make_model: Make) -> Any:
    return Oracle(make_model()).model


@pytest.fixture(scope="module")
def noisy(make_model: Make) -> Any:
    """Agrees with the model now and then."""
    return Oracle(make_model(noise=0.1)).model


def generate(model: Any, prompt: Sequence[int], **options: Any) -> list[int]:
    """What generate adds."""
    settings = {"max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
    out = model.generate(torch.tensor([list(prompt)]), **settings)
    new: list[int] = out[0, len(prompt) :].tolist()
    return new


def both(model: Any, prompt: Sequence[int], method: Speculative, **options: Any) -> tuple[list[int], list[int]]:
    return generate(model, prompt, custom_generate=method, **options), generate(model, prompt, **options)


def noise_of(ids: Sequence[int], count: int) -> list[int]:
    """A drafter that is mostly wrong, and always the same."""
    return [(sum(ids[-3:]) * 7 + place) % VOCAB for place in range(count)]


@pytest.mark.parametrize("drafter", ["ngram", "assistant", "function"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_greedy_is_generate(model: Any, noisy: Any, prompt: list[int], drafter: str) -> None:
    made = {"assistant": noisy, "function": noise_of}.get(drafter, drafter)
    method = speculative(made, rule="greedy")
    got, want = both(model, prompt, method)
    assert got == want
    assert method.stats.tokens == COUNT
    assert method.stats.overrides == 0


def test_drafts_are_accepted(model: Any, noisy: Any) -> None:
    method = speculative(model)
    got, want = both(model, PROMPTS[1], method)
    assert got == want
    assert method.stats.accepted_tokens == method.stats.draft_tokens > 0, "a model agrees with itself"
    assert method.stats.tokens_per_round > 7
    method = speculative(noisy, num_draft=4)
    generate(model, PROMPTS[1], custom_generate=method)
    assert 0 < method.stats.accepted_tokens < method.stats.draft_tokens


@pytest.mark.parametrize("family", ["mistral", "qwen3", "gemma3_text"])
def test_other_families(make_model: Make, family: str) -> None:
    """Sliding layers forget rows that a rejection may still need."""
    target, draft = (Oracle(make_model(family, noise=noise)).model for noise in (0.0, 0.1))
    for drafter in (draft, "ngram:min=1", noise_of):
        got, want = both(target, PROMPTS[2], speculative(drafter))
        assert got == want


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2, "suppress_tokens": [3, 4]},
        {"min_new_tokens": 15, "eos_token_id": list(range(100))},
    ],
    ids=lambda options: next(iter(options)),
)
def test_logits_processors(model: Any, noisy: Any, options: dict[str, Any]) -> None:
    for drafter in ("ngram:min=1", noisy):
        for prompt in PROMPTS[:3]:
            got, want = both(model, prompt, speculative(drafter), **options)
            assert got == want


def test_ends(model: Any) -> None:
    """An end id, a criterion and the limit may fall inside an accepted path."""
    plain = generate(model, PROMPTS[1])
    end = next(place for place in range(4, COUNT) if plain[place] not in plain[:place])
    method = speculative(model)
    got, want = both(model, PROMPTS[1], method, eos_token_id=[EOS, plain[end]])
    assert got == want == plain[: end + 1]
    assert method.stats.tokens == end + 1

    def long_enough(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([ids.shape[1] >= len(PROMPTS[1]) + 11])

    got, want = both(model, PROMPTS[1], speculative(model), stopping_criteria=[long_enough])
    assert got == want == plain[:11]
    for count in (1, 2, 9, 10):
        assert generate(model, PROMPTS[1], custom_generate=speculative(model), max_new_tokens=count) == plain[:count]


def test_scores_cache_and_streamer(model: Any) -> None:
    options = {
        "max_new_tokens": 13, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "repetition_penalty": 1.2,
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
    }  # fmt: skip
    prompt = torch.tensor([PROMPTS[1]])
    streamed: list[int] = []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            streamed.extend(value.flatten().tolist())

        def end(self) -> None:
            streamed.append(-1)

    want = model.generate(prompt, **options)
    got = model.generate(prompt, custom_generate=speculative(model, streamer=Streamer()), **options)
    assert torch.equal(got.sequences, want.sequences)
    assert streamed == [*want.sequences[0].tolist(), -1]
    for mine, theirs in ((got.scores, want.scores), (got.logits, want.logits)):
        torch.testing.assert_close(torch.cat(mine), torch.cat(theirs), atol=1e-4, rtol=1e-4)
    # the cache is as long as generate's, and can be gone on from
    cache = getattr(got, "cache", None) or got.past_key_values
    assert cache.get_seq_length() == got.sequences.shape[1] - 1
    longer = model.generate(got.sequences, cache=cache, custom_generate=speculative("ngram"), **options)
    assert torch.equal(longer.sequences, model.generate(got.sequences, **options).sequences)


def test_padded_prompt_and_chunks(model: Any, noisy: Any) -> None:
    mask = torch.tensor([[0] * 3 + [1] * len(PROMPTS[1])])
    got, want = both(model, [0, 0, 0, *PROMPTS[1]], speculative(noisy), attention_mask=mask)
    assert got == want == generate(model, PROMPTS[1])
    chunked = generate(model, PROMPTS[2], custom_generate=speculative(noisy), prefill_chunk_size=5)
    assert chunked == generate(model, PROMPTS[2])


def margin_loop(
    model: Any, prompt: Sequence[int], draft: Callable[[Sequence[int], int], list[int]], theta: float, num_draft: int
) -> tuple[list[int], int]:
    """MARS's rule with a pass over the whole sequence for each token: the tokens, and how many were overrides."""
    ids, overrides = list(prompt), 0
    end = len(prompt) + COUNT
    while len(ids) < end:
        for token in [*draft(ids, min(num_draft, end - len(ids) - 1)), -1]:
            with torch.no_grad():
                row = model(torch.tensor([ids])).logits[0, -1]
            (z1, z2), (first, second) = (part.tolist() for part in row.topk(2))
            override = token == second and z1 > 0 and z2 > theta * z1
            overrides += override
            ids.append(token if override else first)
            if token not in (first, second) or (token == second and not override):
                break
    return ids[len(prompt) :], overrides


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_margin_rule(model: Any, noisy: Any, prompt: list[int]) -> None:
    theta = 0.6

    def draft(ids: Sequence[int], count: int) -> list[int]:
        ids = list(ids)
        for _ in range(count):
            with torch.no_grad():
                ids.append(int(noisy(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(ids) - count :]

    method, exact = speculative(noisy, rule=f"margin:theta={theta}", num_draft=5), speculative(noisy, num_draft=5)
    got = generate(model, prompt, custom_generate=method)
    want, overrides = margin_loop(model, prompt, draft, theta, 5)
    assert got == want
    assert method.stats.overrides == overrides > 0
    generate(model, prompt, custom_generate=exact)
    assert method.stats.tokens_per_round > exact.stats.tokens_per_round


@pytest.mark.parametrize("rule", ["margin:theta=1", "margin:form=ratio,rho=1", "margin:form=gap,m=0", "topk:k=1"])
def test_limits_are_greedy(model: Any, noisy: Any, rule: str) -> None:
    got, want = both(model, PROMPTS[1], speculative(noisy, rule=rule))
    assert got == want


@pytest.mark.parametrize(
    "rule", ["typical:eps=0.01", "topk:k=3", "fly:theta=0.1,lookahead=2", "fly:form=released,theta=0.1,lookahead=2"]
)
def test_relaxed_rules(model: Any, noisy: Any, rule: str) -> None:
    method = speculative(noisy, rule=rule)
    assert len(generate(model, PROMPTS[1], custom_generate=method)) == COUNT
    assert method.stats.overrides > 0
    bounded = speculative(noisy, rule=rule + ",max-overrides=1,window=64")
    generate(model, PROMPTS[1], custom_generate=bounded)
    assert bounded.stats.overrides == 1, "a budget over the whole answer"


def test_excluded_tokens_stay_excluded(model: Any, noisy: Any) -> None:
    """A rule reads raw logits, where a banned token may be likely."""
    plain = generate(model, PROMPTS[1], custom_generate=speculative(noisy, rule="topk:k=3"))
    banned = sorted(set(plain))[::2]
    got = generate(model, PROMPTS[1], custom_generate=speculative(noisy, rule="topk:k=3"), suppress_tokens=banned)
    assert not set(got) & set(banned)


def test_sampling_does_not_depend_on_the_draft(model: Any, noisy: Any) -> None:
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    drafters = ("ngram:min=1", noisy, model, noise_of, lambda ids, count: [])
    answers = [
        generate(model, PROMPTS[1], custom_generate=speculative(drafter, num_draft=depth, seed=7), **options)
        for drafter in drafters
        for depth in (1, 6)
    ]
    assert all(answer == answers[0] for answer in answers)
    other = generate(model, PROMPTS[1], custom_generate=speculative(seed=8), **options)
    assert other != answers[0]
    torch.manual_seed(3)
    once = generate(model, PROMPTS[1], custom_generate=speculative(), **options)
    torch.manual_seed(3)
    assert generate(model, PROMPTS[1], custom_generate=speculative(noisy), **options) == once


def test_sampling_law(model: Any) -> None:
    """The first token after a prompt, from many seeds, against the softmax."""
    prompt, trials = PROMPTS[1], 300
    with torch.no_grad():
        probs = (model(torch.tensor([prompt])).logits[0, -1] / 0.7).softmax(-1)
    counts = torch.zeros(VOCAB)
    for seed in range(trials):
        method = speculative(seed=seed)
        options = {"do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": 1}
        counts[generate(model, prompt, custom_generate=method, **options)[0]] += 1
    likely = probs > 0.02
    spread = (probs * (1 - probs) / trials).sqrt()
    assert ((counts / trials - probs).abs()[likely] < 4 * spread[likely]).all()


def test_refusals(model: Any) -> None:
    with pytest.raises(RequestError, match=r"one sequence.*batch of 2"):
        model.generate(torch.tensor([[1, 2], [3, 4]]), custom_generate=speculative(), max_new_tokens=2)
    refused = [
        ({"num_beams": 2}, "beams"),
        ({"num_return_sequences": 2, "do_sample": True}, "batch of 2"),
        ({"use_cache": False}, "use_cache"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
    ]
    for options, message in refused:
        with pytest.raises(RequestError, match=message):
            generate(model, [1, 2], custom_generate=speculative(), **options)
    with pytest.raises(RequestError, match="do_sample"):
        generate(model, [1, 2], custom_generate=speculative(rule="greedy"), do_sample=True)
    for rule, message in (
        ("rejection", "probabilities"),
        ("topk:k=9", "k must be"),
        ("margin:form=released", "rejection"),
        ("margin:base=rejection", "rejection"),
        ("unknown", "rule must be one of"),
    ):
        with pytest.raises(RequestError, match=message):
            speculative(rule=rule)
    for drafter in ("draft-model", "ngram:depth=3"):
        with pytest.raises(RequestError, match="drafter"):
            speculative(drafter)
    for count in (0, 64):
        with pytest.raises(RequestError, match="num_draft"):
            speculative(num_draft=count)


def test_not_finite(make_model: Make) -> None:
    broken = Oracle(make_model()).model
    broken.lm_head.weight.data[5] = torch.nan
    for rule in ("greedy", "margin"):
        with pytest.raises(NonFiniteError):
            generate(broken, [1, 2, 3], custom_generate=speculative(rule=rule))
