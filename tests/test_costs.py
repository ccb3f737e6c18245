"""Measured costs are found again by the next process, and whatever is wrong with their file costs nothing but them."""

import json
from pathlib import Path

import pytest
import torch
from tiny import Make, tiny_engine

from pad_engine import SamplingParams
from pad_engine.controller import Controller
from pad_engine.costs import CostFile

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAD_CACHE", str(tmp_path))
    return tmp_path


def measured(**verify: float) -> Controller:
    controller = Controller(16, 15)
    for rows, milliseconds in verify.items():
        controller.verify_cost.add(int(rows[1:]), milliseconds)
    return controller


def test_the_next_process_begins_with_them() -> None:
    before = measured(r1=10.0, r16=14.0)
    before.draft_cost.add(4, 8.0)
    before.read_cost.add(3.0)
    CostFile(CPU, ["a model"]).save(before)
    after, other = Controller(16, 15), Controller(16, 15)
    CostFile(CPU, ["a model"]).load(after)
    CostFile(CPU, ["another model"]).load(other)
    assert (after.verify_cost(1), after.verify_cost(16), after.draft_cost(3)) == (10.0, 14.0, 6.0)
    assert after.read_cost.milliseconds == 3.0 and not other.verify_cost.samples
    # so it may draft at once, and its own measurements soon outweigh the file's
    assert after.decide(0, 100).depth > 0 and other.decide(0, 100).depth == 0
    for _ in range(4):
        after.verify_cost.add(1, 5.0)
    assert after.verify_cost(1) == 5.0


def test_a_file_is_written_when_it_says_something_new(cache: Path) -> None:
    costs = CostFile(CPU, ["a model"])
    costs.save(measured(r1=10.0, r16=14.0))
    first = costs.path.read_text()
    costs.path.write_text("untouched")
    costs.save(measured(r1=10.4))
    assert costs.path.read_text() == "untouched"
    costs.save(measured(r1=20.0))
    assert json.loads(costs.path.read_text()) == json.loads(first) | {"1": 20.0}
    assert [path.name for path in costs.path.parent.iterdir()] == [costs.path.name]


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"1": "x"}', '{"0": 1.0}', '{"1": -1}', '{"one": 1}', '{"1": NaN}', "null"]
)
def test_what_makes_no_sense_is_not_used(text: str) -> None:
    costs, controller = CostFile(CPU, ["a model"]), Controller(16, 15)
    costs.path.parent.mkdir(parents=True)
    costs.path.write_text(text)
    costs.load(controller)
    assert not controller.verify_cost.samples and not controller.draft_cost.token.samples


def test_a_place_that_cannot_be_written_is_done_without(cache: Path) -> None:
    (cache / "costs").write_text("not a folder")
    costs = CostFile(CPU, ["a model"])
    costs.save(measured(r1=10.0))
    costs.load(Controller(16, 15))
    assert (cache / "costs").read_text() == "not a folder"


def test_an_engine_keeps_its_costs(make_model: Make) -> None:
    folder, params = make_model("llama"), SamplingParams(12, ignore_eos=True)
    first, second = (tiny_engine(folder, "ngram", controller=True) for _ in range(2))
    first.costs = CostFile(CPU, ["tiny"])
    expected = first.generate([1, 2, 3, 1, 2, 3], params).token_ids
    CostFile(CPU, ["tiny"]).load(second.controller)
    assert second.controller.verify_cost(1) == first.controller.verify_cost(1) > 0
    assert second.generate([1, 2, 3, 1, 2, 3], params).token_ids == expected
