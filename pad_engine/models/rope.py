"""Rotary frequencies: the five scalings that the supported models declare.

default; linear (kaiokendev 2023); dynamic NTK (bloc97 2023); llama3 (Meta 2024); yarn (Peng et al. 2023, section 3).
Dynamic NTK makes the frequencies depend on the length. What is meant here: a token's key is rotated with the length at
the time when it entered the cache, `max(its position + 1, prompt length)`, and stays as it is. That equals
transformers with a cache, and does not depend on how many tokens were verified together.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pad_engine.errors import ModelError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding. `params` are the scaling's own numbers, as named in config.json."""

    rope_type: str
    theta: float
    head_dim: int
    max_position_embeddings: int
    params: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def dynamic(self) -> bool:
        """Whether the frequencies depend on the sequence length."""
        return self.rope_type == "dynamic"


def parse_rope(raw: dict[str, Any], head_dim: int, nested: bool) -> dict[str, RopeConfig]:
    """The rotary embedding of each layer type, from the old keys (`rope_theta`, `rope_scaling`, and Gemma's
    `rope_local_base_freq`) or the new one (`rope_parameters`, flat or by layer type); both `type` and `rope_type`."""
    parameters = dict(raw.get("rope_parameters") or {})
    by_type = {kind: parameters.get(kind) for kind in ("full_attention", "sliding_attention")}
    if any(by_type.values()):
        full, sliding = dict(by_type["full_attention"] or {}), dict(by_type["sliding_attention"] or {})
    else:
        full = {**parameters, **(raw.get("rope_scaling") or {})}
        sliding = {} if nested else full
    full.setdefault("rope_theta", raw["rope_theta"])
    sliding.setdefault("rope_theta", raw["rope_local_base_freq"] if nested else raw["rope_theta"])
    entries = {"full_attention": full, "sliding_attention": sliding}
    return {kind: make_rope(entry, head_dim, raw["max_position_embeddings"]) for kind, entry in entries.items()}


def make_rope(entry: dict[str, Any], head_dim: int, max_position_embeddings: int) -> RopeConfig:
    """Check one rope entry and name what is missing."""
    kind = entry.get("rope_type") or entry.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope_type {kind!r} is not supported", f"supported: {', '.join(ROPE_TYPES)}")
    needed = {"linear": ["factor"], "dynamic": ["factor"], "yarn": ["factor"]}.get(kind, [])
    if kind == "llama3":
        needed = ["factor", "low_freq_factor", "high_freq_factor"]
    for key in needed:
        if not isinstance(entry.get(key), int | float):
            raise ModelError(f"rope_type {kind!r} needs the number {key!r}, got {entry.get(key)!r}")
    if entry.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"partial_rotary_factor={entry['partial_rotary_factor']} is not supported")
    theta = entry["rope_theta"]
    if not isinstance(theta, int | float) or not theta > 0:
        raise ModelError(f"rope_theta must be a positive number, got {theta!r}")
    params = {key: value for key, value in entry.items() if key not in ("rope_type", "type", "rope_theta")}
    return RopeConfig(kind, float(theta), head_dim, max_position_embeddings, params)


def inverse_frequencies(rope: RopeConfig, length: int = 0) -> tuple[Tensor, float]:
    """Frequencies `[head_dim / 2]` in fp32, and the factor on cos and sin. `length` matters to dynamic NTK only."""
    dim, theta, params = rope.head_dim, rope.theta, rope.params
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    if rope.rope_type == "dynamic":
        longest = max(length, rope.max_position_embeddings)
        stretch = params["factor"] * longest / rope.max_position_embeddings - (params["factor"] - 1)
        theta = theta * stretch ** (dim / (dim - 2))
    inv_freq = 1.0 / theta**exponents
    if rope.rope_type == "linear":
        return inv_freq / params["factor"], 1.0
    if rope.rope_type == "llama3":
        return llama3(inv_freq, params, rope.max_position_embeddings), 1.0
    if rope.rope_type == "yarn":
        return yarn(theta, exponents, rope)
    return inv_freq, 1.0


def llama3(inv_freq: Tensor, params: dict[str, Any], max_position_embeddings: int) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between mixed linearly."""
    original = params.get("original_max_position_embeddings", max_position_embeddings)
    low, high, factor = params["low_freq_factor"], params["high_freq_factor"], params["factor"]
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    mixed = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, mixed, scaled)


def yarn(theta: float, exponents: Tensor, rope: RopeConfig) -> tuple[Tensor, float]:
    """NTK-by-parts interpolation and the attention factor (YaRN, equations 15-23)."""
    params, dim = rope.params, rope.head_dim
    factor = params["factor"]
    original = params.get("original_max_position_embeddings", rope.max_position_embeddings)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(params.get("beta_fast") or 32), dimension_of(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high > low else 0.001)
    keep = 1 - ramp.clamp(0, 1)
    frequencies = theta**exponents
    inv_freq = 1.0 / (factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep
    return inv_freq, yarn_attention_factor(params, factor)


def yarn_attention_factor(params: dict[str, Any], factor: float) -> float:
    """The declared factor, or the one that follows from `factor`, `mscale` and `mscale_all_dim`."""

    def mscale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
    return mscale(1.0)


class RopeTable:
    """cos and signed sin by position, in the model's type; built once, or row by row when lengths matter."""

    def __init__(self, rope: RopeConfig, max_length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rope, self.dtype, self.device = rope, dtype, device
        self.table: tuple[Tensor, Tensor] | None = None
        if not rope.dynamic:
            self.table = self.angles(torch.arange(max_length), *inverse_frequencies(rope))

    def angles(self, positions: Tensor, inv_freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """cos and signed sin `[len(positions), 1, head_dim]` for kernels.rope."""
        freqs = positions.float()[:, None] * inv_freq
        cos, sin = freqs.cos() * factor, freqs.sin() * factor
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cos.unsqueeze(1).to(self.device, self.dtype), sin.unsqueeze(1).to(self.device, self.dtype)

    def rows(self, positions: Tensor, prompt_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin for rows at `positions` `[N]`, whose sequences had prompts of `prompt_lengths` `[N]`."""
        if self.table is not None:
            return self.table[0][positions], self.table[1][positions]
        lengths = torch.maximum(positions.cpu() + 1, prompt_lengths.cpu()).clamp_(min=self.rope.max_position_embeddings)
        distinct, index = lengths.unique(return_inverse=True)
        inv_freq = torch.stack([inverse_frequencies(self.rope, length)[0] for length in distinct.tolist()])
        return self.angles(positions.cpu(), inv_freq[index], 1.0)
