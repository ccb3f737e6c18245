"""The decoder's logits equal transformers' for every family and flag, in prefill and in cached steps."""

from typing import Any

import pytest
import torch
from tiny import FAMILY, Make, Oracle, edit_config, make_tiny_model, read, sequential, some_ids, tiny_decoder

from pad_engine.kv_cache import RowGroup

TOLERANCE = 1e-4
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}


def ours(folder: Any, ids: list[int], prompt_length: int, chunk: int = 512) -> torch.Tensor:
    """Logits of a prompt read in chunks and then of cached steps."""
    decoder = tiny_decoder(folder)
    cache = decoder.new_cache(capacity=len(ids), scratch=chunk)
    cache.reset(0, prompt_length)
    return torch.cat((read(decoder, cache, ids[:prompt_length], chunk), read(decoder, cache, ids[prompt_length:], 1)))


def check(folder: Any, prompt_length: int, count: int, chunk: int = 512, cached: bool = False) -> None:
    """Equality with one pass of transformers over everything, or with its cached steps."""
    ids, oracle = some_ids(count), Oracle(folder)
    theirs = oracle.cached_logits(ids[:prompt_length], ids[prompt_length:]) if cached else oracle.logits(ids)
    # a flat row would pass whatever the decoder did
    assert theirs.std(-1).min() > 0.2
    torch.testing.assert_close(ours(folder, ids, prompt_length, chunk), theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("length", [1, 2, 17, 40])
@pytest.mark.parametrize("family", FAMILY)
def test_families_equal_transformers(make_model: Make, family: str, length: int) -> None:
    check(make_model(family), length, 90, cached=length == 17)


# each entry: family, overrides of a config that is not covered by the family alone
FLAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "multi-query": ("llama", {"num_key_value_heads": 1}),
    "all-heads": ("llama", {"num_key_value_heads": 4}),
    "gqa-3-to-1": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}),
    "attention-bias": ("llama", {"attention_bias": True}),
    "mlp-bias": ("llama", {"mlp_bias": True}),
    "qwen3-attention-bias": ("qwen3", {"attention_bias": True}),
    "gemma-attention-bias": ("gemma3_text", {"attention_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "gemma-untied": ("gemma3_text", {"tie_word_embeddings": False}),
    "eps": ("llama", {"rms_norm_eps": 0.1}),
    "gelu": ("llama", {"hidden_act": "gelu"}),
    "gelu-tanh": ("mistral", {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma-silu": ("gemma3_text", {"hidden_activation": "silu"}),
    "scale": ("gemma3_text", {"query_pre_attn_scalar": 3}),
    "final-softcap": ("gemma3_text", {"final_logit_softcapping": 1.5}),
    # C12: head_dim is not hidden_size / heads
    "own-head-dim-qk-norm": ("qwen3", {"hidden_size": 40, "num_attention_heads": 4, "head_dim": 16}),
    "own-head-dim-bias": ("llama", {"hidden_size": 40, "head_dim": 16, "attention_bias": True}),
    "qwen2-own-head-dim": ("qwen2", {"hidden_size": 40, "head_dim": 16}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-window-1": ("mistral", {"sliding_window": 1}),
    "window-off": ("qwen2", {"use_sliding_window": False}),
    "window-from-layer-0": ("qwen2", {"max_window_layers": 0}),
    "window-from-layer-9": ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 9}),
    "window-null": ("qwen2", {"sliding_window": None}),
    "layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma-pattern": ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 2, "num_hidden_layers": 4}),
    "gemma-default-pattern": ("gemma3_text", {"layer_types": None, "num_hidden_layers": 7}),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_equal_transformers(make_model: Make, name: str) -> None:
    family, overrides = FLAGS[name]
    check(make_model(family, **overrides), 17, 60)


ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-factors": YARN | {"attention_factor": 0.7, "beta_fast": 4.0, "beta_slow": 2.0},
    "yarn-mscale": YARN | {"mscale": 0.8, "mscale_all_dim": 0.4},
    "yarn-exact": YARN | {"truncate": False},
}


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling-rope_type", "rope_scaling-type"])
@pytest.mark.parametrize("name", ROPES)
def test_rope_scaling_is_applied_whatever_its_spelling(tmp_path: Any, name: str, spelling: str) -> None:
    kind, numbers = name.split("-")[0], ROPES[name]
    limit = 64 if kind == "dynamic" else 256
    rope = {"rope_type": kind, "rope_theta": 500.0, **numbers}
    folder = make_tiny_model(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=limit)
    if spelling != "rope_parameters":
        key = spelling.split("-")[1]
        edit_config(folder, "rope_parameters", rope_theta=500.0, rope_scaling={key: kind, **numbers})
    ids, oracle = some_ids(121), Oracle(folder)
    # dynamic frequencies change while a sequence grows, so its oracle grows too
    theirs = oracle.cached_logits(ids[:30], ids[30:]) if kind == "dynamic" else oracle.logits(ids)
    got = ours(folder, ids, 30)
    for position in (0, 5, 31, 33, 120):
        torch.testing.assert_close(got[position], theirs[position], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(got, theirs, atol=TOLERANCE, rtol=0)
    if name != "default":
        # the scaling matters, so that its absence would have been seen
        edit_config(folder, "rope_scaling", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
        assert (ours(folder, ids, 121) - got).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("prompt_length", [64, 65, 100])
def test_dynamic_rope_of_a_prompt_beyond_the_original_length(make_model: Make, prompt_length: int) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    folder = make_model("llama", rope_parameters=rope, max_position_embeddings=64)
    check(folder, prompt_length, 110, chunk=7, cached=True)


@pytest.mark.parametrize("new", [False, True], ids=["old-keys", "rope_parameters"])
def test_gemma_has_two_rotary_bases(tmp_path: Any, new: bool) -> None:
    full, sliding = {"rope_type": "linear", "factor": 8.0, "rope_theta": 9000.0}, {"rope_type": "default"}
    parameters = {"full_attention": full, "sliding_attention": sliding | {"rope_theta": 50.0}}
    folder = make_tiny_model(tmp_path, "gemma3_text", rope_parameters=parameters)
    if not new:
        scaling = {"rope_type": "linear", "factor": 8.0}
        old = {"rope_theta": 9000.0, "rope_local_base_freq": 50.0, "rope_scaling": scaling}
        edit_config(folder, "rope_parameters", **old)
    check(folder, 30, 80)


def test_attention_softcap(make_model: Make) -> None:
    from transformers import AttentionInterface
    from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward

    def capped(*args: Any, **kwargs: Any) -> Any:
        # transformers reads attn_logit_softcapping and then does not pass it on
        return eager_attention_forward(*args, **kwargs | {"softcap": 0.5})

    AttentionInterface.register("capped_eager", capped)
    folder = make_model("gemma3_text", attn_logit_softcapping=0.5)
    oracle, ids = Oracle(folder), some_ids(40)
    got = sequential(tiny_decoder(folder), ids)
    plain = oracle.logits(ids)
    oracle.model.config._attn_implementation = "capped_eager"
    # transformers makes masks by the name of the attention: give it the eager one's
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionMaskInterface.register("capped_eager", eager_mask)
    theirs = oracle.logits(ids)
    assert (theirs - plain).abs().max() > 100 * TOLERANCE
    torch.testing.assert_close(got, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 9, 40])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_prefill_does_not_depend_on_the_chunk(make_model: Make, family: str, chunk: int) -> None:
    folder, ids = make_model(family), some_ids(40)
    decoder = tiny_decoder(folder)
    got = read(decoder, decoder.new_cache(capacity=40, scratch=chunk), ids, chunk)
    torch.testing.assert_close(got, Oracle(folder).logits(ids), atol=TOLERANCE, rtol=0)


# bf16 keeps 8 bits, a relative rounding of 2^-9 a step: 0.06 on logits of about 4 is eight such roundings
@pytest.mark.parametrize("family", FAMILY)
def test_bf16_is_as_near_to_fp32_as_transformers_is(make_model: Make, family: str) -> None:
    folder, ids = make_model(family), some_ids(40)
    exact = Oracle(folder).logits(ids)
    theirs = (Oracle(folder, torch.bfloat16).logits(ids) - exact).abs()
    mine = (sequential(tiny_decoder(folder, torch.bfloat16), ids) - exact).abs()
    assert mine.mean() < 1.25 * theirs.mean() + 1e-3
    assert mine.max() < 1.5 * theirs.max() + 1e-2
    assert mine.mean() < 0.06


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_ranges_add_up_and_taps_are_hidden_states(make_model: Make, family: str) -> None:
    folder, ids = make_model(family, num_hidden_layers=4, layer_types=None), some_ids(25)
    decoder = tiny_decoder(folder)
    layers = range(4)
    whole = decoder.new_cache(capacity=25, scratch=25)
    pieces = decoder.new_cache(capacity=25, scratch=25)
    with torch.inference_mode():
        hidden, taps = decoder.forward(whole.place([RowGroup(0, ids, range(25))]), whole, taps=layers)
        assert sorted(taps) == list(layers)
        placement = pieces.place([RowGroup(0, ids, range(25))])
        part = decoder.embed(placement.tokens)
        for first, last in ((0, 1), (1, 3), (3, 4)):
            part, _ = decoder.forward_range(first, last, part, placement, pieces)
            assert torch.equal(part, taps[last - 1])
        assert torch.equal(part, hidden)
        theirs = Oracle(folder).model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        for layer in layers[:-1]:
            # entry 0 is the embedding, and the last one is behind the final norm
            torch.testing.assert_close(taps[layer], theirs[layer + 1][0], atol=TOLERANCE, rtol=1e-5)
        normed = Oracle(folder).model.model.norm(taps[3])
        torch.testing.assert_close(normed, theirs[4][0], atol=TOLERANCE, rtol=1e-5)


def test_a_range_can_run_on_saved_rows_only(make_model: Make) -> None:
    """Layers [a, b) resumed from hidden states that an earlier pass left behind, after the cache went on."""
    folder, ids = make_model("llama"), some_ids(12)
    decoder = tiny_decoder(folder)
    cache = decoder.new_cache(capacity=12, scratch=12)
    with torch.inference_mode():
        placement = cache.place([RowGroup(0, ids, range(12))])
        low, _ = decoder.forward_range(0, 2, decoder.embed(placement.tokens), placement, cache)
        saved = low.clone()
        hidden, _ = decoder.forward_range(2, 3, saved, placement, cache)
    torch.testing.assert_close(decoder.logits(hidden), Oracle(folder).logits(ids), atol=TOLERANCE, rtol=0)
