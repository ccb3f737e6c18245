"""A draft model whose steps are part of the round drafts what it drafts on the host, and is never left without a token.

On a GPU the rounds are captured; elsewhere their kernels are interpreted, so models and answers are small.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import CUDA, DEVICE, MODES, ints, repeat
from tiny import Make, some_ids

from pad_engine import Engine, SamplingParams
from pad_engine.captured import Played
from pad_engine.controller import RoundPlan
from pad_engine.drafters.draft_model import DraftModel
from pad_engine.drafters.draft_model_device import DeviceDraftModel
from pad_engine.drafters.draft_recipes import Chain, Reading
from pad_engine.kernels.accept import MAX_ROWS
from pad_engine.kernels.draft_chain import begin_draft, begin_draft_ref, chain_length_ref, take_draft
from pad_engine.loader import load_engine
from pad_engine.tree import DraftTree, make_forest

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPT = some_ids(9)
WHOLE, HALF = "self:layers=0,1", "self:layers=0"
TOKENS = 48 if CUDA else 6  # an interpreted round takes seconds


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels read weights as they are, not as a CPU's library packs them."""
    monkeypatch.setattr("pad_engine.kernels.linear.can_pack", lambda weight: False)


@pytest.fixture
def engine_of(make_model: Make) -> Callable[..., Engine]:
    def make(draft: str | None, *, family: str = "llama", depth: int = 3, **options: Any) -> Engine:
        drafter = f"draft-model:depth={depth}" if draft else "none"
        options = {"dtype": "float32", "fixed_budget": True, "max_length": 128, "fused": draft is not None} | options
        folder: Path = make_model(family, **SMALL)
        return load_engine(folder, drafter=drafter, draft_model=draft, device=DEVICE, budget=depth + 1, **options)

    return make


@pytest.mark.parametrize("held, limit", [(1, 9), (2, 9), (7, 9), (8, 9), (30, 99)])
@pytest.mark.parametrize("skip, feed, rows", [(0, 2, 16), (2, 16, 16), (5, 64, 64)])
@pytest.mark.parametrize("done, opens", [(0, True), (1, True), (0, False)])
def test_the_first_rows_of_a_draft(
    held: int, limit: int, skip: int, feed: int, rows: int, done: int, opens: bool
) -> None:
    ids, depth, capacity, vocab_size = torch.tensor(some_ids(held)).int(), 4, 24, 200
    image = torch.full((1, 128), -9, dtype=torch.int32, device=DEVICE)
    image[0, :held] = ids.to(DEVICE)
    token, parent, place = (ints([-7] * rows) for _ in range(3))
    mask, start, draft_len = ints([0] * rows, torch.int64), ints([-7, -7]), ints([-7])
    chain = (ints([-7] * 16), ints([-7] * 16), ints([-7] * 16), ints([0] * 16, torch.int64), ints([-7, -7]))
    scalars = [ints([value]) for value in (held - 1, limit, done)]

    def launch() -> None:
        begin_draft(
            image, *scalars, token, parent, place, mask, start, draft_len, chain if opens else None,
            ints([skip]) if skip else None, feed=feed, depth=depth, capacity=capacity, vocab_size=vocab_size,
        )  # fmt: skip

    repeat(launch, token, parent, place, mask, start, draft_len, *chain)
    tokens, depths, before = begin_draft_ref(ids, skip, feed, capacity, vocab_size)
    count = len(tokens)
    assert start.tolist() == [0, count] and int(draft_len) == before
    assert token[:count].tolist() == tokens.tolist() and place[:count].tolist() == depths.tolist()
    assert set(token[count:].tolist()) <= {0}
    if not opens:
        assert all(set(field.tolist()) <= {-7, 0} for field in chain)
        return
    forest = make_forest([DraftTree.chain([0] * 16)], [0])
    assert chain[4].tolist() == [0, 1 + chain_length_ref(held, limit, depth, bool(done))]
    assert chain[0].tolist() == [int(ids[-1])] * 16
    assert chain[1].tolist() == forest.parent.tolist() and chain[2].tolist() == forest.depth.tolist()
    assert chain[3].tolist() == forest.tree_mask_bits[:, 0].tolist()


@pytest.mark.parametrize("parts", [1, 5, 1056])
@pytest.mark.parametrize("rows, count", [(1, 1), (16, 1), (16, 2)])
@pytest.mark.parametrize("finite", [True, False])
def test_a_pick_becomes_the_next_row(parts: int, rows: int, count: int, finite: bool) -> None:
    score, token_id = torch.randn(parts, rows).to(DEVICE), torch.randint(0, 9999, (parts, rows)).int().to(DEVICE)
    score[0, count - 1] = score[-1, count - 1] = 9.0  # a tie: the lowest id
    if not finite:
        score[parts // 2, count - 1] = torch.inf
    row_start, cache_len = ints([0, count]), ints([20])
    row_token, draft_len, token, start = ints([-7] * 4), ints([-7]), ints([-7] * 16), ints([0, 6])

    def launch() -> None:
        take_draft(
            score, token_id, row_start, cache_len, row_token, draft_len, token, start, step=3, capacity=22, pdl=MODES[0]
        )

    repeat(launch, row_token, draft_len, token, start)
    expected = int(min(token_id[0, count - 1], token_id[-1, count - 1])) if finite else 0
    assert token.tolist() == [-7] * 3 + [expected] + [-7] * 12 and row_token.tolist() == [expected] + [-7] * 3
    assert int(draft_len) == 21  # 23 lies behind the cache's end
    assert start.tolist() == [0, 6 if finite else 3]


# an interpreted answer takes long, so one temperature of two is a slow test there
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=() if CUDA else pytest.mark.slow), 0.8])
def test_answers_are_plain_ones_and_drafts_are_the_hosts(engine_of: Callable[..., Engine], temperature: float) -> None:
    params = SamplingParams(TOKENS, temperature, 3, ignore_eos=True)
    plain = engine_of(None).generate(PROMPT, params).token_ids
    device, host = engine_of(HALF), engine_of(HALF, fused=False)
    assert isinstance(device.drafter, DeviceDraftModel) and type(host.drafter) is DraftModel
    ours, theirs = device.generate(PROMPT, params), host.generate(PROMPT, params)
    assert ours.token_ids == theirs.token_ids == plain
    assert ours.stats.rounds == theirs.stats.rounds
    assert ours.stats.tried_by_position == theirs.stats.tried_by_position
    assert ours.stats.accepted_by_position == theirs.stats.accepted_by_position
    assert device.rounds is not None and {kind for kind, _ in device.rounds.replays} >= {Chain(device.drafter, 3)}


class Alternate:
    """Instead of a controller's decision: so many plain rounds, then a draft, and so on."""

    def __init__(self, *plain: int) -> None:
        self.plan = [budget for count in plain for budget in (*[1] * count, 4)]
        self.turn = 0

    def __call__(self, _evidence: int, _remaining: int, _pinned: bool, _at_work: object, readings: int) -> RoundPlan:
        self.turn += 1
        budget = self.plan[(self.turn - 1) % len(self.plan)]
        return RoundPlan(budget, 3, readings if budget > 1 else 0)


@pytest.mark.parametrize(
    "plain",
    [(1, 3), pytest.param((0, 2, 17, 40), marks=pytest.mark.gpu), pytest.param((200, 0, 1), marks=pytest.mark.gpu)],
    ids=str,
)
def test_a_copy_of_the_target_is_never_wrong(
    engine_of: Callable[..., Engine], plain: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts are all accepted, whatever plain rounds came between: were one key missing, some would not be."""
    monkeypatch.setattr("pad_engine.drafters.draft_model_device.RING", 3)  # fewer images than the longest gap needs
    engine = engine_of(WHOLE, max_length=256)
    engine.controller.decide = Alternate(*plain)  # type: ignore[method-assign]
    params = SamplingParams(sum(plain) + 4 * len(plain), ignore_eos=True)
    rounds: list[Played] = []
    out = engine.generate(PROMPT, params, on_round=rounds.append)
    assert out.token_ids == engine_of(None, max_length=256).generate(PROMPT, params).token_ids
    assert out.stats.accepted_tokens == out.stats.draft_tokens > 0
    assert [round.readings for round in rounds if round.budget > 1] == [-(-count // MAX_ROWS) for count in plain]
    assert engine.rounds is not None
    kinds = [kind for kind, _ in engine.rounds.replays]
    assert any(isinstance(kind, Reading) for kind in kinds) and "plain" in kinds


def test_turns_and_requests_of_the_host(engine_of: Callable[..., Engine]) -> None:
    """What the draft model's cache keeps of a turn is right for the next, and for one whose rounds the host decides."""
    engine, ids = engine_of(WHOLE), list(PROMPT)
    handle = engine.prefill(ids)
    for params in (SamplingParams(5, ignore_eos=True), SamplingParams(4, ignore_eos=True, logprobs=1)) * 2:
        out = engine.generate(ids, params, prefix=handle)
        assert out.stats.accepted_tokens == out.stats.draft_tokens > 0
        ids += [*out.token_ids, 7]
    answer = ids[len(PROMPT) :]
    whole = engine_of(None)
    for turn, length in enumerate((5, 4, 5, 4)):
        start = sum((5, 4, 5)[:turn]) + turn
        asked = [*PROMPT, *answer[:start]]
        expected = whole.generate(asked, SamplingParams(length, ignore_eos=True)).token_ids
        assert answer[start : start + length] == expected


def test_the_end_of_the_draft_models_context(engine_of: Callable[..., Engine]) -> None:
    """It stops drafting there, and no round writes behind its cache."""
    engine = engine_of(WHOLE)
    drafter = engine.drafter
    assert isinstance(drafter, DeviceDraftModel)
    cache = drafter.decoder.new_cache(capacity=len(PROMPT) + 4, scratch=16)
    drafter.cache = drafter.fused.cache = cache
    (buffer,) = cache.buffers.values()
    buffer.zero_()
    params = SamplingParams(9, ignore_eos=True)
    out = engine.generate(PROMPT, params)
    assert out.token_ids == engine_of(None).generate(PROMPT, params).token_ids
    assert 0 < out.stats.draft_tokens < 9
    # what lies behind one head's last place is the next one's scratch, which such a draft never uses
    assert not buffer[..., : cache.scratch, :].any() and buffer[..., cache.scratch :, :].all(-1).any()


def test_a_sliding_window_drafts_on_the_host(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(HALF, family="mistral")
    assert type(engine.drafter) is DraftModel
