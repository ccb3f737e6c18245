"""The comparison of quantised weights: what its figures mean, on logits of which they are known."""

import math

import pytest
import torch
from benches import bench_module
from tiny import CPU, Make, some_ids

from pad_engine.kernels.quantise import QUANTISED
from pad_engine.models.config import ModelConfig
from pad_engine.models.loader import load_decoder

quantised = bench_module("quantised")


def test_windows_take_a_text_once_and_leave_out_what_predicts_nothing() -> None:
    assert quantised.windows_of(list(range(20)), 4, 9) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert quantised.windows_of(list(range(6)), 4, 100) == [[0, 1, 2, 3], [4, 5]]


def test_errors_of_logits_by_hand() -> None:
    """Probabilities 1/2, 1/2 against 1/4, 3/4, and a row that only moved by a constant, which a softmax forgets."""
    exact, other = torch.zeros(2, 2), torch.tensor([[0.0, math.log(3.0)], [2.0, 2.0]])
    errors = quantised.Errors()
    errors.add(exact[:1], other[:1])
    errors.add(exact[1:], other[1:])
    divergence = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    found = errors.means()
    assert found["mean_kl_nats"] == pytest.approx(divergence / 2, abs=1e-6)
    assert found["max_abs_error"] == 2.0 and found["top1_agreement"] == 0.5
    assert found["mean_abs_error"] == pytest.approx((math.log(3.0) / 2 + 2.0) / 2, abs=1e-5)


def test_a_model_is_compared_with_itself_and_with_its_quantised_weights(make_model: Make) -> None:
    folder = make_model()
    config = ModelConfig.from_folder(folder)
    kinds = {"auto": None, "int8": QUANTISED["int8"], "fp8": None}
    decoders = {
        kind: load_decoder(folder, config, 32, CPU, torch.float32, quantised=dtype) for kind, dtype in kinds.items()
    }
    with torch.inference_mode():
        stored, int8, same = quantised.compare(decoders, [some_ids(20), some_ids(9, 1)], 300)
    assert same["mean_kl_nats"] == same["max_abs_error"] == 0.0 and same["top1_agreement"] == 1.0
    assert same["perplexity"] == stored["perplexity"] > 1.0 and "mean_kl_nats" not in stored
    assert 0.0 < int8["mean_kl_nats"] < 0.1 < int8["top1_agreement"]
    assert int8["weight_mb"] < stored["weight_mb"]


@pytest.mark.parametrize("weights", ["auto", "int8", "fp8"])
def test_the_limit_counts_what_a_step_reads(weights: str) -> None:
    """All matrices as they lie in memory, with a scale for each row of one that is quantised."""
    shapes = bench_module("shapes")
    decoder = shapes.random_decoder("tiny", CPU, torch.float32, 32, weights=weights)
    layers = [part for layer in decoder.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    held = 0
    for linear in [*layers, decoder.lm_head]:
        dense = linear.weight.to_dense() if linear.packed else linear.weight
        held += dense.numel() * dense.dtype.itemsize
        held += 0 if linear.scale is None else linear.scale.numel() * 4
    assert shapes.streamed_bytes(decoder, decoder.config.vocab_size) == held
