"""Turn one GGUF file into a folder in Hugging Face layout, tensor by tensor.

Next file: `gguf_config.py` (the metadata as config.json), then `gguf_tokenizer.py`.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pad_engine.errors import ModelError
from pad_engine.models.gguf_config import build_config, build_generation_config, shortest
from pad_engine.models.gguf_tokenizer import build_tokenizer

# the bytes of a shard are all that a conversion holds in memory
SHARD_BYTES = 1 << 30
BLOCK_ELEMENTS = 1 << 22

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ARCHITECTURES: dict[str, dict[str, str]] = {
    "llama": _LAYER,
    "qwen2": _LAYER,
    "qwen3": _LAYER | _QK_NORM,
    "gemma3": _LAYER | _QK_NORM | _GEMMA,
}


def convert(source: Path, out: Path) -> None:
    """Write `source` (one `.gguf` file) into the existing, empty folder `out`.

    `out` gets config.json, generation_config.json, tokenizer.json, tokenizer_config.json and model.safetensors (or
    shards and an index above 1 GiB). Quantised tensors become bf16; others become bf16 where that keeps every bit,
    and stay as they are otherwise. Raises ModelError for an architecture, tensor, tokenizer or rope that is not known.
    """
    reader = _read(source)
    try:
        metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        arch = metadata.get("general.architecture")
        if arch not in ARCHITECTURES:
            raise ModelError(
                f"{source}: the GGUF architecture {arch!r} is not supported", f"supported: {', '.join(ARCHITECTURES)}"
            )
        if metadata.get("split.count", 1) > 1:
            raise ModelError(f"{source}: this GGUF is one part of several", "join them: llama-gguf-split --merge")
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        _check_tensors(source, tensors, metadata)
        config = build_config(
            metadata, {name: _shape(tensor) for name, tensor in tensors.items()}, _rope_freqs(tensors)
        )
        tokenizer, tokenizer_config = build_tokenizer(metadata)
        _check_space(out, tensors)
        (out / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        del tokenizer
        config["dtype"] = _write_tensors(out, _converted(tensors, config, arch))
        _write_json(out / "tokenizer_config.json", tokenizer_config)
        _write_json(out / "config.json", config)
        _write_json(out / "generation_config.json", build_generation_config(config))
    except KeyError as error:
        raise ModelError(f"{source}: the GGUF metadata has no {error.args[0]!r}") from error


def _read(source: Path) -> Any:
    from gguf import GGUFReader

    size = source.stat().st_size
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError, MemoryError) as error:
        raise ModelError(
            f"{source}: not a readable GGUF file ({error})", "it may be truncated: fetch it again"
        ) from error
    for tensor in reader.tensors:
        if tensor.data_offset + tensor.n_bytes > size:
            raise ModelError(f"{source}: tensor {tensor.name} ends after the file", "it is truncated: fetch it again")
    return reader


def _check_space(out: Path, tensors: dict[str, Any]) -> None:
    need, free = sum(2 * int(tensor.n_elements) for tensor in tensors.values()), shutil.disk_usage(out).free
    if free < need:
        raise OSError(errno.ENOSPC, f"{need / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")


def _shape(tensor: Any) -> tuple[int, ...]:
    # GGUF writes the fastest axis first
    return tuple(int(n) for n in reversed(tensor.shape))


def _check_tensors(source: Path, tensors: dict[str, Any], metadata: dict[str, Any]) -> None:
    arch = metadata["general.architecture"]
    layers, parts = int(metadata[f"{arch}.block_count"]), ARCHITECTURES[arch]
    needed = {"token_embd.weight", "output_norm.weight"}
    needed |= {f"blk.{i}.{part}.weight" for i in range(layers) for part in parts}
    for name in sorted(needed - tensors.keys()):
        raise ModelError(f"{source}: tensor {name} is missing")
    for name in tensors:
        if name != "rope_freqs.weight" and (rename(name, arch) is None or _layer(name) >= layers):
            raise ModelError(f"{source}: tensor {name} has no place in a {arch} model of {layers} layers")


def _layer(name: str) -> int:
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1


def rename(name: str, arch: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None when the architecture has no such tensor."""
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    part = ARCHITECTURES[arch].get(match[2]) if match else None
    return f"model.layers.{match[1]}.{part}.{match[3]}" if match and part else None


def _rope_freqs(tensors: dict[str, Any]) -> list[float] | None:
    tensor = tensors.get("rope_freqs.weight")
    return None if tensor is None else [shortest(value) for value in tensor.data.reshape(-1)]


def _converted(tensors: dict[str, Any], config: dict[str, Any], arch: str) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as Hugging Face has it, one tensor in memory at a time."""
    heads = {".attn_q.": config["num_attention_heads"], ".attn_k.": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        new = rename(name, arch)
        if new is None:
            continue
        value = _dequantize(tensor)
        if arch == "llama":
            for part, count in heads.items():
                if part in name:
                    value = _unpermute(value, count)
        if arch == "gemma3" and name.endswith("norm.weight"):
            # llama.cpp stores the factor itself, transformers its distance from 1
            value = value.float() - 1
        narrow = value.to(torch.bfloat16)
        yield new, narrow if torch.equal(narrow.to(value.dtype), value) else value


def _dequantize(tensor: Any) -> Tensor:
    """The tensor in its own float dtype, or in bf16 if it was quantised."""
    from gguf import GGMLQuantizationType as Kind
    from gguf.quants import dequantize

    shape, kind = _shape(tensor), tensor.tensor_type
    if kind in (Kind.F32, Kind.F16):
        return torch.from_numpy(tensor.data.copy()).reshape(shape)
    if kind == Kind.BF16:
        return torch.from_numpy(tensor.data.copy()).view(torch.bfloat16).reshape(shape)
    # by blocks of rows: a whole embedding in fp32, with the temporaries, is many times the model
    value = torch.empty(shape, dtype=torch.bfloat16)
    step = max(1, BLOCK_ELEMENTS // shape[-1])
    try:
        for row in range(0, len(tensor.data), step):
            value[row : row + step] = torch.from_numpy(dequantize(tensor.data[row : row + step], kind))
    except NotImplementedError as error:
        raise ModelError(f"tensor {tensor.name}: the quantisation {kind.name} is not supported") from error
    return value


def _unpermute(value: Tensor, heads: int) -> Tensor:
    # llama.cpp interleaves the two halves of each rotary pair: [heads, dim/2, 2, ...] -> [heads, 2, dim/2, ...]
    split = value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
    return split.transpose(1, 2).reshape(value.shape)


def _write_tensors(out: Path, tensors: Iterator[tuple[str, Tensor]]) -> str:
    """Write the shards and, when there are several, their index; return the dtype that most weights have."""
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    held = total = 0

    def flush() -> None:
        _save(shard, out / f"part-{len(shards)}")
        shards.append(list(shard))
        shard.clear()

    for name, value in tensors:
        size = value.numel() * value.element_size()
        if shard and held + size > SHARD_BYTES:
            flush()
            held = 0
        shard[name] = value.contiguous()
        held += size
        total += size
        key = str(value.dtype).removeprefix("torch.")
        sizes[key] = sizes.get(key, 0) + size
    flush()
    _name_shards(out, shards, total)
    return max(sizes, key=lambda key: sizes[key])


def _save(shard: dict[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(shard, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # safetensors wraps the number of the system's error in its text
        code = errno.ENOSPC if re.search(r"(os error|code:) 28\b", str(error)) else errno.EIO
        raise OSError(code, str(error)) from error
    # it writes for the owner alone; a cache may be shared
    path.chmod(0o644)


def _name_shards(out: Path, shards: list[list[str]], total: int) -> None:
    # the count is part of every name, so names are given at the end
    count = len(shards)
    names = (
        [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else ["model.safetensors"]
    )
    for i, name in enumerate(names):
        (out / f"part-{i}").rename(out / name)
    if count == 1:
        return
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    _write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
