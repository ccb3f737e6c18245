"""Walks over a forest: what they ask for comes back in their order, and the batch stays full."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from tiny import Make, some_ids, tiny_engine

from pad_engine import SamplingParams
from pad_engine.forest import Forest, Pair, make_pair
from pad_engine.forest_request import ForestRequest
from pad_engine.training.mismatches import MismatchReader
from pad_engine.training.rollouts import Read, Scheduler, Walk, rollout_seed


@pytest.fixture(scope="module")
def pair(make_model: Make) -> Pair:
    return make_pair(make_model("mistral"), make_model("mistral", noise=0.06), device="cpu")


def lengths(reads: Sequence[Read]) -> list[int]:
    return [len(read.ids) for read in reads]


def chain(number: int) -> Walk[list[Any]]:
    """Some requests, a reading, requests behind their answers, and nothing at all."""
    prompt, found = some_ids(3 + number, number), []
    for step in range(2):
        answers = yield [ForestRequest(prompt, SamplingParams(1 + (i + step) % 3, 0.9, i)) for i in range(number % 4)]
        found.append([answer.token_ids for answer in answers])
        found.append((yield Read(prompt, 1)))
        prompt = prompt + [token for answer in answers for token in answer.token_ids]
    return found


@pytest.mark.parametrize(("batch", "parallel"), [(1, 1), (3, 2), (16, 16)])
def test_answers_come_back_in_order(make_model: Make, pair: Pair, batch: int, parallel: int) -> None:
    scheduler = Scheduler(Forest(pair, batch=batch, max_length=80), lengths, parallel)
    found = dict(scheduler.run((str(number), chain(number)) for number in range(8)))
    engine = tiny_engine(make_model("mistral"))
    for number in range(8):
        walk, value = chain(number), None
        try:
            while True:
                ask = walk.send(value)
                value = (
                    [engine.generate(request.prompt, request.params) for request in ask]
                    if isinstance(ask, list)
                    else len(ask.ids)
                )
        except StopIteration as end:
            assert found[str(number)] == end.value


def test_the_batch_is_kept_full(pair: Pair) -> None:
    """While there are questions left, a round decodes as many requests as it can, or all that may be at work."""
    forest = Forest(pair, batch=4, max_length=64)
    scheduler, full = Scheduler(forest, lengths, 6), []
    step = forest.step

    def watched() -> Any:
        full.append(forest.room == 0 or len(scheduler.jobs) == 6)
        return step()

    forest.step = watched  # type: ignore[method-assign]
    begun = []

    def walks() -> Any:
        for number in range(12):
            begun.append(len(full))
            yield str(number), chain(4 * number % 12 + 3)

    assert len(dict(scheduler.run(walks()))) == 12
    assert all(full[: begun[-1]]) and begun[-1] > 5


def test_a_failed_walk_fails_the_run(pair: Pair) -> None:
    def broken() -> Walk[None]:
        yield [ForestRequest([1], SamplingParams(1))]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(Scheduler(Forest(pair, batch=2, max_length=64), lengths, 2).run([("a", broken())]))


def test_seeds() -> None:
    places = product((0, 1), ("a", "b"), (0, 11), ("x", "y"), (0, 1))
    seeds = {rollout_seed(*place) for place in places}
    assert len(seeds) == 32 and all(0 <= seed < 2**53 for seed in seeds)
    assert rollout_seed(0, "1", 1, "b", 0) != rollout_seed(0, "", 11, "b", 0)
    # written down: another one would change every label
    assert rollout_seed(0, "gsm8k-7", 3, "draft", 19) == 4406784894509528


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_mismatches_are_where_the_draft_model_alone_differs(make_model: Make, family: str) -> None:
    folders = make_model(family), make_model(family, noise=0.1, vocab_size=280, tokens=280)
    reader = MismatchReader(make_pair(*folders, device="cpu"), 64)
    draft = tiny_engine(folders[1])
    reads = [Read(some_ids(length, length), prompt) for length, prompt in ((2, 1), (30, 4), (17, 16), (25, 1))]
    for read, found in zip(reads, reader(reads), strict=True):
        expected = []
        for place in range(read.prompt_length, len(read.ids)):
            (token,) = draft.generate(read.ids[:place], SamplingParams(1, ignore_eos=True)).token_ids
            if token != read.ids[place]:
                expected.append((place - read.prompt_length, token, read.ids[place]))
        assert [(one.index, one.draft_id, one.target_id) for one in found] == expected and expected
