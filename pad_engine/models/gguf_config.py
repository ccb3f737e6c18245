"""GGUF metadata as config.json and generation_config.json.

Keys are written in the spelling that every supported transformers reads (`rope_theta`, `rope_scaling`).
"""

from __future__ import annotations

from typing import Any

from pad_engine.errors import ModelError

_CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
# metadata that changes the computation and that config.json of these families cannot express
_UNSUPPORTED = (
    "expert_count",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
)
# tokens that end a turn; a chat template that writes one makes it an end of sequence
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")

Shapes = dict[str, tuple[int, ...]]


def shortest(value: Any) -> float:
    """The shortest decimal that gives the same fp32 number: 9.999999747e-06 is 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))


def build_config(metadata: dict[str, Any], shapes: Shapes, rope_freqs: list[float] | None) -> dict[str, Any]:
    """config.json of a GGUF. `shapes` are in row-major order; `rope_freqs` is `rope_freqs.weight` or None.

    Raises ModelError for metadata that would be lost, and KeyError for a required key that is absent.
    """
    arch = metadata["general.architecture"]
    for key in _UNSUPPORTED:
        if metadata.get(f"{arch}.{key}") not in (None, 0, 0.0):
            raise ModelError(f"the GGUF key {arch}.{key} = {metadata[f'{arch}.{key}']} is not supported")
    model_type, class_name = _CLASSES[arch]
    heads, kv_heads = _uniform(metadata, f"{arch}.attention.head_count"), _kv_heads(metadata, arch)
    hidden = int(metadata[f"{arch}.embedding_length"])
    head_dim = int(metadata.get(f"{arch}.attention.key_length", hidden // heads))
    _check_head_dim(metadata, arch, head_dim)
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": _uniform(metadata, f"{arch}.feed_forward_length"),
        "num_hidden_layers": int(metadata[f"{arch}.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": int(metadata[f"{arch}.context_length"]),
        "rms_norm_eps": shortest(metadata[f"{arch}.attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest(metadata.get(f"{arch}.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(metadata, arch, rope_freqs),
        "tie_word_embeddings": "output.weight" not in shapes,
        "use_cache": True,
    }
    config.update(_family(arch, metadata, config, shapes))
    config.update(_special_ids(metadata))
    return config


def build_generation_config(config: dict[str, Any]) -> dict[str, Any]:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in keys if config.get(key) is not None}


def _uniform(metadata: dict[str, Any], key: str) -> int:
    value = metadata[key]
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ModelError(f"the GGUF key {key} differs by layer, which is not supported")
        value = value[0]
    return int(value)


def _kv_heads(metadata: dict[str, Any], arch: str) -> int:
    key = f"{arch}.attention.head_count_kv"
    return _uniform(metadata, key if key in metadata else f"{arch}.attention.head_count")


def _check_head_dim(metadata: dict[str, Any], arch: str, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if int(metadata.get(f"{arch}.{key}", head_dim)) != head_dim:
            got = metadata[f"{arch}.{key}"]
            raise ModelError(f"the GGUF key {arch}.{key} = {got} differs from the head size {head_dim}: not supported")


def _family(arch: str, metadata: dict[str, Any], config: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    window = int(metadata.get(f"{arch}.attention.sliding_window") or 0)
    if arch == "gemma3":
        return _gemma3(metadata, config, int(metadata["gemma3.attention.sliding_window"]))
    if window:
        raise ModelError(f"the GGUF key {arch}.attention.sliding_window = {window} is not supported")
    act = {"hidden_act": "silu"}
    biases = {name.split(".")[2] for name in shapes if name.endswith(".bias")}
    if arch == "llama":
        mlp_bias = _biased(biases, "ffn_gate", "ffn_up", "ffn_down")
        return act | {
            "attention_bias": _biased(biases, "attn_q", "attn_k", "attn_v", "attn_output"),
            "mlp_bias": mlp_bias,
        }
    if arch == "qwen2":
        if biases != {"attn_q", "attn_k", "attn_v"}:
            raise ModelError(f"a qwen2 GGUF has biases of q, k and v, this one of {sorted(biases) or 'none'}")
        return act | {"use_sliding_window": False}
    return act | {
        "use_sliding_window": False,
        "attention_bias": _biased(biases, "attn_q", "attn_k", "attn_v", "attn_output"),
    }


def _biased(biases: set[str], *parts: str) -> bool:
    found = biases & set(parts)
    if found and found != set(parts):
        raise ModelError(f"the GGUF has a bias of {sorted(found)} but not of {sorted(set(parts) - found)}")
    return bool(found)


def _gemma3(metadata: dict[str, Any], config: dict[str, Any], window: int) -> dict[str, Any]:
    layers, pattern = config["num_hidden_layers"], metadata.get("gemma3.attention.sliding_window_pattern", 6)
    sliding = pattern if isinstance(pattern, list) else [(i + 1) % int(pattern) != 0 for i in range(layers)]
    # the 27B model alone scales attention by the hidden size of a head, not by head_dim
    scalar = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scalar,
        "sliding_window": window,
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
        "sliding_window_pattern": None if isinstance(pattern, list) else int(pattern),
        "rope_local_base_freq": shortest(metadata.get("gemma3.rope.freq_base_swa", 10000.0)),
        "attn_logit_softcapping": metadata.get("gemma3.attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get("gemma3.final_logit_softcapping"),
    }


def _rope_scaling(metadata: dict[str, Any], arch: str, freqs: list[float] | None) -> dict[str, Any] | None:
    if freqs is not None and any(value != 1 for value in freqs):
        return _llama3_scaling(metadata, arch, freqs)
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    factor = metadata.get(f"{arch}.rope.scaling.factor", 0.0)
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": shortest(factor)}
    if kind != "yarn":
        raise ModelError(f"the GGUF rope scaling {kind!r} is not supported", "supported: linear, yarn, llama3")
    scaling = {
        "rope_type": "yarn",
        "factor": shortest(factor),
        "original_max_position_embeddings": int(metadata[f"{arch}.rope.scaling.original_context_length"]),
    }
    for key, name in (
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
        ("attn_factor", "attention_factor"),
    ):
        if (value := metadata.get(f"{arch}.rope.scaling.{key}")) is not None:
            scaling[name] = shortest(value)
    return scaling


def llama3_factors(theta: float, dim: int, factor: float, low: float, high: float, original: int) -> list[float]:
    """What llama.cpp stores as `rope_freqs.weight`: the divisor of each of the dim / 2 rotary frequencies."""
    import math

    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * theta ** (i / dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _llama3_scaling(metadata: dict[str, Any], arch: str, freqs: list[float]) -> dict[str, Any]:
    """The parameters whose factors are `freqs`: GGUF keeps the result alone."""
    theta, factor = float(metadata.get(f"{arch}.rope.freq_base", 10000.0)), max(freqs)
    for original in (8192, 4096, 16384, 32768, 2048, 65536, 131072):
        expected = llama3_factors(theta, 2 * len(freqs), factor, 1.0, 4.0, original)
        if all(abs(a - b) <= 1e-4 * b for a, b in zip(freqs, expected, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise ModelError(
        "the GGUF tensor rope_freqs.weight is not a llama3 rope scaling", "convert the original checkpoint"
    )


def _special_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    ends = [ids[name] for name in ("eos", "eot", "eom")]
    tokens, template = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.chat_template", "")
    ends += [tokens.index(text) for text in _TURN_ENDS if text in template and text in tokens]
    ends = list(dict.fromkeys(int(token) for token in ends if token is not None))
    pad = metadata.get("tokenizer.ggml.padding_token_id")
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": pad,
    }
