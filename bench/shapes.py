"""Model shapes to measure with: real sizes, random weights, made on the device.

Speed does not depend on what the weights are, as long as they are not zeros.
"""

import math
from typing import Any

import torch

from pad_engine.models.config import ModelConfig, parse_config
from pad_engine.models.decoder import Decoder, GetTensor, expected_tensors
from pad_engine.models.quantise import AS_STORED, pick_weights

LLAMA: dict[str, Any] = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu"}
SHAPES: dict[str, dict[str, Any]] = {
    "135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
}  # fmt: skip
# for tests of the scripts; no model has it
TINY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 96, "tie_word_embeddings": True,
}  # fmt: skip


def shape_sizes(name: str, num_layers: int | None = None) -> dict[str, Any]:
    """A shape by the keys of a config.json, with fewer layers if told so."""
    sizes = TINY if name == "tiny" else SHAPES[name]
    return sizes | ({"num_hidden_layers": num_layers} if num_layers else {})


def shape_config(name: str, max_length: int, num_layers: int | None = None) -> ModelConfig:
    """The config of a shape."""
    return parse_config(LLAMA | shape_sizes(name, num_layers) | {"max_position_embeddings": max_length})


def random_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> GetTensor:
    """A model's weights by name, made when asked for. Scaled like trained ones, so that hidden states neither vanish
    nor overflow."""
    shapes = expected_tensors(config)
    generator = torch.Generator(device).manual_seed(0)

    def get(tensor: str) -> torch.Tensor:
        shape = shapes[tensor]
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        weight = torch.empty(shape, dtype=dtype, device=device)
        return weight.normal_(0.0, 0.7 / math.sqrt(shape[-1]), generator=generator)

    return get


def random_decoder(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    max_length: int,
    num_layers: int | None = None,
    weights: str = AS_STORED,
) -> Decoder:
    """A decoder of random weights. weights: as of load_model."""
    config = shape_config(name, max_length, num_layers)
    return Decoder(config, random_weights(config, device, dtype), max_length, pick_weights(weights, device))


def streamed_bytes(decoder: Decoder, num_tokens: int) -> int:
    """Bytes of weights that one pass must read: all layers' matrices and the LM head, with the scales of their rows."""
    matrices = [
        linear.weight for layer in decoder.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
    ]
    rows = sum(len(matrix) for matrix in matrices) + num_tokens
    weights = sum(matrix.numel() for matrix in matrices) + num_tokens * decoder.config.hidden_size
    scales = rows * torch.float32.itemsize if decoder.quantised is not None else 0
    return weights * matrices[0].dtype.itemsize + scales
