"""`pad bench`: its table, its JSON, and what it refuses."""

import json
from pathlib import Path

import pytest
from tiny import Make
from typer.testing import CliRunner, Result

from pad_engine.config import SamplingParams
from pad_engine.costs import CostFile
from pad_engine.drafters.none import NoDrafter
from pad_engine.loader import load_engine
from pad_engine.serving.bench import PROMPTS, measure
from pad_engine.serving.bench_rounds import Sums, drafting, queued
from pad_engine.serving.cli import app
from pad_engine.serving.generate import WARM_UP_TOKENS
from pad_engine.tree import DraftTree


@pytest.fixture(scope="module")
def folder(make_model: Make) -> Path:
    return make_model("llama")


def bench(folder: Path, *arguments: str) -> Result:
    options = ["bench", "--model", str(folder), "--device", "cpu", "--tokens", "12", "--budgets", "1,4", *arguments]
    return CliRunner().invoke(app, options)


def test_json_has_a_row_for_each_prompt_and_for_all(folder: Path) -> None:
    result = bench(folder, "--json", "--drafter", "ngram:min=1")
    assert result.exit_code == 0, result.output
    out = json.loads(result.stdout)
    assert [row["prompt"] for row in out["prompts"]] == list(PROMPTS) and out["all"]["prompt"] == "all"
    assert (out["model"], out["drafter"], out["tokens"]) == (str(folder), "ngram:min=1", 12)
    assert (out["device"], out["dtype"], out["machine"]["python"][:2]) == ("cpu", "float32", "3.")
    for row in [*out["prompts"], out["all"]]:
        assert row["same_tokens"] is True
        assert 0 < row["prefill_ms"] < row["first_token_ms"]
        assert row["plain_step_ms"] == pytest.approx(1000 / row["plain_tokens_per_second"])
        assert row["over_plain"] == pytest.approx(row["tokens_per_second"] / row["plain_tokens_per_second"])
        assert row["tokens_per_round"] >= 1 and row["mean_accept_length"] >= 0
    assert out["all"]["rounds"] == sum(row["rounds"] for row in out["prompts"])
    # what does not fit beside the new tokens is left out
    assert max(row["prompt_tokens"] for row in out["prompts"]) == 256 - 12
    assert not result.stderr
    assert [(row["temperature"], row["budget"]) for row in out["rounds"]] == [(0, 1), (0, 4), (1, 1), (1, 4)]
    for row in out["rounds"]:
        assert row["round_ms"] * row["rounds"] == pytest.approx(1000 * 12 * len(PROMPTS) / row["tokens_per_second"])
        assert row["draft_ms"] + row["verify_ms"] == pytest.approx(row["round_ms"] * (1 - row["host_share"]), rel=0.02)
        assert row["rounds"] * row["tokens_per_round"] == pytest.approx(12 * len(PROMPTS))
        assert (row["drafted_per_round"] == 0) == (row["budget"] == 1) and row["drafted_per_round"] <= 3
    assert [row["over_plain"] for row in out["rounds"] if row["budget"] == 1] == [1, 1]


def test_a_table_is_shown(folder: Path) -> None:
    result = bench(folder, "--temperature", "0.8", "--draft-model", "self:drop=1")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert lines[0][-5:] == ["drafter", "draft-model,", "float32", "on", "cpu"]
    shown = {words[0]: words for words in lines if words[0] in {*PROMPTS, "all"}}
    assert shown.keys() == {*PROMPTS, "all"} and all(words[-1] == "yes" for words in shown.values())
    second = lines[lines.index(["every", "round", "with", "the", "whole", "budget"]) + 3 :]
    assert [words[:2] for words in second] == [["0", "1"], ["0", "4"], ["1", "1"], ["1", "4"]]
    assert all(words[-1].endswith("%") for words in second)
    assert result.stderr.startswith("memory: ")


def test_a_budget_sets_the_depth_unless_the_drafter_does(folder: Path) -> None:
    for spec, depths in (("ngram", [0, 31]), ("ngram:depth=5", [0, 5])):
        engine = load_engine(folder, drafter=spec, device="cpu", budget=8)
        engine.costs = CostFile(engine.target.device, ["test"])
        own = engine.drafter, engine.controller, engine.costs
        for budget, depth in zip((1, 32), depths, strict=True):
            with drafting(engine, budget):
                plan = engine.controller.decide(0, 100)
                assert (plan.depth, engine.controller.max_budget) == (depth, budget)
                assert (engine.drafter is own[0]) == (budget > 1) and engine.costs is None
        assert (engine.drafter, engine.controller, engine.costs) == own


class Queue:
    """In place of captured rounds: what is queued."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def begin(self, seq: int, ids: list[int], *rest: object) -> None:
        self.calls.append(("begin", ids))

    def queue_plain(self) -> int:
        self.calls.append("plain")
        return 0

    def queue_tree(self, trees: list[DraftTree]) -> int:
        self.calls.append([len(tree) for tree in trees])
        return 0

    def queue(self, kind: object, nodes: int) -> int:
        self.calls.append((kind, nodes))
        return 0


def test_the_card_is_timed_over_the_rounds_that_were_played(folder: Path) -> None:
    engine = load_engine(folder, device="cpu", drafter="ngram")
    for drafter, nodes, expected in (
        (engine.drafter, 3, [[3], ("tree", 3), ("tree", 3)]),
        (engine.drafter, 1, ["plain", "plain"]),
        (NoDrafter(), 1, ["plain", "plain"]),
    ):
        rounds = Queue()
        vars(engine).update(rounds=rounds, drafter=drafter)
        queue = queued(engine, [5, 6], nodes, 1.0)
        queue()
        queue()
        assert rounds.calls == [("begin", [5, 6]), *expected]


def test_the_host_has_what_is_left() -> None:
    sums = Sums(decode_ms=10.0, draft_ms=2.0, verify_ms=7.0, tokens=20, rounds=4)
    assert sums.row(0.0, 4)["host_share"] == pytest.approx(0.1)
    sums.card_ms = 9.5
    assert sums.row(0.0, 4)["host_share"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tokens", "255"), "255 new tokens and a prompt do not fit a context of 256"),
        (("--temperature", "-1"), "temperature"),
        (("--drafter", "oracle"), "drafter must be"),
        (("--drafter", "draft-model"), "needs a draft_model"),
        (("--device", "tpu"), "device"),
        (("--max-length", "9999"), "max_length must be in [2, 256]"),
        (("--budgets", "4,65"), "--budgets must be in [1, 64], got '4,65'"),
        (("--temperatures", "0,x"), "--temperatures must be numbers"),
        (("--temperatures", "nan"), "--temperatures must be in [0, 1000"),
    ],
)
def test_bad_options_are_bad_usage(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    result = bench(folder, "--json", *arguments)
    assert result.exit_code == 2 and words in result.stderr and not result.stdout


def test_what_an_engine_pays_once_is_not_in_a_timed_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls = load_engine(folder, device="cpu"), []
    generate = engine.generate
    monkeypatch.setattr(engine, "warm_up", lambda ids: calls.append(("warm up", ids)))

    def recorded(ids: list[int], params: SamplingParams) -> object:
        calls.append((params.max_tokens, ids))
        return generate(ids, params)

    monkeypatch.setattr(engine, "generate", recorded)
    prompts = [[3 + number, 4, 5] for number in range(len(PROMPTS))]
    measure(engine, prompts, SamplingParams(20, ignore_eos=True))
    each = [(tokens, ids) for ids in prompts for tokens in (WARM_UP_TOKENS, 20)]
    assert calls == [("warm up", prompts[0]), *each, *each]
