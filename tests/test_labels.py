"""Labels where the truth is known: by brute force with the single-stream engine, and by utilities of a single token."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from tiny import Make, sequential, tiny_engine

from pad_engine import Engine, SamplingParams
from pad_engine.errors import RequestError
from pad_engine.forest import Forest, Pair, make_pair
from pad_engine.training.labels import Labeller, LabelSettings, Sound, Walked, parse_drop
from pad_engine.training.mismatches import MismatchReader
from pad_engine.training.rollouts import Scheduler, rollout_seed
from pad_engine.training.tasks.task import Question

LENGTH = 10
PROMPTS = [list(text.encode()) for text in ("the owl", "12 + 7 =", "a", "The owl left the barn")]
Utility = Callable[[list[int]], int]


@dataclass(frozen=True)
class Ids:
    """A task whose texts are ids."""

    right: Utility
    name: str = "ids"
    max_tokens: int = LENGTH

    def questions(self, split: str, count: int | None = None, seed: int = 0) -> Iterator[Question]:
        return (Question(f"q{i}", str(i), None) for i in range(len(PROMPTS)))

    def extract(self, text: str) -> str | None:
        return text.split()[-1] if self.right(as_ids(text)) else None

    def utility(self, question: Question, text: str) -> int:
        return self.right(as_ids(text))


def as_ids(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def as_text(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def even(ids: list[int]) -> int:
    """Right or wrong about as often."""
    return int(sum(ids) % 8 > 2)


@pytest.fixture(scope="module")
def pair(make_model: Make) -> Pair:
    return make_pair(*folders(make_model), device="cpu")


def folders(make: Make) -> tuple[Any, Any]:
    options = dict(tie_word_embeddings=False)
    return make("llama", **options), make("llama", noise=0.1, **options)


def label(
    pair: Pair,
    right: Utility,
    settings: LabelSettings,
    *,
    batch: int = 8,
    parallel: int = 3,
    sound: Sound | None = None,
) -> dict[str, Walked]:
    task = Ids(right)
    labeller = Labeller(task, settings, as_text, frozenset(pair.target.eos_token_ids), 64, sound)
    scheduler = Scheduler(Forest(pair, batch=batch, max_length=64), MismatchReader(pair, 64), parallel)
    questions = zip(task.questions("train"), PROMPTS, strict=True)
    return dict(scheduler.run((question.id, labeller.walk(question, prompt)) for question, prompt in questions))


def labels_of(found: dict[str, Walked]) -> list[tuple[Any, ...]]:
    keys = ("question", "step", "prefix_ids", "draft_id", "target_id", "draft_utility", "target_utility", "pivot")
    return [tuple(r[key] for key in keys) for _, walked in sorted(found.items()) for r in walked.records]


class ByHand:
    """The procedure of methods 1.5, a token at a time, each model alone."""

    def __init__(self, make: Make, settings: LabelSettings, right: Utility) -> None:
        self.engines = [tiny_engine(folder) for folder in folders(make)]
        self.settings, self.right = settings, right

    def next_token(self, engine: Engine, ids: list[int]) -> int:
        return engine.generate(ids, SamplingParams(1)).token_ids[0]

    def rollouts(self, question: str, prompt: list[int], head: list[int], branch: str) -> float:
        if len(head) == LENGTH or (head and head[-1] == 256):
            return float(self.right(head))
        total = 0
        for index in range(self.settings.rollouts):
            seed = rollout_seed(self.settings.seed, question, len(head), branch, index)
            params = SamplingParams(LENGTH - len(head), self.settings.temperature, seed)
            total += self.right(head + self.engines[0].generate(prompt + head, params).token_ids)
        return total / self.settings.rollouts

    def walk(self, question: str, prompt: list[int]) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        if self.rollouts(question, prompt, [], "base") <= self.settings.min_utility:
            return found
        answer: list[int] = []
        while len(answer) < LENGTH and 256 not in answer:
            target, draft = (self.next_token(engine, prompt + answer) for engine in self.engines)
            pivot = False
            if target != draft:
                kept = self.rollouts(question, prompt, [*answer, draft], "draft")
                base = self.rollouts(question, prompt, [*answer, target], "target")
                pivot = kept == 0 or parse_drop(self.settings.drop)(kept, base)
                found.append((question, len(answer), answer, draft, target, kept, base, pivot))
                if (pivot or base <= self.settings.min_utility) and base == 0:
                    break
            answer = [*answer, target if pivot else draft]
        return found


def test_labels_are_those_of_the_procedure_by_hand(make_model: Make, pair: Pair) -> None:
    settings = LabelSettings(rollouts=4, temperature=0.7, seed=3)
    hand = ByHand(make_model, settings, even)
    found = label(pair, even, settings)
    expected = [one for i, prompt in enumerate(PROMPTS) for one in hand.walk(f"q{i}", prompt)]
    assert labels_of(found) == expected
    pivots = [one[-1] for one in expected]
    assert len(pivots) > 10 and 0 < sum(pivots) < len(pivots)


@pytest.mark.parametrize("labeller", ["pad", "greedy"])
def test_labels_do_not_depend_on_what_ran_beside_them(pair: Pair, labeller: str) -> None:
    settings = LabelSettings(labeller, rollouts=3)
    alone, together = (label(pair, even, settings, batch=b, parallel=p) for b, p in ((1, 1), (8, 4)))
    assert alone.keys() == together.keys()
    for name, walked in alone.items():
        assert walked.reason == together[name].reason
        for a, b in zip(walked.records, together[name].records, strict=True):
            # sums of other shapes round otherwise
            for key in ("margin", "entropy", "probability"):
                assert a.pop(key) == pytest.approx(b.pop(key), rel=1e-3, abs=1e-4)
            assert a == b
    assert sum(len(walked.records) for walked in alone.values()) > 5


def test_where_every_token_will_do_the_answer_is_the_drafts(make_model: Make, pair: Pair) -> None:
    """And where none will it is the target's; each mismatch on the way has its label."""
    target, draft = (tiny_engine(folder) for folder in folders(make_model))
    for engine, right, drop in ((draft, lambda ids: 1, "ratio:0.9"), (target, lambda ids: 1, "threshold:1")):
        settings = LabelSettings(rollouts=1, drop=drop)
        if engine is target:
            # the utility is 1 in every rollout but those behind a token of the draft's
            answers = [target.generate(prompt, SamplingParams(LENGTH)).token_ids for prompt in PROMPTS]
            right = partial(begins_one_of, answers)  # type: ignore[assignment]
            settings = replace(settings, temperature=0.0)
        found = label(pair, right, settings)
        for i, prompt in enumerate(PROMPTS):
            answer = engine.generate(prompt, SamplingParams(LENGTH)).token_ids
            records = found[f"q{i}"].records
            assert found[f"q{i}"].reason == "finished" and records
            assert [r["pivot"] for r in records] == [engine is target] * len(records)
            for r in records:
                assert r["prompt_ids"] == prompt and r["prefix_ids"] == answer[: r["step"]]
                assert answer[r["step"]] == r["target_id" if engine is target else "draft_id"]
            other = draft if engine is target else target
            differs = [
                step for step, token in enumerate(answer)
                if other.generate(prompt + answer[:step], SamplingParams(1)).token_ids != [token]
            ]  # fmt: skip
            assert [r["step"] for r in records] == differs


def begins_one_of(answers: list[list[int]], ids: list[int]) -> int:
    return int(ids in answers)


@pytest.mark.parametrize("labeller", ["pad", "greedy"])
def test_the_one_token_that_matters_is_the_pivot(pair: Pair, labeller: str) -> None:
    settings = LabelSettings(labeller, rollouts=4, drop="threshold:0.5")
    free = label(pair, lambda ids: 1, replace(settings, labeller="pad"))["q3"].records
    chosen = free[len(free) // 2]
    step, token = chosen["step"], chosen["draft_id"]

    def right(ids: list[int]) -> int:
        return int(len(ids) <= step or ids[step] != token)

    task_free = label(pair, right, settings)["q3"].records
    at = {r["step"]: r for r in task_free}
    assert at[step]["draft_id"] == token and at[step]["pivot"] and at[step]["draft_utility"] == 0
    assert at[step]["target_utility"] == 1
    if labeller == "pad":
        assert [r["step"] for r in task_free if r["pivot"]] == [step]


def test_scalars_are_those_of_the_raw_row(pair: Pair) -> None:
    for r in label(pair, even, LabelSettings(rollouts=2))["q3"].records:
        row = sequential(pair.target.decoder, r["prompt_ids"] + r["prefix_ids"])[-1]
        log_p = row.double().log_softmax(-1)
        top = row.topk(2).values
        assert int(row.argmax()) == r["target_id"] != r["draft_id"]
        assert r["margin"] == pytest.approx(float(top[0] - top[1]), abs=1e-3)
        assert r["entropy"] == pytest.approx(float(-(log_p.exp() * log_p).sum()), abs=1e-3)
        assert r["probability"] == pytest.approx(float(log_p[r["draft_id"]].exp()), abs=1e-4)
        for branch in ("draft", "target"):
            rollouts = r[f"{branch}_rollouts"]
            assert sum(one["utility"] for one in rollouts) / len(rollouts) == r[f"{branch}_utility"]


def test_a_judge_can_only_turn_a_label_into_a_pivot(pair: Pair) -> None:
    asked: list[str] = []

    def fussy(question: Question, text: str) -> bool:
        asked.append(text)
        return len(asked) % 3 != 0

    settings = LabelSettings(rollouts=3)
    found = label(pair, even, settings, batch=1, parallel=1, sound=fussy)
    records = [r for walked in found.values() for r in walked.records]
    assert {r["sound"] for r in records} >= {True, False} and all(even(as_ids(text)) for text in asked)
    drop = parse_drop(settings.drop)
    for r in records:
        dropped = drop(r["draft_utility"], r["target_utility"]) or r["draft_utility"] == 0
        assert r["pivot"] == (dropped or r["sound"] is False)
        assert (r["sound"] is None) == (r["draft_utility"] == 0)
    unsound = label(pair, lambda ids: 1, settings, sound=lambda *_: False)
    assert set(map(repr, unsound.values())) == {repr(Walked([], "discarded: the target's reasoning is unsound"))}


def test_questions_that_say_nothing_are_discarded(pair: Pair) -> None:
    for labeller, reason in (("pad", "base utility 0"), ("greedy", "the target's greedy run has no final answer")):
        found = label(pair, lambda ids: 0, LabelSettings(labeller, rollouts=2))
        assert set(map(repr, found.values())) == {repr(Walked([], f"discarded: {reason}"))}


def test_a_question_ends_where_both_continuations_are_bad(pair: Pair) -> None:
    """All of the prompt's rollouts are right, and none behind the first mismatch."""
    first = label(pair, lambda ids: 1, LabelSettings(rollouts=2))["q3"].records[0]
    heads = [[*first["prefix_ids"], first[key]] for key in ("draft_id", "target_id")]
    right = lambda ids: int(ids[: first["step"] + 1] not in heads)  # noqa: E731
    walked = label(pair, right, LabelSettings(rollouts=8, temperature=2.0, min_utility=0.0))["q3"]
    assert walked.reason == "stopped: both continuations are bad"
    assert len(walked.records) == 1 and walked.records[0]["pivot"]


@pytest.mark.parametrize(
    ("spec", "kept", "base", "dropped"),
    [
        ("ratio:0.9", 0.9, 1.0, False), ("ratio:0.9", 0.85, 1.0, True), ("ratio:0.9", 0.45, 0.5, False),
        ("ratio:1", 0.3, 0.3, False), ("ratio:0.9", 0.0, 0.0, False), ("difference:0.1", 0.9, 1.0, False),
        ("difference:0.1", 0.85, 1.0, True), ("difference:0.1", 0.2, 0.3, False), ("threshold:0.5", 0.5, 1.0, False),
        ("threshold:0.5", 0.45, 0.0, True), ("threshold:0.5", 0.6, 1.0, False),
    ],
)  # fmt: skip
def test_drops(spec: str, kept: float, base: float, dropped: bool) -> None:
    assert parse_drop(spec)(kept, base) is dropped


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"labeller": "best"}, "labeller must be pad or greedy, got 'best'"),
        ({"rollouts": 0}, "rollouts must be at least 1"),
        ({"drop": "ratio"}, "drop must be ratio:A, difference:A or threshold:A"),
        ({"drop": "share:0.5"}, "drop must be"),
        ({"drop": "ratio:2"}, "drop must be"),
        ({"drop": "ratio:nan"}, "drop must be"),
        ({"min_utility": 1.0}, "min_utility must be in"),
        ({"temperature": -1.0}, "temperature must be"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        LabelSettings(**fields)


def test_a_draft_row_that_is_not_finite_is_no_mismatch(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pair.draft is not None
    broken = torch.full((1, 300), torch.nan)
    monkeypatch.setattr(pair.draft, "logits", lambda hidden: broken.expand(len(hidden), -1))
    found = label(pair, lambda ids: 1, LabelSettings(rollouts=1))
    assert all(walked == Walked([], "finished") for walked in found.values())
