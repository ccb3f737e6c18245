"""What is read of a config.json: what transformers reads of it, or a refusal that names the setting."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import FAMILY, Make, edit_config

from pad_engine.errors import ModelError
from pad_engine.models.config import ModelConfig, parse_config

PLAIN = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": None}, "model_type"),
        ({"model_type": "gemma3"}, "gemma3"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "su"}}, "su"),
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "mrope"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"head_dim": 7}, "head_dim"),
        ({"head_dim": -16}, "head_dim"),
        ({"vocab_size": None}, "vocab_size"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "mistral", "sliding_window": "8"}, "sliding_window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["chunked_attention"] * 2}, "chunked"),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_an_unsupported_config_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    parse_config(PLAIN)
    with pytest.raises(ModelError) as refused:
        parse_config(PLAIN | {"num_key_value_heads": 2} | change)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("family", FAMILY)
def test_a_config_written_by_transformers_is_read_as_transformers_reads_it(make_model: Make, family: str) -> None:
    folder = make_model(family)
    from transformers import AutoConfig

    mine, theirs = ModelConfig.from_folder(folder), AutoConfig.from_pretrained(folder)
    kinds = getattr(theirs, "layer_types", None) or (
        ["sliding_attention" if getattr(theirs, "sliding_window", None) else "full_attention"] * mine.num_layers
    )
    assert mine.windows == tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert (mine.num_kv_heads, mine.head_dim) == (theirs.num_key_value_heads, getattr(theirs, "head_dim", None) or 12)


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "sliding_window"])
@pytest.mark.parametrize("change", ["left out", "null"])
@pytest.mark.parametrize("family", FAMILY)
def test_defaults_are_those_of_transformers(tmp_path: Path, family: str, key: str, change: str) -> None:
    from transformers import AutoConfig

    sizes = {"model_type": family, "num_attention_heads": 64, "hidden_size": 768, "num_hidden_layers": 3, key: 1}
    raw = PLAIN | FAMILY[family] | sizes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    edit_config(tmp_path, key) if change == "left out" else edit_config(tmp_path, **{key: None})
    try:
        theirs = AutoConfig.from_pretrained(tmp_path)
    except Exception:
        pytest.skip("transformers refuses it")
    mine = ModelConfig.from_folder(tmp_path)
    expected = {
        "num_key_value_heads": (mine.num_kv_heads, theirs.num_key_value_heads),
        "head_dim": (mine.head_dim, getattr(theirs, "head_dim", None) or 768 // 64),
        "hidden_act": (mine.hidden_act, getattr(theirs, "hidden_activation", None) or getattr(theirs, "hidden_act", 0)),
        "rms_norm_eps": (mine.rms_norm_eps, theirs.rms_norm_eps),
        "sliding_window": ({w for w in mine.windows if w} or {None}, {getattr(theirs, "sliding_window", None)}),
    }[key]
    assert expected[0] == expected[1]
