"""Which weights of a model are kept in one byte, and how they come to be: the option, and a matrix made of its parts.

All matrices of the layers and the LM head are, which is nearly all that a step reads. Norms, biases and the lookup of
embeddings stay in the model's type. Next to read: kernels/quantise.py.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from pad_engine.errors import ModelError, RequestError
from pad_engine.kernels.linear import Linear
from pad_engine.kernels.quantise import QUANTISED, quantise

AS_STORED = "auto"


def pick_weights(weights: str, device: torch.device) -> torch.dtype | None:
    """The type that matrices are quantised to, or None for "auto": they stay in the model's type."""
    if weights == AS_STORED:
        return None
    if weights not in QUANTISED:
        raise RequestError(f"weights must be {AS_STORED} or one of {', '.join(QUANTISED)}, got {weights!r}")
    if weights == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise RequestError(f"weights fp8 need a card of compute capability 8.9 or later, this is {found}", "use int8")
    return QUANTISED[weights]


def quantised_linear(parts: Iterable[tuple[str, Tensor]], bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """One matrix of the rows of all parts, by name, in order. Each is quantised before the next one is asked for, so
    that a model is never held twice. ModelError names a part with a number that is not finite."""
    weights, scales = [], []
    for name, weight in parts:
        quantised, scale = quantise(weight, dtype)
        if not bool(scale.isfinite().all()):
            raise ModelError(f"{name} cannot be quantised: it holds a number that is not finite")
        weights.append(quantised)
        scales.append(scale)
    return Linear(torch.cat(weights), bias, torch.cat(scales))
