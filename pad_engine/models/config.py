"""What the decoder must know of a model, read from its `config.json` before any weight is read.

The supported families differ by flags, never by code of their own. Whatever this file does not know is refused by name.
Next to read: models/decoder.py.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pad_engine.errors import ModelError
from pad_engine.models.rope import RopeConfig, parse_rope

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")


@dataclass(frozen=True)
class Family:
    """How one `model_type` differs from Llama. `defaults` are the values that its configs may leave out."""

    defaults: dict[str, Any]
    qkv_bias: bool | None = None  # None: the config's attention_bias, for q, k, v and o alike
    qk_norm: bool = False
    gemma: bool = False  # scaled embeddings, weights stored minus one, four norms a layer


# Defaults as in the transformers configuration classes of the same names.
FAMILIES = {
    "llama": Family({"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}),
    "mistral": Family(
        {"max_position_embeddings": 131072, "rope_theta": 10000.0, "sliding_window": 4096, "num_key_value_heads": 8},
        qkv_bias=False,
    ),
    "qwen2": Family(
        {"max_position_embeddings": 32768, "rope_theta": 10000.0, "sliding_window": 4096, "num_key_value_heads": 32},
        qkv_bias=True,
    ),
    "qwen3": Family(
        {
            "max_position_embeddings": 32768,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "num_key_value_heads": 32,
            "head_dim": 128,
        },
        qk_norm=True,
    ),
    "gemma3_text": Family(
        {
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
        },
        qk_norm=True,
        gemma=True,
    ),
}


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. Sizes are counts of elements; `windows` and `ropes` have one entry a layer."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    gemma: bool
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig, ...]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read `config.json` and, for the end-of-sequence ids, `generation_config.json`."""
        raw = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        extra_eos = read_json(generation).get("eos_token_id") if generation.exists() else None
        return parse_config(raw, as_ids(extra_eos))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError names the file when it is missing or is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path} not found", "a model folder holds config.json, *.safetensors and a tokenizer"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def as_ids(value: Any) -> tuple[int, ...]:
    """An id, a list of ids or None, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def parse_config(raw: dict[str, Any], extra_eos: tuple[int, ...] = ()) -> ModelConfig:
    """Turn a parsed `config.json` into a ModelConfig; ModelError names what is not supported."""
    family_name = raw.get("model_type")
    if family_name not in FAMILIES:
        raise ModelError(f"model_type {family_name!r} is not supported", f"supported: {', '.join(FAMILIES)}")
    family = FAMILIES[family_name]
    raw = {**family.defaults, **{key: value for key, value in raw.items() if value is not None or key in NULLABLE}}
    refuse_unknown(raw)
    hidden, heads = require(raw, "hidden_size"), require(raw, "num_attention_heads")
    head_dim = raw.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise ModelError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and no head_dim")
        head_dim = hidden // heads
    else:
        head_dim = require(raw, "head_dim")
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim must be even for rotary pairs, got {head_dim}")
    kv_heads = heads if raw.get("num_key_value_heads") is None else require(raw, "num_key_value_heads")
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    num_layers = require(raw, "num_hidden_layers")
    layer_types = parse_layer_types(raw, family_name, num_layers)
    ropes = parse_rope(raw, head_dim, nested=family.gemma)
    attention_bias = bool(raw.get("attention_bias", False))
    act = raw.get("hidden_activation") or raw.get("hidden_act", "silu")
    if act not in ACTIVATIONS:
        raise ModelError(f"hidden_act {act!r} is not supported", f"supported: {', '.join(ACTIVATIONS)}")
    return ModelConfig(
        family=family_name,
        vocab_size=require(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=require(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=require_positive({"rms_norm_eps": 1e-6} | raw, "rms_norm_eps"),
        hidden_act=act,
        max_position_embeddings=require(raw, "max_position_embeddings"),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        gemma=family.gemma,
        attention_scale=(require_positive(raw, "query_pre_attn_scalar") if family.gemma else head_dim) ** -0.5,
        attention_softcap=raw.get("attn_logit_softcapping"),
        logit_softcap=raw.get("final_logit_softcapping"),
        windows=tuple(raw["sliding_window"] if kind == "sliding_attention" else None for kind in layer_types),
        ropes=tuple(ropes[kind] for kind in layer_types),
        eos_token_ids=tuple(dict.fromkeys(as_ids(raw.get("eos_token_id")) + extra_eos)),
    )


# Keys whose null means something else than the key being absent.
NULLABLE = ("sliding_window", "num_key_value_heads")


def require_positive(raw: dict[str, Any], key: str) -> float:
    """A positive number of the config; ModelError names the key."""
    value = raw.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {key} must be a positive number, got {value!r}")
    return float(value)


def require(raw: dict[str, Any], key: str) -> int:
    """A positive integer of the config; ModelError names the key."""
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def refuse_unknown(raw: dict[str, Any]) -> None:
    """Settings that change the result and that this decoder does not carry out."""
    refused = {
        "quantization_config": raw.get("quantization_config") is not None,
        "use_bidirectional_attention": bool(raw.get("use_bidirectional_attention", False)),
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0) != 1.0,
        "num_local_experts": bool(raw.get("num_local_experts")),
        "num_experts": bool(raw.get("num_experts")),
    }
    for key, present in refused.items():
        if present:
            raise ModelError(f"config.json: {key}={raw[key]!r} is not supported")


def parse_layer_types(raw: dict[str, Any], family: str, num_layers: int) -> list[str]:
    """`sliding_attention` or `full_attention` for each layer, by the family's own switches."""
    window = raw.get("sliding_window")
    if family in ("qwen2", "qwen3") and not raw.get("use_sliding_window", False):
        window = None
    if window is None or family == "llama":
        return ["full_attention"] * num_layers
    if not isinstance(window, int) or window < 1:
        raise ModelError(f"config.json: sliding_window must be a positive integer or null, got {window!r}")
    if family == "mistral":
        return ["sliding_attention"] * num_layers
    types = raw.get("layer_types")
    if types is None and family == "gemma3_text":
        pattern = raw.get("sliding_window_pattern", 6)
        types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    elif types is None:
        first = raw.get("max_window_layers", 28)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if len(types) != num_layers:
        raise ModelError(f"config.json: layer_types has {len(types)} entries for {num_layers} layers")
    for kind in types:
        if kind not in ("sliding_attention", "full_attention"):
            raise ModelError(f"config.json: layer_types entry {kind!r} is not supported")
    return list(types)
