"""A widened model computes what the model does: its logits, its answers, and never an id that it does not have."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import DEVICE
from test_decoder import LLAMA3, YARN
from test_real_model import CLOSE, PROMPTS
from tiny import Make, read, sequential, some_ids, tiny_decoder

from pad_engine import SamplingParams
from pad_engine.errors import ModelError
from pad_engine.loader import make_engine
from pad_engine.models.decoder import Decoder
from pad_engine.models.loader import LoadedModel, load_model
from pad_engine.models.rope import RopeConfig
from pad_engine.models.widen import TINY, widen
from pad_engine.models.widen_places import rotary_pairs
from pad_engine.prompt import encode

TOLERANCE = 1e-4
PROMPT = some_ids(20)
# each: sizes beyond those of the tiny models (width 48, 4 heads, 2 key heads of 12 or 16, inner 96, 3 layers, 300 ids)
SHAPES: dict[str, dict[str, int]] = {
    "same": {},
    "hidden": {"hidden_size": 49},
    "inner": {"intermediate_size": 131},
    "layers": {"num_layers": 5},
    "heads": {"num_heads": 10, "num_kv_heads": 2},
    "kv-heads": {"num_heads": 10, "num_kv_heads": 5},
    "smaller-groups": {"num_heads": 5, "num_kv_heads": 5},
    "smaller-odd-groups": {"num_heads": 18, "num_kv_heads": 18, "hidden_size": 100},
    "vocabulary": {"vocab_size": 333, "hidden_size": 60},
    "all": {
        "hidden_size": 121,
        "intermediate_size": 150,
        "num_layers": 4,
        "num_heads": 15,
        "num_kv_heads": 3,
        "vocab_size": 512,
    },
}


def check(decoder: Decoder, wide: Decoder, count: int = 40) -> None:
    """Equal logits of a prompt in two chunks and of single steps."""
    ids, own = some_ids(count), decoder.config.vocab_size
    expected = read(decoder, decoder.new_cache(capacity=count, scratch=32), ids, chunk=25)
    prefill = read(wide, wide.new_cache(capacity=count, scratch=32), ids, chunk=25)
    # a flat row would pass whatever the weights were
    assert expected.std(-1).min() > 0.2
    for logits in (prefill, sequential(wide, ids)):
        assert logits.shape[1] == wide.config.vocab_size
        torch.testing.assert_close(logits[:, :own], expected, atol=TOLERANCE, rtol=0)
        assert (logits[:, own:] < -1e6).all()


def shape_of(decoder: Decoder, head_factor: int = 1, **sizes: Any) -> Any:
    return replace(decoder.config, head_dim=head_factor * decoder.config.head_dim, **sizes)


@pytest.mark.parametrize("head_factor", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(make_model: Make, shape: str, head_factor: int) -> None:
    decoder = tiny_decoder(make_model())
    check(decoder, widen(decoder, shape_of(decoder, head_factor, **SHAPES[shape])))


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral-window": ("mistral", {}),
    "qwen2-biases-windows": ("qwen2", {}),
    "qwen3-norms": ("qwen3", {}),
    "qwen3-norms-large-eps": ("qwen3", {"rms_norm_eps": 0.1}),
    "all-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "large-eps": ("llama", {"rms_norm_eps": 0.1}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "one-key-head": ("llama", {"num_key_value_heads": 1}),
    "groups-of-three": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama3": ("llama", {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_families(make_model: Make, variant: str) -> None:
    family, overrides = VARIANTS[variant]
    decoder = tiny_decoder(make_model(family, **overrides))
    sizes = SHAPES["all"] | {"num_heads": 24, "num_kv_heads": 6}
    for tie in {False, decoder.config.tie_word_embeddings}:
        check(decoder, widen(decoder, shape_of(decoder, 2, **sizes, tie_word_embeddings=tie)))


def test_self_draft_of_fewer_layers(make_model: Make) -> None:
    """Layers are numbered anew, and keep the window that they had."""
    decoder = tiny_decoder(make_model("qwen2", max_window_layers=1))
    draft = decoder.with_layers([0, 2])
    wide = widen(draft, shape_of(decoder, 2, **SHAPES["all"] | {"num_layers": 3, "num_heads": 16, "num_kv_heads": 2}))
    assert (len(wide.layers), wide.config.windows) == (3, (None, 8, 8))
    check(draft, wide)


def test_quiet_places_stay_quiet_and_nothing_is_zero(make_model: Make) -> None:
    decoder = tiny_decoder(make_model(tie_word_embeddings=True))
    wide = widen(decoder, shape_of(decoder, 2, **SHAPES["all"]))
    cache = wide.new_cache(capacity=32, scratch=32)
    read(wide, cache, PROMPT)
    (buffer,) = cache.buffers.values()
    read_slots = buffer[:, :, :, :, 32 : 32 + len(PROMPT)].abs()
    assert read_slots[:3, :, :, :2].max() > 0.1, "those of the model"
    assert 0 < read_slots[:, :, :, 2].max() < 2.0**-60 and read_slots[3].max() < 2.0**-60, "those without an original"
    for layer in wide.layers:
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
            weight = linear.weight.to_dense() if linear.packed else linear.weight
            smallest = weight.abs().min()
            assert smallest == TINY, "no zeros, no denormals"
            # even here, where 40% of the dimensions are real
            assert (weight.abs() == TINY).float().mean() < (1.0 if layer.index == 3 else 0.6)


def test_free_weights_do_not_matter(make_model: Make) -> None:
    decoder = tiny_decoder(make_model())
    first, second = (widen(decoder, shape_of(decoder, 2, **SHAPES["all"]), seed=seed) for seed in (0, 1))
    assert not torch.equal(first.embedding, second.embedding)
    torch.testing.assert_close(sequential(first, PROMPT), sequential(second, PROMPT), atol=1e-5, rtol=0)


def test_bfloat16(make_model: Make) -> None:
    """What bf16 loses is that of the model itself, and the masks hold."""
    folder = make_model()
    exact, decoder = sequential(tiny_decoder(folder), PROMPT), tiny_decoder(folder, torch.bfloat16)
    wide = widen(decoder, shape_of(decoder, 2, **SHAPES["all"]))
    logits, own = sequential(wide, PROMPT), sequential(decoder, PROMPT)
    error, own_error = ((x[:, :300] - exact).square().mean().sqrt() for x in (logits, own))
    assert wide.dtype == torch.bfloat16 and error < 1.5 * own_error
    assert (logits[:, 300:] < -1e6).all()


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_engine_gives_the_same_ids(make_model: Make, temperature: float) -> None:
    """Through the engine, whose LM head reads all ids of the shape; the model's own last ten are padding too."""
    loaded = load_model(make_model(tokens=290), device="cpu", max_length=64)
    sizes = {"hidden_size": 64, "num_layers": 4, "num_heads": 8, "num_kv_heads": 2, "vocab_size": 512}
    wide = widen(loaded, shape_of(loaded.decoder, 2, **sizes))
    assert (loaded.num_tokens, wide.num_tokens) == (290, 512)
    params = SamplingParams(30, temperature=temperature, seed=3)
    for options in ({"drafter": "none"}, {"drafter": "ngram:min=1"}, {"draft_model": "self:layers=0,1"}):
        own, out = (make_engine(m, fixed_budget=True, **options).generate(PROMPT, params) for m in (loaded, wide))
        assert out.token_ids == own.token_ids and max(out.token_ids) < 290, options
        assert out.stats.accepted_tokens == own.stats.accepted_tokens


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_mask_the_vocabulary(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above through the kernels' LM head, whose running statistics must survive the masks."""
    # the kernels read weights as they are, not as a CPU's library packs them
    monkeypatch.setattr("pad_engine.kernels.linear.can_pack", lambda weight: False)
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    loaded = load_model(make_model(tokens=290, **small), device=DEVICE, dtype="float32", max_length=64)
    wide = widen(loaded, replace(loaded.decoder.config, hidden_size=64, num_heads=4, num_kv_heads=2, vocab_size=448))
    params = SamplingParams(4, temperature=1.5, seed=3)
    own = make_engine(loaded, drafter="none", fused=False).generate(PROMPT, params)
    out = make_engine(wide, drafter="ngram:min=1", budget=4, fixed_budget=True, fused=True).generate(PROMPT, params)
    assert out.token_ids == own.token_ids and max(out.token_ids) < 290


def test_padding_of_the_model_stays_where_the_vocabulary_does(make_model: Make) -> None:
    loaded = load_model(make_model(tokens=290), device="cpu", max_length=64)
    assert widen(loaded, shape_of(loaded.decoder, hidden_size=64)).num_tokens == 290


def test_rotary_pairs() -> None:
    for kind, params in (("default", {}), ("linear", {"factor": 4.0}), ("llama3", LLAMA3)):
        rope = RopeConfig(kind, 1e5, 64, 8192, params)
        assert rotary_pairs(rope, 128).tolist() == list(range(0, 64, 2))
        assert rotary_pairs(rope, 192).tolist() == list(range(0, 96, 3))
    assert rotary_pairs(RopeConfig("yarn", 1e5, 64, 8192, YARN), 64).tolist() == list(range(32))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "hidden": ({"hidden_size": 47}, "hidden_size 47 is below the model's own 48"),
    "inner": ({"intermediate_size": 95}, "intermediate_size 95"),
    "layers": ({"num_layers": 2}, "num_layers 2 is below the model's own 3"),
    "vocabulary": ({"vocab_size": 299, "hidden_size": 64}, "vocab_size 299"),
    "kv-heads": ({"num_heads": 4, "num_kv_heads": 1}, "num_kv_heads 1"),
    "heads-in-groups": ({"num_heads": 7}, "num_heads 7 is not a multiple of num_kv_heads 2"),
    "groups": ({"num_heads": 3, "num_kv_heads": 3}, "need num_kv_heads 4"),
    "smaller-head": ({"head_dim": 6}, "head_dim 6 is below"),
    "head": ({"head_dim": 18}, "head_dim 18 lacks rotary frequencies that head_dim 12 has"),
    "odd-head": ({"head_dim": 13}, "head_dim 13"),
    "no-dimension-to-mask-with": ({"vocab_size": 301}, "vocab_size 301 .* needs a hidden_size above 48"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_sizes(make_model: Make, case: str) -> None:
    sizes, message = REFUSED[case]
    decoder = tiny_decoder(make_model())
    with pytest.raises(ModelError, match=message):
        widen(decoder, replace(decoder.config, **sizes))


def test_refused_models(make_model: Make) -> None:
    with pytest.raises(ModelError, match="gemma3_text cannot be widened"):
        widen(gemma := tiny_decoder(make_model("gemma3_text")), gemma.config)
    with pytest.raises(ModelError, match=r"float32 or bfloat16.*float16"):
        widen(half := tiny_decoder(make_model(), torch.float16), half.config)
    for scaling in ({"rope_type": "dynamic", "factor": 2.0}, YARN | {"rope_type": "yarn"}):
        decoder = tiny_decoder(make_model(rope_scaling=scaling))
        with pytest.raises(ModelError, match=f"head_dim 24 .*{scaling['rope_type']}"):
            widen(decoder, shape_of(decoder, 2))


def test_a_shape_too_large_is_refused_before_it_is_made(make_model: Make) -> None:
    decoder = tiny_decoder(make_model())
    with pytest.raises(ModelError, match="needed on cpu"):
        widen(decoder, replace(decoder.config, hidden_size=1 << 20, intermediate_size=1 << 20, num_layers=1000))


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> LoadedModel:
    return load_model(smollm2, device="cpu", max_length=128)


REAL: dict[str, dict[str, Any]] = {
    "1024": {"hidden_size": 1024, "head_dim": 128},
    "like-a-large-one": {
        "hidden_size": 1024,
        "head_dim": 128,
        "num_heads": 16,
        "num_kv_heads": 4,
        "intermediate_size": 2816,
        "num_layers": 32,
        "vocab_size": 50304,
        "tie_word_embeddings": False,
    },
}


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("shape", REAL)
def test_smollm2(loaded: LoadedModel, shape: str) -> None:
    decoder = loaded.decoder
    wide = widen(loaded, replace(decoder.config, **REAL[shape]))
    for prompt in PROMPTS:
        ids = encode(loaded.tokenizer, prompt, loaded.num_tokens)
        expected, logits = (read(d, d.new_cache(capacity=128, scratch=64), ids) for d in (decoder, wide.decoder))
        torch.testing.assert_close(logits[:, : loaded.num_tokens], expected, **CLOSE)
        own, out = (
            make_engine(model, drafter="ngram", fixed_budget=True, fused=False).generate(prompt, SamplingParams(24))
            for model in (loaded, wide)
        )
        assert out.token_ids == own.token_ids
        assert out.stats.accepted_tokens == own.stats.accepted_tokens > 0
