"""What is queued when, and what it costs: a request's rounds on a device that is a clock and a text to come."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from pad_engine.captured import Played, play
from pad_engine.config import SamplingParams
from pad_engine.controller import Controller
from pad_engine.drafters.drafter import Drafter
from pad_engine.drafters.ngram import NGram
from pad_engine.drafters.ngram_device import DeviceNGram
from pad_engine.drafters.none import NoDrafter
from pad_engine.kernels.accept_path import LENGTH, RUNNING
from pad_engine.kernels.ngram_lookup import ngram_lookup_ref
from pad_engine.models.fused import ROW_PADS
from pad_engine.state import State
from pad_engine.tree import DraftTree
from pad_engine.trees.builder import make_builder

PLAIN, DRAFTED, GAP = 1.0, 1.5, 0.3  # milliseconds of rounds, and until one begins that was not queued ahead
TOKENS = 64


class Device:
    """In place of Rounds and its Reports: a target that will say `text`. now: the host's clock."""

    judge, num_graphs = None, 1

    def __init__(self, prompt: Sequence[int], text: Sequence[int]) -> None:
        self.ids, self.text, self.reports = list(prompt), list(text), self
        self.now = self.free = 0.0
        self.done: list[tuple[list[int], int, int, int]] = []
        self.ends: list[float] = []
        self.log: list[str] = []

    def begin(self, *_: object) -> None:
        """The request is known."""

    def put(self, drafted: Sequence[int], cost: float, name: str) -> int:
        """Do a round: it begins when the one before it has ended, or a gap after it was queued."""
        draft, kept = list(drafted)[: max(len(self.text) - 1, 0)], 0
        while kept < len(draft) and draft[kept] == self.text[kept]:
            kept += 1
        tokens, self.text = self.text[: kept + 1], self.text[kept + 1 :]
        self.ids += tokens
        self.done.append((tokens, kept, RUNNING if self.text else LENGTH, 1 + len(draft)))
        self.free = max(self.now + GAP, self.free) + cost
        self.ends.append(self.free)
        self.log.append(name)
        return len(self.done) - 1

    def queue_plain(self) -> int:
        return self.put([], PLAIN, "plain")

    def queue_tree(self, trees: Sequence[DraftTree]) -> int:
        return self.put(trees[0].tokens[1:], DRAFTED, "tree")

    def queue(self, kind: object, nodes: int) -> int:
        found = ngram_lookup_ref(torch.tensor(self.ids), 2, nodes - 1).tolist()
        return self.put(found[1:], DRAFTED, "lookup")

    def wait(self, index: int) -> None:
        self.now = max(self.now, self.ends[index])
        self.log.append(f"read {index}")

    def read(self, index: int, seq: int) -> tuple[list[int], int, int, int]:
        return self.done[index]


class Uncounted:
    """In place of a cache."""

    def advance(self, *_: object) -> None:
        """Nothing is kept."""


def drafter_of(name: str) -> Drafter:
    if name == "none":
        return NoDrafter()
    if name == "device":
        return DeviceNGram(make_builder("chain"), torch.device("cpu"), 15)
    return NGram(make_builder(name))


def played(
    device: Device, drafter: Drafter, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Played]:
    """The rounds of the device's text, by its clock, as the engine plays them."""

    class Clock:
        def __init__(self) -> None:
            self.last = device.now

        def lap(self) -> float:
            elapsed, self.last = device.now - self.last, device.now
            return elapsed

    monkeypatch.setattr("pad_engine.captured.Stopwatch", Clock)
    ids = list(device.ids)
    state = State(list(ids), len(ids), 10_000, SamplingParams(len(device.text), ignore_eos=True), 0, frozenset())
    whole = ids + device.text
    drafter.begin(ids)
    controller.begin()
    stand_ins: Any = (device, Uncounted())
    for round in play(*stand_ins, state, drafter, controller, False, lambda: False):
        commit = round.commit
        costs = round.draft_ms, round.verify_ms, round.budget, round.typical, round.waited, round.depth, round.rows
        controller.observe(commit.tree, commit.accepted, len(commit.tokens), *costs)
        drafter.observe(commit)
        yield round
    assert state.ids == whole and state.finish_reason == "length"


def controller_of(name: str) -> Controller:
    return Controller(16, 15, branching=name == "best-first", budgets=ROW_PADS)


def missing(seed: int) -> tuple[list[int], list[int]]:
    """A prompt of few tokens, so that a match is always found, and an answer of which it says nothing."""
    draw = random.Random(seed)
    return draw.choices(range(6), k=200), draw.choices(range(6), k=TOKENS)


@pytest.mark.parametrize("name", ["none", "chain", "best-first", "device"])
def test_without_matches_rounds_are_queued_ahead(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the first gap is over a request takes the device's time and no more, whatever might have drafted."""
    device = Device(range(100), range(200, 200 + TOKENS))
    rounds = played(device, drafter_of(name), controller_of(name), monkeypatch)
    assert {len(round.commit.tree) for round in rounds} == {1}
    assert device.now == pytest.approx(GAP + TOKENS * PLAIN)
    assert device.log[:4] == ["plain", "plain", "read 0", "plain"]


@pytest.mark.parametrize("name", ["chain", "best-first"])
def test_the_hosts_drafts_wait_for_all_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = list(range(20)) * 3
    device = Device(text, text)
    rounds = list(played(device, drafter_of(name), controller_of(name), monkeypatch))
    unread = 0
    for entry in device.log:
        assert entry != "tree" or not unread
        unread += -1 if entry.startswith("read") else 1
    assert device.log.count("tree") >= 3 and sum(round.commit.accepted for round in rounds) >= 40
    assert all(round.depth is None and round.rows is None for round in rounds if len(round.commit.tree) > 1)


def test_the_devices_drafts_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    text = list(range(20)) * 6
    device = Device(text[:60], text)
    rounds = list(played(device, drafter_of("device"), controller_of("device"), monkeypatch))
    costs = sum({"plain": PLAIN, "lookup": DRAFTED}.get(entry, 0.0) for entry in device.log)
    assert device.free == pytest.approx(GAP + costs), "the device has waited"
    assert sum(round.commit.accepted for round in rounds) >= 100 and len(rounds) <= 14
    drafts = [round for round in rounds if round.rows == 16]
    assert drafts and all(round.commit.tree.evidence >= 2 for round in drafts)


@pytest.mark.parametrize("name", ["chain", "best-first", "device"])
@pytest.mark.parametrize("seed", range(5))
def test_lookups_that_miss_cost_no_more_than_two_parts_in_a_hundred(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = controller_of(name)
    for _ in range(2):  # the second request knows the costs
        prompt, answer = missing(seed)
        device = Device(prompt, answer)
        rounds = list(played(device, drafter_of(name), controller, monkeypatch))
        plain = GAP + TOKENS * PLAIN
        assert device.now <= plain / 0.98, [len(round.commit.tree) for round in rounds]


def test_a_search_that_finds_nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's match is one round old: by then the sequence may have left it. The round's cost is that of its rows,
    and not what a plain one takes."""
    pattern = list(range(10)) * 4
    device = Device(pattern, pattern + list(range(50, 80)))
    controller = controller_of("device")
    rounds = list(played(device, drafter_of("device"), controller, monkeypatch))
    empty = [round for round in rounds if round.rows == 16 and len(round.commit.tree) == 1]
    assert empty and all(round.depth == 1 and round.commit.accepted == 0 for round in empty)
    assert controller.verify_cost(1) == PLAIN and controller.verify_cost(16) == pytest.approx(DRAFTED)
    kind = empty[0].commit.tree.evidence, 0
    assert kind[0] == 8 and controller.acceptance.tried[kind, 1] > controller.acceptance.accepted[kind, 1] > 0
