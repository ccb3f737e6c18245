"""Weights of one byte: what quantising keeps and loses, and that engines on them are right about the same weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launches import DEVICE, bits
from safetensors.torch import load_file, save_file
from tiny import CPU, FAMILY, Make, make_tiny_model, sequential, some_ids, tiny_engine
from torch import Tensor

from pad_engine import SamplingParams
from pad_engine.errors import ModelError, RequestError
from pad_engine.kernels import tuning
from pad_engine.kernels.linear import Linear, linear_ref
from pad_engine.kernels.quantise import LARGEST, QUANTISED, ROWS, dequantise, quantise
from pad_engine.loader import load_engine, make_engine
from pad_engine.models.config import ModelConfig
from pad_engine.models.decoder import Decoder
from pad_engine.models.fused import unsupported
from pad_engine.models.loader import load_decoder, load_model, memory_need
from pad_engine.models.quantise import quantised_linear
from pad_engine.models.widen import widen
from pad_engine.serving.options import EngineOptions

PROMPT = some_ids(5) * 4
KINDS = list(QUANTISED)
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
kinds = pytest.mark.parametrize("kind", KINDS)


def decoder_of(folder: Path, kind: str) -> Decoder:
    return load_decoder(folder, ModelConfig.from_folder(folder), 64, CPU, torch.float32, quantised=QUANTISED[kind])


def exact_rows(kind: str) -> Tensor:
    """Every number of the type but NaN, in two rows of other scales; the largest one is in each."""
    every = torch.arange(-127, 128) if kind == "int8" else torch.arange(256, dtype=torch.uint8).view(QUANTISED[kind])
    values = every.float()
    values = values[values.isfinite()]
    return torch.stack([values * 2.0**-7, values.flip(0) * 2.0**5])


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_that_the_type_can_hold_are_kept(kind: str, dtype: torch.dtype) -> None:
    rows = exact_rows(kind)
    quantised, scale = quantise(rows.to(dtype), QUANTISED[kind])
    assert quantised.dtype == QUANTISED[kind] and scale.tolist() == [2.0**-7, 2.0**5]
    assert torch.equal(quantised.float() * scale[:, None], rows)
    for wide in (torch.float32, torch.bfloat16, torch.float16):
        kept = dequantise(quantised, scale, wide)
        assert kept.dtype == wide and torch.equal(kept.float(), rows)


@kinds
def test_the_error_has_a_bound(kind: str) -> None:
    weight = torch.randn(40, 300) * torch.logspace(-6, 3, 40)[:, None]
    quantised, scale = quantise(weight, QUANTISED[kind])
    error = (dequantise(quantised, scale, torch.float32) - weight).abs()
    step = scale[:, None].expand_as(weight)
    if kind == "fp8":
        # three bits behind the first one, down to 2^-6; below, steps of 2^-9
        step = torch.maximum(weight.abs() * 2.0**-3, step * 2.0**-9)
    assert bool((error <= step / 2 * (1 + 1e-5)).all())
    assert quantised.float().abs().amax(1).tolist() == [LARGEST[QUANTISED[kind]]] * 40


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("int8", [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0], [127.0, 0.0, 2.0, 2.0, 0.0, -2.0, -127.0]),
        ("fp8", [448.0, 1 + 1 / 16, 1 + 3 / 16, -1 - 5 / 16, 2.0**-10], [448.0, 1.0, 1.25, -1.25, 0.0]),
    ],
)
def test_ties_go_to_the_even_number(kind: str, values: list[float], expected: list[float]) -> None:
    quantised, scale = quantise(torch.tensor([values]), QUANTISED[kind])
    assert scale.tolist() == [1.0] and quantised.float().tolist() == [expected]


@kinds
def test_rows_of_nothing_have_scale_one(kind: str) -> None:
    weight = torch.tensor([[0.0, -0.0, 0.0], [1e-40, -3e-39, 0.0], [5.0, -2.5, 0.0]])
    quantised, scale = quantise(weight, QUANTISED[kind])
    assert scale[:2].tolist() == [1.0, 1.0] and not quantised[:2].float().any()
    assert scale[2] == 5.0 / LARGEST[QUANTISED[kind]]


@kinds
def test_rows_are_quantised_each_by_itself(kind: str) -> None:
    """Also in a matrix that is taken in several parts."""
    weight = torch.randn(2 * ROWS + 1, 3)
    quantised, scale = quantise(weight, QUANTISED[kind])
    for row in (0, ROWS - 1, ROWS, 2 * ROWS):
        own, own_scale = quantise(weight[row : row + 1], QUANTISED[kind])
        assert torch.equal(bits(own[0]), bits(quantised[row])) and own_scale[0] == scale[row]


@kinds
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_named(kind: str, bad: float) -> None:
    weight = torch.ones(3, 4)
    weight[1, 2] = bad
    with pytest.raises(ModelError, match=r"x\.weight cannot be quantised.*not finite"):
        quantised_linear([("a.weight", torch.ones(2, 4)), ("x.weight", weight)], None, QUANTISED[kind])


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_product_on_a_cpu(kind: str, dtype: torch.dtype) -> None:
    x, bias = torch.randn(3, 37).to(dtype), torch.randn(21).to(dtype)
    weight, scale = quantise(torch.randn(21, 37), QUANTISED[kind])
    out = Linear(weight, bias, scale)(x)
    bound = 1e-5 if dtype == torch.float32 else 0.1
    assert out.dtype == dtype and (out.float() - linear_ref(x, weight, bias, scale)).abs().max() < bound


def allocated(decoder: Decoder) -> int:
    """Bytes of a quantised decoder's weights."""
    tensors = [decoder.embedding, decoder.final_norm]
    for part in [decoder.lm_head, *(value for layer in decoder.layers for value in vars(layer).values())]:
        tensors += [part.weight, part.scale, part.bias] if isinstance(part, Linear) else [part]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


@kinds
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILY)
def test_the_memory_estimate_is_what_is_allocated(make_model: Make, family: str, tied: bool, kind: str) -> None:
    decoder = decoder_of(make_model(family, tie_word_embeddings=tied), kind)
    sizes = {dtype: memory_need(decoder.config, 64, CPU, torch.float32, dtype) for dtype in (None, QUANTISED[kind])}
    assert sizes[QUANTISED[kind]].weights == allocated(decoder) < 0.6 * sizes[None].weights
    assert decoder.lm_head.weight.dtype == decoder.layers[1].down.weight.dtype == QUANTISED[kind]
    assert decoder.embedding.dtype == decoder.layers[0].mlp_norm.dtype == torch.float32
    # beside it, one matrix written out: the LM head's
    assert sizes[QUANTISED[kind]].scratch - sizes[None].scratch == 300 * 48 * 4


@kinds
def test_a_quantised_model_is_the_model_of_the_weights_that_it_stands_for(make_model: Make, kind: str) -> None:
    folder = make_model("qwen2", tie_word_embeddings=False)
    stored = load_file(folder / "model.safetensors")
    rounded = {
        name: dequantise(*quantise(weight, QUANTISED[kind]), torch.float32)
        if name.endswith(("_proj.weight", "lm_head.weight"))
        else weight
        for name, weight in stored.items()
    }
    config = ModelConfig.from_folder(folder)
    own, other, quantised = (
        sequential(decoder, PROMPT)
        for decoder in (
            Decoder(config, stored.__getitem__, 64),
            Decoder(config, rounded.__getitem__, 64),
            decoder_of(folder, kind),
        )
    )
    torch.testing.assert_close(quantised, other, atol=1e-4, rtol=0)
    assert 1e-2 < (quantised - own).abs().max() < 2.0


@kinds
@pytest.mark.parametrize("options", [{"drafter": "ngram:min=1"}, {"draft_model": "self:layers=0,1"}], ids=str)
def test_speculation_equals_plain_decoding_with_the_same_weights(
    make_model: Make, kind: str, options: dict[str, Any]
) -> None:
    loaded = load_model(make_model("qwen2"), device="cpu", weights=kind, max_length=128)
    for params in (SamplingParams(40, ignore_eos=True), SamplingParams(40, 0.8, 3, ignore_eos=True)):
        expected = make_engine(loaded, drafter="none").generate(PROMPT, params)
        out = make_engine(loaded, trees="best-first", budget=6, fixed_budget=True, **options).generate(PROMPT, params)
        assert out.token_ids == expected.token_ids and out.stats.draft_tokens > 0


@pytest.mark.parametrize(("weights", "draft_weights"), [("auto", "int8"), ("int8", "auto"), ("int8", "fp8")])
def test_target_and_draft_model_choose_apart(make_model: Make, weights: str, draft_weights: str) -> None:
    folder, params = make_model("llama"), SamplingParams(20, ignore_eos=True)
    options = {"weights": weights, "draft_model": folder, "draft_weights": draft_weights}
    engine = tiny_engine(folder, "draft-model", budget=5, **options)
    assert engine.target.quantised == QUANTISED.get(weights)
    assert engine.drafter.decoder.quantised == QUANTISED.get(draft_weights)  # type: ignore[attr-defined]
    out = engine.generate(PROMPT, params)
    assert out.token_ids == tiny_engine(folder, weights=weights).generate(PROMPT, params).token_ids
    assert out.stats.accepted_tokens > 0


# short windows, which take the interpreter the least time
@pytest.mark.parametrize(("family", "kind"), [("mistral", "fp8"), ("gemma3_text", "int8")])
def test_a_fused_engine_answers_like_the_eager_one(make_model: Make, family: str, kind: str) -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3_text" else {}
    folder = make_model(family, **SMALL | layers)
    options = {"dtype": "float32", "device": DEVICE, "weights": kind, "max_length": 40, "fixed_budget": True}
    eager = load_engine(folder, drafter="none", fused=False, **options)
    fused = load_engine(folder, draft_model="self:layers=0", trees="best-first", budget=6, fused=True, **options)
    for params in (SamplingParams(4, ignore_eos=True), SamplingParams(4, 0.8, 3, ignore_eos=True)):
        assert fused.generate(PROMPT, params).token_ids == eager.generate(PROMPT, params).token_ids
    assert fused.rounds is not None and fused.rounds.queued > 0


@kinds
def test_a_widened_model_has_the_same_quantised_function(make_model: Make, kind: str) -> None:
    decoder = decoder_of(make_model("qwen2"), kind)
    sizes = {"hidden_size": 121, "intermediate_size": 150, "num_layers": 4, "num_heads": 15, "num_kv_heads": 3}
    shape = ModelConfig(**{**vars(decoder.config), **sizes, "vocab_size": 512})
    wide = widen(decoder, shape)
    assert wide.quantised == QUANTISED[kind] == wide.layers[3].qkv.weight.dtype
    expected, logits = sequential(decoder, PROMPT), sequential(wide, PROMPT)
    torch.testing.assert_close(logits[:, :300], expected, atol=1e-4, rtol=0)
    assert bool((logits[:, 300:] < -1e6).all())
    # kernels read four bytes at a time
    assert unsupported(decoder) is None and "whole words" in str(unsupported(wide))


SELF = {"drafter": "draft-model", "draft_model": "self:drop=1"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"weights": "int4"}, r"weights must be auto or one of int8, fp8, got 'int4'"),
        ({"draft_weights": "int8"}, "draft_weights int8 is given, but no draft_model"),
        (SELF | {"draft_weights": "int7"}, "got 'int7'"),
        (SELF | {"draft_weights": "int8"}, r"draft_weights int8: draft_model self:drop=1 shares .* which are auto"),
        (SELF | {"weights": "int8", "draft_weights": "fp8"}, r"draft_weights fp8: .* which are int8"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(make_model: Make, options: dict[str, Any], named: str) -> None:
    """In Python, and on the command line before anything is fetched."""
    with pytest.raises(RequestError, match=named):
        tiny_engine(make_model("llama"), **options)
    own = {"drafter": None, "draft_model": None} | options
    chosen = EngineOptions(
        model="no-such-model", trees="chain", rule="auto", budget=4, adapters=[], device="cpu", dtype="auto",
        max_length=None, accept_terms=False, **own,
    )  # fmt: skip
    with pytest.raises(RequestError, match=named):
        chosen.check(SamplingParams(1))


def test_a_self_draft_may_name_the_weights_that_it_has(make_model: Make) -> None:
    engine = tiny_engine(make_model("llama"), weights="int8", draft_weights="int8", **SELF)
    assert engine.drafter.decoder.layers[0] is engine.target.layers[0]  # type: ignore[attr-defined]


def test_a_broken_checkpoint_names_its_tensor(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        decoder_of(folder, "int8")


def test_launch_parameters_are_those_of_the_weights_type(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = {"block": 2, "block_k": 512}
    monkeypatch.setattr(tuning, "card_name", lambda device: "card")
    monkeypatch.setattr(tuning, "table", lambda card: {"qkv/1/64x4096/int8": tuned})
    cuda = torch.device("cuda")
    assert tuning.tile_config("qkv", 1, 64, 4096, cuda, torch.int8) == tuning.TileConfig(**tuned)
    for dtype in (torch.bfloat16, QUANTISED["fp8"]):
        config = tuning.tile_config("qkv", 1, 64, 4096, cuda, dtype)
        assert config.block_k == (2048 if dtype.itemsize == 1 else 1024), "as many bytes of a row"


def test_launch_parameters_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were measured, for weights of two bytes; 32 rows take those of 64 where they have none."""
    tuned = {"block": 32, "block_k": 256, "stages": 6}
    attention = {"splits": 8, "chunk": 256}
    parameters = {"qkv/64/96x4096": tuned, "attention/64/4x2x64": attention, "pass/64/4096": {"release": 2}}
    monkeypatch.setattr(tuning, "card_name", lambda device: "card")
    monkeypatch.setattr(tuning, "table", lambda card: parameters)
    cuda, half = torch.device("cuda"), torch.float16
    for rows in (32, 64):
        assert tuning.tile_config("qkv", rows, 96, 4096, cuda, half) == tuning.TileConfig(**tuned)
        assert tuning.attention_config(rows, 4, 2, 64, cuda) == tuning.AttentionConfig(**attention)
        assert tuning.release_mode(rows, 4096, cuda) == 2
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    long = {"splits": 32, "chunk": 128}
    parameters["attention/64/4x2x64/long"] = long
    capacities = (tuning.LONG_CONTEXT, tuning.LONG_CONTEXT + 1)
    assert [tuning.attention_config(32, 4, 2, 64, cuda, capacity=room).splits for room in capacities] == [8, 32]
    fp32 = tuning.attention_config(64, 4, 2, 64, cuda, itemsize=4)
    assert (fp32.splits, fp32.block_s, fp32.warps, fp32.block_m) == (64, 32, 8, 32), "what was measured is of two bytes"
    wide = [tuning.attention_config(16, 4, 1, width, cuda) for width in (128, 256)]
    assert [(config.block_s, config.block_m) for config in wide] == [(64, 64), (32, 32)]
    assert tuning.tile_config("qkv", 16, 96, 4096, cuda, half) == tuning.default_config("qkv", 16, 96, 4096)
    assert tuning.tile_config("qkv", 64, 96, 4096, cuda, torch.float32).block_k == 64, "they would not fit"


def test_cards_of_one_chip_share_a_table() -> None:
    measured = tuning.table("nvidia-h100-80gb-hbm3")
    assert measured and tuning.table("nvidia-gh200-480gb") == measured and tuning.table("nvidia-a100-sxm4-80gb") == {}
    assert tuning.table("nvidia-h200").keys() >= measured.keys()  # that has a table of its own
