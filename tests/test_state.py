"""One request leaves nothing behind for the next, however it ended; contexts, and prefixes that are used again."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Make, Oracle, edit_config, make_tiny_model, some_ids, tiny_decoder, tiny_engine

from pad_engine import Engine, SamplingParams
from pad_engine.controller import RoundPlan
from pad_engine.drafters.draft_model import DraftModel
from pad_engine.engine import Prefix
from pad_engine.loader import make_engine
from pad_engine.models.loader import LoadedModel, load_model
from pad_engine.state import State
from pad_engine.trees.best_first import BestFirst
from pad_engine.trees.chain import Chain

PROMPT, OTHER, TOKENS = some_ids(5) * 4, some_ids(4, 9) * 5, 9
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram:min=1", "budget": 6},
    "ngram-tree": {"drafter": "ngram:min=1", "trees": "best-first", "budget": 6},
    "self": {"drafter": "draft-model", "draft_model": "self:drop=1", "budget": 6},
    "self-tree": {"drafter": "draft-model", "draft_model": "self:drop=1", "budget": 6, "trees": "best-first"},
}
REQUESTS = {
    "greedy": SamplingParams(TOKENS, ignore_eos=True),
    "match": SamplingParams(TOKENS, 0.8, 5, True, top_k=20, frequency_penalty=0.4),
    "rejection": SamplingParams(TOKENS, 0.8, 5, True, top_p=0.9),
}


@cache
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, device="cpu")


def make(folder: Path, name: str, request: str) -> Engine:
    rule = "rejection" if request == "rejection" else "auto"
    return make_engine(loaded(folder), rule=rule, fixed_budget=True, **DRAFTERS[name])


class Fault(Exception):
    pass


def failing(engine: Engine, method: str, calls: int) -> None:
    """The drafter's method raises at a call, and the request with it."""
    whole, left = getattr(engine.drafter, method), iter(range(calls))

    def broken(*args: Any) -> Any:
        if next(left, None) is None:
            raise Fault(method)
        return whole(*args)

    setattr(engine.drafter, method, broken)
    with pytest.raises(Fault):
        engine.generate(OTHER, SamplingParams(20, 0.7, 1, True))
    delattr(engine.drafter, method)


def closing(engine: Engine, rounds: int) -> None:
    stream = engine.stream(OTHER, SamplingParams(6, 0.7, 1, True))
    for _ in range(rounds):
        next(stream, None)
    stream.close()  # type: ignore[attr-defined]


def target_fails(engine: Engine) -> None:
    forward, left = engine.target.forward, iter(range(3))

    def broken(*args: Any) -> Any:
        out = forward(*args)
        if next(left, None) is None:
            raise Fault
        return out

    engine.target.forward = broken  # type: ignore[method-assign]
    with pytest.raises(Fault):
        engine.generate(OTHER, SamplingParams(20))
    del engine.target.forward


BEFORE: dict[str, Callable[[Engine], Any]] = {
    "length": lambda e: e.generate(OTHER, SamplingParams(5, ignore_eos=True)),
    "stop-id": lambda e: e.generate(OTHER, SamplingParams(12, 0.9, 2, stop_token_ids=list(range(0, 250, 5)))),
    "stop-text": lambda e: e.generate(OTHER, SamplingParams(12, 0.9, 2, True, stop=["a", "e", "\n", "\ufffd"])),
    "never-started": lambda e: e.stream(OTHER, SamplingParams(9)),
    **{f"closed-{n}": (lambda e, n=n: closing(e, n)) for n in range(7)},
    **{f"propose-fails-{n}": (lambda e, n=n: failing(e, "propose", n)) for n in (0, 2)},
    "observe-fails": lambda e: failing(e, "observe", 1),
    "evidence-fails": lambda e: failing(e, "evidence", 1),
    "target-fails": target_fails,
    "same-prompt": lambda e: e.generate(PROMPT, SamplingParams(5, ignore_eos=True)),
}


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_second_request_equals_one_in_a_fresh_engine(make_model: Make, name: str, request_name: str) -> None:
    folder, params = make_model("mistral"), REQUESTS[request_name]
    fresh = make(folder, name, request_name).generate(PROMPT, params)
    engine = make(folder, name, request_name)
    for before, run in BEFORE.items():
        run(engine)
        out = engine.generate(PROMPT, params)
        assert out.token_ids == fresh.token_ids, before
        assert (out.text, out.finish_reason, out.stats.rounds) == (fresh.text, fresh.finish_reason, fresh.stats.rounds)
        assert out.stats.accepted_tokens == fresh.stats.accepted_tokens, before


@pytest.mark.parametrize("builder", [Chain, BestFirst])
@pytest.mark.parametrize("seed", range(3))
def test_draft_lengths_of_0_and_switched_off_drafters(make_model: Make, builder: Any, seed: int) -> None:
    """C05: plans of any depth, among them none, and rounds that somebody else drafted for."""
    import random

    from pad_engine.state import Commit
    from pad_engine.tree import DraftTree

    rng, decoder = random.Random(seed), tiny_decoder(make_model("mistral"))
    options = {"num_tokens": 300, "capacity": 120, "budget": 7, "chunk": 16}
    drafter, fresh = (DraftModel(decoder, builder(), **options) for _ in range(2))
    state = State(some_ids(7, seed), 7, 120, SamplingParams(100, 0.7), 3, frozenset())
    drafter.begin(list(state.ids))
    with torch.inference_mode():
        while state.finish_reason is None and len(state.ids) < 100:
            state.plan = RoundPlan(rng.choice([1, 2, 5, 7]), rng.choice([0, 0, 1, 3, 6]))
            tree = DraftTree.chain([state.root, *some_ids(2, seed)]) if rng.random() < 0.2 else drafter.propose(state)
            if rng.random() < 0.7 and len(tree) > 1:
                fresh.begin(list(state.ids))
                again = fresh.propose(state) if tree is drafter.tree else tree
                assert (again.tokens, again.parents) == (tree.tokens, tree.parents)
            leaf = rng.randrange(len(tree))
            path = [leaf]
            while path[0]:
                path.insert(0, tree.parents[path[0]])
            commit: Commit = state.commit(tree, path, rng.randrange(250))
            drafter.observe(commit)
            assert drafter.cache.lengths[0] < len(state.ids)
            assert drafter.cache.tokens[0] == state.ids[: drafter.cache.lengths[0]]


@pytest.mark.parametrize("prompt", [5, 22, 23, 24, 25, 40, 47])
@pytest.mark.parametrize("trees", ["chain", "best-first"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_with_a_shorter_context(make_model: Make, prompt: int, trees: str, temperature: float) -> None:
    """C07: 48 tokens for the target, 24 for the drafter, which falls silent there and not before."""
    folder, draft = make_model("llama"), make_model("llama", noise=0.02, max_position_embeddings=24)
    ids, params = some_ids(prompt), SamplingParams(1000, temperature, 4, True)
    expected = tiny_engine(folder, max_length=48).generate(ids, params)
    engine = tiny_engine(folder, "draft-model", draft_model=draft, max_length=48, budget=5, trees=trees)
    out = engine.generate(ids, params)
    assert (out.token_ids, out.finish_reason) == (expected.token_ids, "length")
    assert len(ids) + len(out.token_ids) == 48
    assert (out.stats.draft_tokens > 0) == (prompt < 24)


@cache
def fresh_ids(folder: Path, name: str, request: str, ids: tuple[int, ...]) -> list[int]:
    return make(folder, name, request).generate(ids, REQUESTS[request]).token_ids


def turns(
    engine: Engine, params: SamplingParams, prompts: list[list[int]], handle: Prefix | None
) -> list[tuple[list[int], int]]:
    return [
        ((out := engine.generate(ids, params, prefix=handle)).token_ids, out.stats.reused_tokens) for ids in prompts
    ]


@pytest.mark.parametrize(
    ("family", "name", "request_name"),
    [
        (family, name, request)
        for family in ("llama", "mistral")
        for name in DRAFTERS
        for request in ("match", "rejection")
    ]
    + [(family, "self", "greedy") for family in ("llama", "mistral", "gemma3_text", "qwen2")],
)
def test_a_prefix_used_again_changes_nothing(make_model: Make, family: str, name: str, request_name: str) -> None:
    """Turns that go on, begin anew in the middle, repeat, shrink, or share nothing; windows of 8 have wrapped."""
    folder, params = make_model(family), REQUESTS[request_name]
    engine = make(folder, name, request_name)
    first = PROMPT[:6]
    handle = engine.prefill(first)
    answer = engine.generate(first, params, prefix=handle).token_ids
    prompts = [
        first + answer + some_ids(4, 2),
        first + answer + some_ids(4, 2),
        first + answer[:4] + some_ids(3, 3),
        first,
        first[:3],
        [*first[:2], 77],
        some_ids(9, 5),
        first + answer,
        [first[0]],
    ]
    got = turns(engine, params, prompts, handle)
    for ids, (tokens, _) in zip(prompts, got, strict=True):
        assert tokens == fresh_ids(folder, name, request_name, tuple(ids))
    # an appended turn costs its new tokens: the last one of the answer was never read
    assert got[0][1] == len(first + answer) - 1
    if family == "llama":
        assert [reused for _, reused in got[1:6]] == [len(prompts[0]) - 1, len(first) + 4, 5, 2, 2]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_prefix_after_other_requests(make_model: Make, family: str) -> None:
    folder, params = make_model(family), REQUESTS["greedy"]
    engine = make(folder, "self", "greedy")
    handle, longer = engine.prefill(PROMPT), [*PROMPT, *some_ids(3, 8)]
    expected = make(folder, "none", "greedy").generate(longer, params).token_ids
    stale, reused = Prefix(), []
    for between in (
        None,
        *(BEFORE[name] for name in ("length", "stop-text", "never-started", "closed-2", "propose-fails-2")),
    ):
        if between:
            between(engine)
        for prefix in (handle, stale, None, handle, handle):
            out = engine.generate(longer, params, prefix=prefix)
            assert out.token_ids == expected
            reused.append(out.stats.reused_tokens)
    # read anew whenever somebody else was there, and never else; an unread stream is nobody
    assert reused[:5] == [len(PROMPT) - 1, 0, 0, 0, len(longer) - 1 if family == "llama" else 0]
    engine.prefill(OTHER)
    assert engine.generate(longer, params, prefix=handle).stats.reused_tokens == 0


@pytest.mark.parametrize("ending", ["cancelled", "stop-text", "stop-id", "closed", "non-finite"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_prefix_after_a_turn_that_ended_early(make_model: Make, family: str, ending: str) -> None:
    """A stop text cuts ids whose keys are in the cache already; the next turn goes on from what was kept."""
    folder = make_model(family)
    engine, params = make(folder, "self", "greedy"), REQUESTS["greedy"]
    whole = engine.generate(PROMPT, params).token_ids
    handle = engine.prefill(PROMPT)
    if ending == "stop-text":
        token = engine.tokenizer.decode(whole[3:4])
        kept = engine.generate(PROMPT, SamplingParams(TOKENS, stop=token, ignore_eos=True), prefix=handle).token_ids
    elif ending == "stop-id":
        kept = engine.generate(PROMPT, SamplingParams(TOKENS, stop_token_ids=whole[4:5]), prefix=handle).token_ids
    else:
        stream = engine.stream(PROMPT, params, prefix=handle)
        kept = list(next(stream).token_ids)
        if ending == "cancelled":
            engine.cancel()
            kept += [token for delta in stream for token in delta.token_ids]
        elif ending == "closed":
            stream.close()  # type: ignore[attr-defined]
        else:
            engine.target.lm_head, good = (
                (lambda hidden: torch.full((len(hidden), 300), torch.nan)),
                engine.target.lm_head,
            )
            with pytest.raises(Exception, match="not finite"):
                list(stream)
            engine.target.lm_head = good
    for rest in ([], [7, 8], some_ids(12, 6)):
        ids = PROMPT + kept + rest
        assert engine.generate(ids, params, prefix=handle).token_ids == Oracle(folder).greedy(ids, TOKENS)


def test_dynamic_rotary_frequencies_are_never_reused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    edit_config(folder, "rope_parameters", rope_scaling={"type": "dynamic", "factor": 4.0}, rope_theta=500.0)
    edit_config(folder, max_position_embeddings=20)
    engine, target = tiny_engine(folder), tiny_decoder(folder, max_length=80)
    engine = Engine(target, engine.tokenizer, engine.drafter, engine.controller, max_length=80, num_tokens=300)
    handle, params = engine.prefill(PROMPT[:15]), REQUESTS["greedy"]
    for ids in (PROMPT[:15], PROMPT, [*PROMPT, *OTHER]):
        out = engine.generate(ids, params, prefix=handle)
        assert out.stats.reused_tokens == 0
        assert out.token_ids == Oracle(folder).greedy(ids, TOKENS)
