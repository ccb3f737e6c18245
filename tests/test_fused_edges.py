"""Fused rounds at their edges: values that are not finite, counters that grow large, and what strict mode refuses."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import DEVICE
from test_tree_attention_kernel import STRICT, Setting, chain
from tiny import make_tiny_model

from pad_engine import Engine, SamplingParams
from pad_engine.drafters.scripted import Scripted
from pad_engine.errors import NonFiniteError, RequestError
from pad_engine.loader import load_engine
from pad_engine.tree import DraftTree

# the interpreter computes what the kernel then masks
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreted kernels read weights as they are, not as the CPU's library packs them."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr("pad_engine.kernels.linear.can_pack", lambda weight: False)


def engine_of(folder: Path, drafter: Any = "none", **options: Any) -> Engine:
    model = make_tiny_model(folder / "model", "llama", **SMALL)
    options = {"dtype": "float32", "fixed_budget": True, "max_length": 64, "fused": True} | options
    return load_engine(model, drafter=drafter, device=DEVICE, **options)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("drafted", [0, 2])
def test_values_that_are_not_finite_are_an_error(tmp_path: Path, drafted: int, fused: bool) -> None:
    engine = engine_of(tmp_path, Scripted(lambda ids: [1, 2][:drafted]) if drafted else "none", fused=fused)
    engine.target.layers[0].qkv.weight[-3] = torch.nan  # a row of V
    with pytest.raises(NonFiniteError):
        engine.generate([65], SamplingParams(3, ignore_eos=True))


def test_rounds_are_counted_beyond_31_bits(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    done: list[list[int]] = []
    rounds = engine.rounds
    assert rounds is not None
    rounds.queued = 2**31 - 3
    rounds.reports.round.fill_(rounds.queued)
    rounds.reports.counter.fill_(rounds.queued)
    # in a thread of its own: it would wait for ever
    threading.Thread(
        target=lambda: done.append(engine.generate([65, 66], SamplingParams(6, ignore_eos=True)).token_ids), daemon=True
    ).start()
    for _ in range(300):
        threading.Event().wait(0.1)
        if done:
            break
    assert len(done[0]) == 6


def test_strict_attention_of_rows_behind_the_capacity() -> None:
    Setting(**STRICT | {"capacity": 64}).check(16, [chain(9)], [60])


def test_strict_mode_refuses_taps(tmp_path: Path) -> None:
    drafter = Scripted(lambda ids: [1, 2])
    drafter.taps = (0,)
    with pytest.raises(RequestError, match="taps"):
        engine_of(tmp_path, drafter, strict=True)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_strict_mode_refuses_a_drafters_branches(tmp_path: Path, logprobs: int | None) -> None:
    engine = engine_of(tmp_path, Scripted(lambda ids: DraftTree([ids[-1], 1, 2], [-1, 0, 0])), strict=True)
    with pytest.raises(RequestError, match="branches"):
        engine.generate([65, 66, 67], SamplingParams(4, ignore_eos=True, logprobs=logprobs))
