"""The descent that finds launch parameters of a whole pass: what it tries is sound, and it ends where nothing gains."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from benches import bench_module
from launches import CUDA, DEVICE

from pad_engine.kernels.row_tiles import OFF
from pad_engine.kernels.tuning import AttentionConfig, TileConfig

tune_pass = bench_module("tune_pass")
H100 = "nvidia-h100-80gb-hbm3"


@pytest.mark.parametrize(
    "sizes", [("135m", 1), ("135m", 16), ("1b", 16), ("8b", 64), ("8b", 1, "int8"), ("8b", 16, "fp8")]
)
def test_neighbours_are_others_and_fit(sizes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of = tune_pass.Pass(*sizes)
    monkeypatch.setattr(tune_pass.tuning, "card_name", lambda device: H100)
    state, names = tune_pass.measured(of, torch.device("cuda")), tune_pass.keys(of)
    assert state.keys() == set(of.parts) <= names.keys()
    assert names["qkv"].endswith(f"/{of.weights}") or names["qkv"] in tune_pass.tuning.table(H100)
    for part, value in state.items():
        near = list(tune_pass.near(of, part, value))
        assert near and len(set(near)) == len(near) and value not in near, part
        for one in near:
            if isinstance(one, TileConfig) and of.rows > 1:
                tile_rows, item = one.block * (2 if part == "gate_up" else 1), 2 if of.weights == "bf16" else 1
                steps = one.stages - 1 if one.lanes == 1 else 1
                held = (tile_rows * item + of.rows * 2) * one.block_k * steps * one.per_core
                assert held <= 227 * 1024 and tile_rows >= 16, (part, one)
    if sizes == ("135m", 16):
        for op in ("qkv", "gate_up", "down"):
            assert any(one.lanes > 1 for one in tune_pass.near(of, op, state[op]))


def test_a_pass_runs_with_the_parameters_of_a_trial() -> None:
    with torch.inference_mode():
        case = tune_pass.PassCase("tiny", 1, DEVICE, torch.bfloat16 if CUDA else torch.float16)
        for rows in (1, 16):
            tile = TileConfig(block=32, block_k=64)
            state = {"attention": AttentionConfig(splits=8), "out": tile, "release": OFF}
            case.queue(rows, state)()
            assert (case.passes.attention[rows].splits, case.passes.tiles["out", rows]) == (8, tile)
        assert case.passes.hidden[:16].isfinite().all() and case.passes.hidden[:16].any()


def test_descent_ends_where_no_part_alone_is_faster() -> None:
    tiles = [TileConfig(block, 64) for block in (16, 32, 64)]
    attentions = [AttentionConfig(splits) for splits in (16, 32)]
    start: dict[str, Any] = {"attention": attentions[0], "out": tiles[0], "release": 1}
    calls = []

    def time(parameters: Mapping[str, Any]) -> float:
        calls.append(dict(parameters))
        # the best of `out` depends on the attention, which is tried first
        best = 32 if parameters["attention"].splits == 32 else 64
        return 10 + (parameters["attention"].splits == 16) + (parameters["out"].block != best) + parameters["release"]

    near = {"attention": attentions[1:], "out": tiles[1:], "release": [2]}
    best, fastest = tune_pass.descend(start, near, time)
    assert best == {"attention": attentions[1], "out": tiles[1], "release": 1} and fastest == 11
    assert start["out"] == tiles[0] and {"attention": attentions[0], "out": tiles[0], "release": 1} in calls


def test_descent_takes_no_gain_that_may_be_noise() -> None:
    start = {"release": 1}
    assert tune_pass.descend(start, {"release": [2]}, lambda p: 1.0 - 0.001 * (p["release"] == 2)) == (start, 1.0)
