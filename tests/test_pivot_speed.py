"""bench/pivot_speed.py: the widened pair accepts by its widened classifier what the pair itself does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import bench_module
from test_forest import pair_of
from tiny import Make, random_classifier, some_ids

from pad_engine import SamplingParams
from pad_engine.forest import Pair, decode_forest
from pad_engine.forest_request import ForestRequest
from pad_engine.rules.classifier import PIVOT_MLP, load_classifier
from pad_engine.rules.select import make_rule

bench = bench_module("pivot_speed")


@pytest.fixture
def pairs(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[Pair, Pair]:
    narrow = pair_of(make_model)
    config = narrow.target.decoder.config
    larger = replace(config, hidden_size=96, intermediate_size=130, num_layers=1, head_dim=24, vocab_size=333)
    monkeypatch.setattr(bench, "shape_config", lambda name, length: larger)
    return narrow, bench.widened(narrow, ["8b", "1b"])


def answers(pair: Pair, rule: Any) -> list[tuple[list[int], int, int]]:
    requests = [ForestRequest(some_ids(9, i), SamplingParams(20, ignore_eos=True), i) for i in range(6)]
    found = sorted(decode_forest(pair, requests, rule=rule, depth=4, batch=6), key=lambda answer: answer.key)
    return [(answer.token_ids, answer.accepted_tokens, len(answer.overrides)) for answer in found]


def test_the_wide_pair_judges_like_the_narrow_one(pairs: tuple[Pair, Pair], tmp_path: Path) -> None:
    narrow, wide = pairs
    hidden = wide.target.decoder.config.hidden_size
    path = random_classifier(tmp_path, PIVOT_MLP, narrow.target.decoder.config.hidden_size, 1)
    folder = tmp_path / "wide"
    folder.mkdir()
    wider = bench.wide_classifier(path, hidden, folder)
    assert hidden == 96 and load_classifier(wider, PIVOT_MLP).hidden_size == 96
    found = [
        answers(pair, make_rule(bench.with_classifier("pivot:sigma=0.5,floor=0", file), 300))
        for pair, file in zip(pairs, (path, wider), strict=True)
    ]
    assert found[0] == found[1] and sum(overrides for _, _, overrides in found[0]) > 6


def test_every_rule_is_measured_over_plain_decoding(pairs: tuple[Pair, Pair], tmp_path: Path) -> None:
    path = random_classifier(tmp_path, PIVOT_MLP, pairs[0].target.decoder.config.hidden_size, 1)
    requests = [ForestRequest(some_ids(9, 1), SamplingParams(12, ignore_eos=True), 0)]
    with torch.inference_mode():
        found = bench.measure(pairs[0], requests, ["pivot:sigma=0.9,floor=0", "margin:form=gap,m=0.5"], path, 3)
    assert list(found) == ["target", "greedy", "pivot:sigma=0.9,floor=0", "margin:form=gap,m=0.5"]
    assert found["target"]["over_plain"] == 1.0 and found["target"]["tokens_per_round"] == 1.0
    assert found["pivot:sigma=0.9,floor=0"]["over_plain"] > 0.0
    assert "every_round" not in found["target"]
    found |= {f"{rule}, always": one["every_round"] for rule, one in found.items() if rule != "target"}
    assert found["pivot:sigma=0.9,floor=0, always"]["tokens_per_round"] > 1.0
    for one in found.values():
        assert one["ms_per_round"] * one["tokens_per_second"] == pytest.approx(1000 * one["tokens_per_round"])
