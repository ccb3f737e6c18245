"""Random requests against the plain path: equal ids or a refusal by name, and no other exception."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny import Make, some_ids

from pad_engine import Engine, SamplingParams
from pad_engine.drafters.scripted import Scripted
from pad_engine.engine import Prefix
from pad_engine.errors import PadError
from pad_engine.loader import make_engine
from pad_engine.models.loader import LoadedModel, load_model
from pad_engine.output import Output, collect
from pad_engine.tree import DraftTree

FAMILIES = ["llama", "mistral", "gemma3_text"]
LENGTH = 72


@cache
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, device="cpu", max_length=LENGTH)


class Fuzz:
    """A sequence of requests that its seed fixes. Engines live on from request to request."""

    def __init__(self, make_model: Make, seed: int) -> None:
        self.make_model, self.rng = make_model, random.Random(seed)
        self.engines: dict[Any, Engine] = {}
        self.handles: dict[Any, Prefix] = {}

    def engine(self, family: str, drafter: str, trees: str, budget: int, rule: str, fixed: bool) -> Engine:
        key = (family, drafter, trees, budget, rule, fixed)
        if key not in self.engines:
            options: dict[str, Any] = {"budget": budget, "rule": rule, "fixed_budget": fixed, "drafter": drafter}
            if drafter in ("ngram:min=1", "draft-model"):
                options["trees"] = trees
            if drafter == "draft-model":
                options["draft_model"] = self.make_model(family, noise=0.05) if budget % 2 else "self:drop=1"
            if drafter == "random":
                options["drafter"] = Scripted(self.random_tree)
            if budget == 1 and drafter != "random":
                options["drafter"] = "none"
                options.pop("trees", None), options.pop("draft_model", None)
            self.engines[key] = make_engine(loaded(self.make_model(family)), **options)
        return self.engines[key]

    def random_tree(self, ids: list[int]) -> DraftTree:
        """Any shape, with tokens of the sequence, twins and ids that the tokenizer hardly uses."""
        count = self.rng.randrange(1, 12)
        parents = [-1, *(self.rng.randrange(max(0, node - 3), node) for node in range(1, count))]
        return DraftTree([ids[-1], *(self.rng.choice([*ids[-6:], 299, 0]) for _ in parents[1:])], parents)

    def params(self) -> dict[str, Any]:
        rng = self.rng
        some = lambda share, value, other: value if rng.random() < share else other  # noqa: E731
        count = rng.choice([1, 2, 3, 8, 20, 200])
        return {
            "max_tokens": count,
            "temperature": rng.choice([0.0, 0.0, 1e-8, 0.3, 0.8, 1.0, 2.0]),
            "seed": rng.randrange(2**64),
            "ignore_eos": rng.random() < 0.5,
            "min_tokens": some(0.3, rng.randrange(min(count, 12) + 1), 0),
            "top_k": some(0.3, rng.choice([1, 2, 5, 299, 1000]), 0),
            "top_p": some(0.3, rng.choice([1e-6, 0.3, 0.9, 0.999]), 1.0),
            "min_p": some(0.2, rng.choice([0.01, 0.3, 1.0]), 0.0),
            "repetition_penalty": some(0.2, rng.choice([0.5, 1.1, 2.0]), 1.0),
            "presence_penalty": some(0.2, rng.uniform(-2, 2), 0.0),
            "frequency_penalty": some(0.2, rng.uniform(-2, 2), 0.0),
            "logit_bias": {rng.randrange(300): rng.uniform(-100, 8) for _ in range(some(0.3, 4, 0))},
            "stop": [
                rng.choice(["a", "\n", "é", "ab", "<x", "\ufffd", "<x26", "258>"]) for _ in range(some(0.3, 2, 0))
            ],
            "stop_token_ids": [rng.randrange(300) for _ in range(some(0.3, 6, 0))],
            "logprobs": some(0.3, rng.randrange(6), None),
        }

    def spoil(self, fields: dict[str, Any]) -> None:
        name, value = self.rng.choice(
            [("temperature", -1.0), ("top_p", 0), ("top_k", -3), ("max_tokens", 0), ("stop", [""]), ("min_p", 2)]
            + [
                ("logit_bias", {300: 1.0}),
                ("stop_token_ids", [999]),
                ("seed", -1),
                ("logprobs", 99),
                ("min_tokens", 500),
            ]
        )
        fields[name] = value

    def run(self) -> str:
        """One request; says what became of it."""
        rng = self.rng
        family = rng.choice(FAMILIES)
        drafter = rng.choice(["none", "ngram:min=1", "ngram:min=1", "draft-model", "draft-model", "random"])
        trees, rule = rng.choice(["chain", "best-first"]), rng.choice(["auto", "auto", "match", "greedy", "rejection"])
        engine = self.engine(family, drafter, trees, rng.choice([1, 2, 5, 9]), rule, rng.random() < 0.7)
        prompt = self.prompt()
        fields = self.params()
        if rng.random() < 0.1:
            self.spoil(fields)
        handle = None
        if rng.random() < 0.3:
            handle = self.handles.setdefault(id(engine), Prefix())
        plain, what = self.answer(self.engine(family, "none", "chain", 1, "auto", True), prompt, fields, None, None)
        got, why = self.answer(engine, prompt, fields, handle, rng.choice([None, None, None, 0, 1, 2]))
        if got is None:
            assert what == why or "rule greedy" in why, why
            return "refused"
        assert plain is not None
        check(got, fields)
        if got.finish_reason in ("cancelled", "closed"):
            if rule != "rejection":
                assert plain.token_ids[: len(got.token_ids)] == got.token_ids
            return "cancelled"
        if rule == "rejection" and fields["temperature"] > 1e-5:
            # not the plain run's ids, but the same again
            again, _ = self.answer(engine, prompt, fields, None, None)
            assert again is not None
            if drafter != "random":
                assert again.token_ids == got.token_ids
            return "rejection"
        assert (got.token_ids, got.text, got.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
        return "equal"

    def prompt(self) -> Any:
        rng = self.rng
        return rng.choice(
            [
                some_ids(rng.randrange(1, 9), rng.randrange(3)) * rng.choice([1, 2, 5]),
                some_ids(LENGTH + rng.randrange(-3, 2), 1),
                "the cat, the cat é 😀",
                [{"role": "user", "content": rng.choice(["hi", "😀"])}],
                [],
                [5, 300],
            ]
            if rng.random() < 0.3
            else [some_ids(rng.randrange(1, 9), rng.randrange(3)) * rng.choice([1, 2, 5])]
        )

    def answer(
        self, engine: Engine, prompt: Any, fields: dict[str, Any], handle: Prefix | None, cancel_after: int | None
    ) -> tuple[Output | None, str]:
        """The answer, or why it was refused; cancelled, one way or the other, after so many rounds."""
        try:
            stream = engine.stream(prompt, SamplingParams(**fields), prefix=handle)
            if cancel_after is None:
                return collect(stream), ""
            deltas = []
            for delta in stream:
                deltas.append(delta)
                if delta.finish_reason is None and len(deltas) > cancel_after:
                    if self.rng.random() < 0.5:
                        stream.close()  # type: ignore[attr-defined]
                        return None if not deltas else closed(deltas), ""
                    engine.cancel()
            return collect(deltas), ""
        except PadError as refused:
            assert "\n" not in str(refused)
            return None, str(refused)


def closed(deltas: list[Any]) -> Output:
    from pad_engine.output import Stats

    tokens = [token for delta in deltas for token in delta.token_ids]
    text = "".join(delta.text for delta in deltas)
    return Output(text, tokens, "closed", Stats(completion_tokens=len(tokens)), None)


def check(out: Output, fields: dict[str, Any]) -> None:
    assert out.stats.completion_tokens == len(out.token_ids) <= fields["max_tokens"]
    assert not any(stop in out.text for stop in fields["stop"]) or fields["min_tokens"]
    if out.finish_reason == "stop":
        assert len(out.token_ids) >= fields["min_tokens"]
    if out.logprobs is not None:
        assert [entry.token_id for entry in out.logprobs] == out.token_ids


def fuzz(make_model: Make, seed: int, count: int) -> dict[str, int]:
    run, seen = Fuzz(make_model, seed), dict.fromkeys(("equal", "refused", "cancelled", "rejection"), 0)
    for number in range(count):
        try:
            seen[run.run()] += 1
        except Exception as error:
            raise AssertionError(f"request {number} of seed {seed}: {error!r}") from error
    return seen


def test_60_requests(make_model: Make) -> None:
    seen = fuzz(make_model, 0, 60)
    assert all(seen.values()), seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_2000_requests(make_model: Make, seed: int) -> None:
    seen = fuzz(make_model, seed, 200)
    assert seen["equal"] > 60, seen
