"""Engine.warm_up: every size of a round once before requests come, and none where nothing is captured."""

from types import SimpleNamespace
from typing import Any

import pytest
from tiny import Make, tiny_engine

from pad_engine import Engine, SamplingParams
from pad_engine.controller import FEW, Controller
from pad_engine.engine import WARM_TRIAL
from pad_engine.models.fused import ROW_PADS, row_pad
from pad_engine.tree import DraftTree


class Stub:
    """In place of an engine: notes what it is asked for, and measures as a round would."""

    def __init__(self, device: str, max_length: int = 2048, rounds: object = True, everywhere: bool = False) -> None:
        self.target = SimpleNamespace(device=SimpleNamespace(type=device))
        self.rounds, self.max_length = rounds, max_length
        self.controller = Controller(6, 4, budgets=(3,), everywhere=everywhere)
        self.plain: list[int] = []  # rounds ahead of a request's first draft
        self.asked: list[tuple[int, int, int, int]] = []

    def _encode(self, prompt: Any) -> list[int]:
        return list(prompt)

    def generate(self, ids: list[int], params: SamplingParams) -> None:
        self.controller.begin()
        self.plain.append(0)
        while (plan := self.controller.decide(0, 100)).depth < 1 and self.plain[-1] < params.max_tokens:
            self.controller.observe(DraftTree.chain([0]), 0, 1, 0.0, 10.0, 1, typical=False)
            self.plain[-1] += 1
        self.asked.append((plan.budget, plan.depth, params.max_tokens, len(ids)))
        self.controller.verify_cost.add(plan.budget, 7.0, FEW)
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


def test_what_plain_rounds_leave_unread_is_read_too_and_dear_drafts_are_tried() -> None:
    """By as many rows as it takes, each number of which is a graph of its own: in a request it would be made while the
    request waits. The answer that shows whether drafts pay is decided by the engine's own controller."""
    engine = Stub("cuda", everywhere=True)
    own = engine.controller
    warm_up(engine, [2, 3])
    *reading, trial = engine.plain[6:]
    assert [row_pad(unread) for unread in reading] == 2 * [*ROW_PADS[1:]], "made first, and then measured"
    assert [asked[0] for asked in engine.asked[6:12]] == 6 * [3] and engine.controller is own
    assert all(unread + asked[1] < asked[2] for unread, asked in zip(reading, engine.asked[6:12], strict=True))
    assert trial == 0 and engine.asked[12][2] == WARM_TRIAL and len(engine.asked) == 13
    assert own.trial == 0, "what drafts may lose once was theirs to lose here"


def test_what_was_measured_first_is_still_known_at_the_end() -> None:
    engine = Stub("cuda", everywhere=True)
    engine.controller = Controller(64, 63, everywhere=True)
    warm_up(engine)
    assert engine.controller.verify_cost.samples.keys() == set(range(1, 65))


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("max_length", [2048, 80, 10])
def test_a_prompt_of_its_own_fits(max_length: int, everywhere: bool) -> None:
    engine = Stub("cuda", max_length, everywhere=everywhere)
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
