"""The target's own token of each row: plain argmax at temperature 0, else argmax with noise that depends on the seed,
the position and the token id alone. So it is the same token whatever was drafted. Next file: kernels/gumbel.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pad_engine import native
from pad_engine.kernels.gumbel import GUMBEL, check_temperature, gumbel_pick_ref, gumbel_pick_triton, gumbel_ref
from pad_engine.tree import to_int64


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


def gumbel_picks(
    logits: Tensor, positions: Tensor, seeds: Sequence[int], temperatures: Sequence[float], counts: Sequence[int]
) -> Tensor:
    """gumbel_pick of several sequences whose rows stand behind one another, so many of each.

    On a GPU the number of launches does not depend on how many there are. Returns int32 `[R]` on the logits' device.
    """
    if not any(temperatures):
        return gumbel_pick(logits, positions, 0, 0.0)
    if len(counts) > 1 and logits.is_cuda:
        return gumbel_pick_triton(logits, positions, *rows_of(seeds, temperatures, counts, logits.device))
    parts = zip(logits.split(list(counts)), positions.split(list(counts)), seeds, temperatures, strict=True)
    return torch.cat([gumbel_pick(*part) for part in parts])


def rows_of(
    seeds: Sequence[int], temperatures: Sequence[float], counts: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Seeds, as the bits of int64, and temperatures, fp32, of each row: `[R]`."""
    repeats = torch.tensor(counts)
    bits = torch.tensor([to_int64(seed % 2**64) for seed in seeds]).repeat_interleave(repeats)
    warmth = torch.tensor(temperatures).repeat_interleave(repeats)
    return bits.to(device, non_blocking=True), warmth.to(device, non_blocking=True)
