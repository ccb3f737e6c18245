"""Many requests at once: every answer is the one that the engine gives to its request alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Make, random_classifier, some_ids, tiny_decoder, tiny_engine

from pad_engine import SamplingParams
from pad_engine.captured import Played
from pad_engine.errors import NonFiniteError, RequestError
from pad_engine.forest import Forest, Pair, decode_forest, make_pair
from pad_engine.forest_request import ForestAnswer, ForestRequest
from pad_engine.loader import make_engine
from pad_engine.models.decoder import Decoder
from pad_engine.rules.classifier import PIVOT_MLP
from pad_engine.rules.select import bind
from pad_engine.training.baselines import make_any_rule
from pad_engine.verify import verify

DEPTH = 3


def pair_of(make: Make, family: str = "llama", draft: str = "near", **options: Any) -> Pair:
    target = make(family, tie_word_embeddings=False, **options)
    model = make(family, tie_word_embeddings=False, noise=0.06, **options) if draft == "near" else draft
    return make_pair(target, model, device="cpu")


def mixed(count: int, temperature: float | None = None) -> list[ForestRequest]:
    """Requests of many lengths. Some share the beginning of their prompt, and some the whole of it."""
    common, requests = some_ids(20, 99), []
    for i in range(count):
        prompt = (common[: 20 - i % 3] if i % 2 else []) + some_ids(1 + (5 * i) % 13, i)
        prompt = requests[-1].prompt if i % 5 == 4 else prompt
        warmth = (0.0, 0.7, 1.2)[i % 3] if temperature is None else temperature
        requests.append(
            ForestRequest(prompt, SamplingParams(1 + (7 * i) % 30, warmth, i, ignore_eos=i % 4 == 0), key=i)
        )
    return requests


def alone(pair_folder: dict[str, Any], request: ForestRequest) -> tuple[Any, list[tuple[int, Any]]]:
    """The engine's own answer, and its overrides by their index among the tokens."""
    rounds: list[Played] = []
    out = pair_folder["engine"].generate(request.prompt, request.params, on_round=rounds.append)
    overrides, start = [], 0
    for played in rounds:
        overrides += [(start + played.commit.tree.depth[one.node] - 1, one.node) for one in played.commit.overridden]
        start += len(played.commit.tokens)
    return out, overrides


def check(
    make: Make, family: str, rule: str, depth: int, requests: list[ForestRequest], batch: int, **options: Any
) -> int:
    """Compare; returns the number of overrides."""
    pair = pair_of(make, family, **options)
    near = make(family, tie_word_embeddings=False, noise=0.06, **options)
    drafting: dict[str, Any] = dict(drafter=f"draft-model:depth={depth}", draft_model=near) if depth else {}
    engine = tiny_engine(make(family, tie_word_embeddings=False, **options), budget=depth + 1, rule=rule, **drafting)
    answers = {answer.key: answer for answer in decode_forest(pair, requests, rule=rule, depth=depth, batch=batch)}
    assert sorted(answers) == list(range(len(requests)))
    for request in requests:
        out, overrides = alone({"engine": engine}, request)
        answer = answers[request.key]
        assert (answer.token_ids, answer.finish_reason) == (out.token_ids, out.finish_reason), request
        stats = (out.stats.rounds, out.stats.draft_tokens, out.stats.accepted_tokens)
        assert (answer.rounds, answer.draft_tokens, answer.accepted_tokens) == stats
        assert [(index, one.node) for index, one in answer.overrides] == overrides
        assert answer.seed == request.params.seed
    return sum(len(answer.overrides) for answer in answers.values())


@pytest.mark.parametrize("depth", [0, DEPTH])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_answers_are_those_of_the_engine(make_model: Make, family: str, depth: int) -> None:
    """Greedy and sampled requests of mixed lengths beside one another, more of them than places."""
    assert check(make_model, family, "auto", depth, mixed(14), batch=4) == 0


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_drafts_longer_than_a_window(make_model: Make, family: str) -> None:
    """A model that drafts for itself is right to the last token, which no longer sees the first drafted ones."""
    folder, params = make_model(family), SamplingParams(30, ignore_eos=True)
    pair = make_pair(folder, folder, device="cpu")
    requests = [ForestRequest(some_ids(n, n), params, n) for n in (2, 6, 13, 30)]
    plain = {answer.key: answer.token_ids for answer in decode_forest(pair, requests)}
    for answer in decode_forest(pair, requests, depth=11, batch=3):
        assert answer.token_ids == plain[answer.key]
        assert (answer.rounds, answer.accepted_tokens, answer.draft_tokens) == (3, 27, 27)


@pytest.mark.parametrize(
    ("rule", "temperature"), [("margin:theta=0.3", 0.0), ("typical:eps=0.01,max-overrides=2,window=9", 0.8)]
)
def test_a_relaxed_rule_overrides_what_it_overrides_alone(make_model: Make, rule: str, temperature: float) -> None:
    assert check(make_model, "llama", rule, DEPTH, mixed(9, temperature), batch=4) > 5


def test_speculative_sampling_draws_what_it_draws_alone(make_model: Make) -> None:
    assert check(make_model, "llama", "rejection", DEPTH, mixed(6, 0.9), batch=3) == 0


def test_requests_of_several_rules_share_a_pass(
    make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer is that of a forest of its rule alone: with overrides, a classifier that taps, the draft model's own
    rows, changed logits, and walks."""
    pair, model = pair_of(make_model), random_classifier(tmp_path, PIVOT_MLP, 48, 1)
    specs = ["auto", "margin:theta=0.3", f"pivot:model={model},sigma=0.5", "typical:eps=0.01", "kl:t=3"]
    rules = [bind(make_any_rule(spec, pair.target.num_tokens), pair.target.decoder, 300) for spec in specs]
    requests = [replace(one, rule=rules[one.key % len(rules)]) for one in mixed(15, 0.0)]
    requests += [
        replace(one, key=15 + one.key, rule=bind("rejection", pair.target.decoder, 300)) for one in mixed(3, 0.9)
    ]
    requests[1] = replace(requests[1], params=replace(requests[1].params, repetition_penalty=1.4))
    separate = {}
    for rule in {id(one.rule): one.rule for one in requests}.values():
        theirs = [replace(one, rule=None) for one in requests if one.rule is rule]
        assert rule is not None
        separate |= {answer.key: answer for answer in decode_forest(pair, theirs, rule=rule, depth=DEPTH, batch=5)}
    passes = []
    monkeypatch.setattr("pad_engine.forest.verify", lambda *given: passes.append(1) or verify(*given))
    together = {answer.key: answer for answer in decode_forest(pair, requests, depth=DEPTH, batch=len(requests))}

    def bare(answers: dict[int, ForestAnswer]) -> dict[int, Any]:
        """Without the numbers of overrides, which a pass of other rows rounds otherwise."""
        return {k: replace(a, overrides=[(place, one.node) for place, one in a.overrides]) for k, a in answers.items()}

    assert bare(together) == bare(separate)
    assert len(passes) == max(answer.rounds for answer in together.values())
    overridden = {one.key % len(specs) for one in requests[:15] if together[one.key].overrides}
    assert overridden == {1, 2, 3, 4}


SETTINGS = (
    "auto", "margin:theta=0.9", "margin:theta=0.3", "margin:theta=0.1", "typical:eps=0.01,max-overrides=2,window=9",
    "random:rate=0.1", "random:rate=0.6", "kl:t=2", "kl:t=4", "entropy:h=1", "entropy:h=4",
)  # fmt: skip


@pytest.mark.parametrize(("family", "batch"), [("llama", 3), ("llama", 66), ("gemma3_text", 9)])
def test_requests_for_one_answer_share_a_sequence(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, family: str, batch: int
) -> None:
    """Each answer is that of a forest of its own, wherever it parts from those of other rules, however long it waits
    for a place, and if its tokens end it where others go on; what is common to them is decoded once."""
    pair, rows = pair_of(make_model, family), list[int]()
    tokens = pair.target.num_tokens
    rules = [bind(make_any_rule(spec, tokens), pair.target.decoder, tokens) for spec in SETTINGS]
    asked = [ForestRequest(some_ids(4 + i, i), SamplingParams(20, seed=i, ignore_eos=i < 3), i) for i in range(6)]
    asked[1] = replace(asked[1], params=replace(asked[1].params, repetition_penalty=1.3))
    text = next(decode_forest(pair, [asked[2]])).token_ids
    asked[2] = replace(asked[2], params=replace(asked[2].params, stop_token_ids=[text[9]]))
    spelt = pair.target.tokenizer.decode(text)
    asked[3] = replace(asked[3], params=replace(asked[3].params, stop=[spelt[len(spelt) // 2 :][:2]]))

    def found(requests: list[ForestRequest], batch: int, **options: Any) -> dict[Any, Any]:
        answers = list(decode_forest(pair, requests, depth=DEPTH, batch=batch, **options))
        assert len(answers) == len(requests)
        return {a.key: replace(a, overrides=[(place, one.node) for place, one in a.overrides]) for a in answers}

    expected = {}
    for number, rule in enumerate(rules):
        expected |= found([replace(one, key=(number, one.key), rule=rule) for one in asked], 6)
    monkeypatch.setattr("pad_engine.forest.verify", lambda *given: rows.append(len(given[3])) or verify(*given))
    together = found(
        [replace(one, key=(number, one.key), rule=rule) for one in asked for number, rule in enumerate(rules)], batch
    )
    assert together == expected
    assert max(rows) <= batch
    different = {(one.key[1], tuple(one.token_ids)) for one in together.values()}
    assert len(different) > 2 * len(asked)
    assert sum(rows) < 0.75 * sum(answer.rounds for answer in together.values())


def test_what_is_not_the_same_answer_shares_no_sequence(make_model: Make) -> None:
    """Drawn answers, other parameters, other prompts, and requests that have begun."""
    pair, params = pair_of(make_model), SamplingParams(9, ignore_eos=True)
    forest = Forest(pair, batch=9, depth=DEPTH)
    first = ForestRequest(some_ids(5), params, "first")
    drawn = replace(first, params=replace(params, temperature=1.0))
    others = [replace(first, prompt=some_ids(6)), replace(first, params=replace(params, max_tokens=8)), drawn, drawn]
    for taken, request in enumerate([first, *others]):
        assert forest.room == 9 - taken
        forest.add(request)
    forest.add(first)
    forest.add(first)
    assert forest.room == 3
    forest.step()
    forest.add(first)
    assert forest.room == 2


def test_a_copy_would_be_wrong_where_keys_depend_on_the_prompt(make_model: Make) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    forest = Forest(make_pair(make_model("llama", rope_parameters=rope), device="cpu", max_length=64), batch=4)
    for taken in range(3):
        assert forest.room == 4 - taken
        forest.add(ForestRequest(some_ids(5), SamplingParams(9)))


def test_changed_logits(make_model: Make) -> None:
    """Requests with penalties, bans and filters beside some without."""
    fields: list[dict[str, Any]] = [
        {"repetition_penalty": 1.4}, {}, {"min_tokens": 9, "frequency_penalty": 0.5}, {"top_k": 5, "temperature": 0.9},
        {"logit_bias": {7: 40.0}, "presence_penalty": 1.0}, {"top_p": 0.6, "temperature": 1.1},
    ]  # fmt: skip
    requests = [replace(r, params=replace(r.params, max_tokens=25, **f)) for r, f in zip(mixed(6), fields, strict=True)]
    check(make_model, "llama", "auto", DEPTH, requests, batch=6)


def test_stops_and_ends_are_those_of_the_engine(make_model: Make) -> None:
    """Stop texts inside a round and across two, stop ids, end ids, min_tokens, and the end of the context."""
    folder, near = (make_model("llama", tie_word_embeddings=False, noise=noise) for noise in (0.0, 0.06))
    options: dict[str, Any] = dict(max_length=40)
    engine = tiny_engine(folder, f"draft-model:depth={DEPTH}", draft_model=near, budget=DEPTH + 1, **options)
    prompt = some_ids(7)
    free = engine.generate(prompt, SamplingParams(28, ignore_eos=True))
    text = free.text
    every = [SamplingParams(28, stop=[text[at : at + size]]) for at in range(1, len(text) - 2, 3) for size in (1, 2)]
    every += [SamplingParams(28, stop=[text[2:4], "never"], min_tokens=9), SamplingParams(99), SamplingParams(1)]
    every += [SamplingParams(28, stop_token_ids=[token]) for token in free.token_ids[:6]]
    requests = [ForestRequest(prompt, params, key) for key, params in enumerate(every)]
    pair = make_pair(folder, near, device="cpu", max_length=40)
    reasons = set()
    for answer in decode_forest(pair, requests, depth=DEPTH, batch=7):
        out = engine.generate(prompt, every[answer.key])
        assert (answer.token_ids, answer.finish_reason) == (out.token_ids, out.finish_reason), every[answer.key]
        assert answer.accepted_tokens == out.stats.accepted_tokens
        reasons.add((answer.finish_reason, len(answer.token_ids) == 33))
    assert reasons == {("stop", False), ("length", True), ("length", False)}


def test_a_prefix_is_read_once(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that begin alike share one reading, beside one another and after one another."""
    rows: list[int] = []
    forward = Decoder.forward

    def counted(self: Decoder, placement: Any, *rest: Any) -> Any:
        rows.append(len(placement.tokens))
        return forward(self, placement, *rest)

    pair = make_pair(make_model("llama"), device="cpu")
    prompt, ends = some_ids(40), [some_ids(2, seed) for seed in range(1, 5)]
    requests = [ForestRequest(prompt + end, SamplingParams(1), i) for i, end in enumerate(ends * 3)]
    expected = [tiny_engine(make_model("llama")).generate(r.prompt, r.params).token_ids for r in requests]
    monkeypatch.setattr(Decoder, "forward", counted)
    answers = {answer.key: answer.token_ids for answer in decode_forest(pair, requests, batch=6)}
    assert [answers[i] for i in range(12)] == expected
    # the beginning once, one more token of each distinct end, and the last token of all twelve
    assert sum(rows) == 41 + 3 + 12


@pytest.mark.parametrize("where", ["target", "draft"])
def test_rows_that_are_not_finite(make_model: Make, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """In the target they name their request; in the draft model they cost the draft of their sequence alone."""
    pair, logits, token = pair_of(make_model), Decoder.logits, 77
    assert pair.draft is not None
    decoder = pair.target.decoder if where == "target" else pair.draft
    bad = decoder.embedding.clone()
    bad[token] = torch.nan
    monkeypatch.setattr(decoder, "embedding", bad)
    requests = [ForestRequest([*some_ids(5, i), *[token] * (i == 2)], SamplingParams(9, seed=i), i) for i in range(5)]
    if where == "target":
        with pytest.raises(NonFiniteError, match=r"request 2: the target's logits after position 5 are not finite"):
            list(decode_forest(pair, requests, depth=DEPTH, batch=4))
        return
    assert logits is Decoder.logits
    plain = {answer.key: answer.token_ids for answer in decode_forest(pair, requests, batch=2)}
    for batch in (1, 2, 5):
        answers = {answer.key: answer for answer in decode_forest(pair, requests, depth=DEPTH, batch=batch)}
        assert {key: answer.token_ids for key, answer in answers.items()} == plain
        # a place that held such a sequence drafts again for the next
        assert [answers[i].draft_tokens > 0 for i in range(5)] == [True, True, False, True, True]


def test_nothing_is_read_that_nobody_wrote(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of one sequence begins as what the memory held before, which may be no numbers."""
    pair, requests = pair_of(make_model), mixed(6)
    expected = {one.key: (one.token_ids, one.draft_tokens) for one in decode_forest(pair, requests, depth=DEPTH)}
    empty = torch.empty

    def littered(*args: Any, **options: Any) -> torch.Tensor:
        made = empty(*args, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", littered)
    for batch in (1, 2):
        found = decode_forest(pair, requests, depth=DEPTH, batch=batch)
        assert {one.key: (one.token_ids, one.draft_tokens) for one in found} == expected


def test_a_draft_model_of_a_shorter_context_and_vocabulary(make_model: Make) -> None:
    target, near = make_model("llama", vocab_size=320), make_model("llama", max_position_embeddings=24)
    engine = tiny_engine(target, "draft-model:depth=3", draft_model=near, budget=4)
    requests = [ForestRequest(some_ids(n, n), SamplingParams(14, ignore_eos=True), n) for n in (2, 11, 20, 24, 30)]
    for answer in decode_forest(make_pair(target, near, device="cpu"), requests, depth=3, batch=3):
        out = engine.generate(requests[[2, 11, 20, 24, 30].index(answer.key)].prompt, requests[0].params)
        assert (answer.token_ids, answer.draft_tokens) == (out.token_ids, out.stats.draft_tokens)


def test_rotary_frequencies_that_depend_on_the_prompt(make_model: Make) -> None:
    """Keys of one prompt are none of another."""
    rope = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    folder = make_model("llama", rope_parameters=rope, max_position_embeddings=32)
    # a longer context than the model was trained for, where they begin to depend on it
    loaded = replace(make_pair(folder, device="cpu").target, decoder=tiny_decoder(folder, max_length=80))
    engine, common = make_engine(loaded, drafter="none"), some_ids(50)
    requests = [ForestRequest(common[:n], SamplingParams(8), n) for n in (50, 44, 49, 12)]
    for answer in decode_forest(Pair(loaded), requests, batch=3):
        assert answer.token_ids == engine.generate(common[: answer.key], SamplingParams(8)).token_ids


@pytest.mark.parametrize(
    ("request_", "options", "words"),
    [
        (ForestRequest([], SamplingParams(), "a"), {}, "request 'a': the prompt is empty"),
        (ForestRequest([300], SamplingParams(), "a"), {}, "request 'a': prompt token id 300 is outside"),
        (ForestRequest([1] * 20, SamplingParams(), "a"), {"max_length": 20}, "request 'a': its prompt has 20 tokens"),
        (ForestRequest([1], SamplingParams(logprobs=1), "a"), {}, "request 'a': answers of a forest have no logprobs"),
        (ForestRequest([1], SamplingParams(temperature=1.0), 3), {"rule": "greedy"}, "request 3: rule greedy needs"),
        (ForestRequest([1], SamplingParams()), {"depth": 1}, "depth 1 needs a draft model"),
        (ForestRequest([1], SamplingParams()), {"batch": 0}, "batch at least 1"),
        (ForestRequest([1], SamplingParams()), {"max_length": 999}, r"max_length must be in \[2, 256\], got 999"),
    ],
)
def test_bad_requests_are_named(make_model: Make, request_: Any, options: dict[str, Any], words: str) -> None:
    pair = make_pair(make_model("llama"), device="cpu")
    with pytest.raises(RequestError, match=words):
        list(decode_forest(pair, [request_], **options))
