"""The target's own token of each row: plain argmax at temperature 0, else argmax with noise that depends on the seed,
the position and the token id alone. So it is the same token whatever was drafted. Next file: kernels/gumbel.py.
"""

import torch
from torch import Tensor

from pad_engine import native
from pad_engine.kernels.gumbel import GUMBEL, check_temperature, gumbel_pick_ref, gumbel_ref


def gumbel_noise(
    seed: int, position: int, num_tokens: int, device: torch.device, purpose: int = GUMBEL, round_index: int = 0
) -> Tensor:
    """The noise with which the token at `position` is picked: fp32 `[num_tokens]` on the device."""
    if device.type == "cpu" and native.available():
        return native.gumbel(seed, position, num_tokens, purpose, round_index)
    return gumbel_ref(seed, torch.tensor([position], device=device), num_tokens, purpose, round_index)[0]


def gumbel_pick(logits: Tensor, positions: Tensor, seed: int, temperature: float) -> Tensor:
    """One draw a row from softmax(logits / temperature) with the shared noise G[seed, position, token].

    logits: fp32 `[R, V]`; -inf masks a token. positions: `[R]` integers, on the same device: the position of the token
    that is picked. seed: any int, modulo 2^64. temperature: in [0, 1e30]; 0 is greedy; lowest id at ties.
    Returns int32 `[R]`, -1 for a row that has a NaN or whose best score is not finite.
    """
    check_temperature(temperature)
    if logits.device.type == "cpu" and native.available() and logits.stride(-1) == 1:
        return native.gumbel_pick(logits, positions, seed, temperature)
    return gumbel_pick_ref(logits, positions, seed, temperature)
