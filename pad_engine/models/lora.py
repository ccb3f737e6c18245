"""LoRA adapters in PEFT's layout, merged into the weights as they are loaded: W + scale * B @ A.

Next file: `memory.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pad_engine.errors import ModelError
from pad_engine.models.weights import read_header

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# keys whose value changes the computation in a way that a plain merge does not express
_REFUSED = (
    "use_dora",
    "modules_to_save",
    "alpha_pattern",
    "rank_pattern",
    "lora_bias",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "megatron_config",
    "use_qalora",
    "alora_invocation_tokens",
    "arrow_config",
    "use_bdlora",
)
# initialisations that change the base weights, so that the adapter alone is not the model
_REBASED = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Adapter:
    """One adapter: for a weight's name, its A `[r, in]` and B `[out, r]`, fp32 on the CPU."""

    path: Path
    scale: float
    transposed: bool
    pairs: dict[str, tuple[Tensor, Tensor]]

    def check(self, names: Iterable[str]) -> None:
        """ModelError at the first weight of the adapter that is not among the model's `names`."""
        known = set(names)
        for name in self.pairs:
            if name not in known:
                raise ModelError(f"{self.path}: the adapter changes {name}, which the model does not have")

    def apply(self, name: str, weight: Tensor) -> Tensor:
        """`weight` `[out, in]` with this adapter merged in fp32, in its own dtype; itself if not a target."""
        if name not in self.pairs:
            return weight
        a, b = (matrix.to(weight.device) for matrix in self.pairs[name])
        delta = self.scale * (b @ a)
        if self.transposed:
            delta = delta.T
        if delta.shape != weight.shape:
            got, want = list(delta.shape), list(weight.shape)
            raise ModelError(
                f"{self.path}: the adapter changes {name} by a matrix of shape {got}, the weight has {want}"
            )
        return (weight.float() + delta).to(weight.dtype)


def open_adapters(paths: str | Path | Sequence[str | Path]) -> list[Adapter]:
    """Read adapters (folders with adapter_config.json and adapter_model.safetensors); they are merged in this order.

    Raises ModelError for a kind of adapter, or a setting, that a merge of W + scale * B @ A does not express, and for
    one that holds nothing, or values that are not finite: on some devices an answer would hide these.
    """
    several = [paths] if isinstance(paths, str | Path) else paths
    return [_open(Path(path).expanduser()) for path in several]


def _open(path: Path) -> Adapter:
    config = _read_config(path)
    file = path / WEIGHTS
    if not file.is_file():
        pickled = (path / "adapter_model.bin").is_file()
        hint = "a pickled adapter can run code: save it again with safe_serialization=True" if pickled else ""
        raise ModelError(f"{path} has no {WEIGHTS}", hint)
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    pairs = _read_pairs(file)
    for name, (a, b) in pairs.items():
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
            shapes = f"A {list(a.shape)} and B {list(b.shape)}"
            raise ModelError(f"{file}: {name} has {shapes}, adapter_config.json says r = {rank}")
        if not (a.isfinite().all() and b.isfinite().all()):
            raise ModelError(f"{file}: {name} holds values that are not finite")
    return Adapter(path, scale, bool(config.get("fan_in_fan_out")), pairs)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} is not a LoRA adapter: no {CONFIG}", "PEFT's save_pretrained writes one") from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON ({error})") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise ModelError(f"{file}: peft_type {kind!r} is not supported", "LORA is")
    if config.get("bias", "none") != "none":
        raise ModelError(f"{file}: bias = {config['bias']!r} is not supported")
    for key in _REFUSED:
        if config.get(key):
            raise ModelError(
                f"{file}: {key} = {config[key]!r} is not supported", "merge it with PEFT's merge_and_unload"
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_REBASED):
        raise ModelError(
            f"{file}: init_lora_weights = {start!r} changes the base weights", "convert it to a plain LoRA"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, (int, float)):
        raise ModelError(f"{file}: r must be a positive integer and lora_alpha a number, got {rank!r} and {alpha!r}")
    return config


def _read_pairs(file: Path) -> dict[str, tuple[Tensor, Tensor]]:
    from safetensors import safe_open

    read_header(file)
    halves: dict[str, dict[str, Tensor]] = {"A": {}, "B": {}}
    with safe_open(file, framework="pt", device="cpu") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - not a mapping
            side, name = _target(file, key)
            halves[side][name] = tensors.get_tensor(key).to(torch.float32)
    alone = halves["A"].keys() ^ halves["B"].keys()
    for name in sorted(alone):
        raise ModelError(f"{file}: {name} has only one of lora_A and lora_B")
    if not halves["A"]:
        raise ModelError(f"{file} holds no tensors of an adapter")
    return {name: (a, halves["B"][name]) for name, a in halves["A"].items()}


def _target(file: Path, key: str) -> tuple[str, str]:
    """("A" or "B", the name of the weight) for a tensor of the adapter."""
    for side in ("A", "B"):
        ending = f".lora_{side}.weight"
        if key.startswith(_PREFIX) and key.endswith(ending):
            return side, key.removeprefix(_PREFIX).removesuffix(ending) + ".weight"
    raise ModelError(
        f"{file}: tensor {key} is not a lora_A or lora_B of a linear layer, which is all that is supported"
    )
