"""Engine.warm_up: every size of a round once before requests come, and none where nothing is captured."""

from types import SimpleNamespace
from typing import Any

import pytest
from tiny import Make, tiny_engine

from pad_engine import Engine, SamplingParams
from pad_engine.controller import FEW, Controller


class Stub:
    """In place of an engine: notes what it is asked for, and measures as a round would."""

    def __init__(self, device: str, max_length: int = 2048, rounds: object = True) -> None:
        self.target = SimpleNamespace(device=SimpleNamespace(type=device))
        self.rounds, self.max_length, self.controller = rounds, max_length, Controller(6, 4, budgets=(3,))
        self.asked: list[tuple[int, int, int, int]] = []

    def _encode(self, prompt: Any) -> list[int]:
        return list(prompt)

    def generate(self, ids: list[int], params: SamplingParams) -> None:
        plan = self.controller.decide(0, 100)
        self.asked.append((plan.budget, plan.depth, params.max_tokens, len(ids)))
        self.controller.verify_cost.add(plan.budget, 7.0)
        if plan.budget == 5 and ids == [9]:
            raise KeyboardInterrupt


def warm_up(engine: Any, *prompt: Any) -> None:
    Engine.warm_up(engine, *prompt)


def test_every_round_is_made_and_measured() -> None:
    engine = Stub("cuda")
    own = engine.controller
    warm_up(engine, [2, 3])
    assert engine.controller is own and own.verify_cost.samples.keys() == {1, 2, 3, 4, 5, 6}
    assert [asked[:2] for asked in engine.asked] == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 4)]
    assert all(tokens >= FEW * (depth + 1) and length == 2 for _, depth, tokens, length in engine.asked)


@pytest.mark.parametrize("max_length", [2048, 80, 10])
def test_a_prompt_of_its_own_fits(max_length: int) -> None:
    engine = Stub("cuda", max_length)
    warm_up(engine)
    assert all(0 < length < max_length and (length + tokens < max_length or length == 1)
               for _, _, tokens, length in engine.asked)  # fmt: skip


def test_the_controller_comes_back_whatever_happens() -> None:
    engine = Stub("cuda")
    own = engine.controller
    with pytest.raises(KeyboardInterrupt):
        warm_up(engine, [9])
    assert engine.controller is own


def test_where_nothing_is_captured_nothing_is_done(make_model: Make) -> None:
    for engine in (Stub("cpu"), Stub("cuda", rounds=None)):
        warm_up(engine)
        assert not engine.asked
    tiny = tiny_engine(make_model("llama"), "ngram")
    tiny.warm_up()
    assert not tiny.controller.verify_cost.samples
