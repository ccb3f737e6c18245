"""Rotary position embedding (Su et al. 2021, equation 34), in the half-split form of the Hugging Face checkpoints."""

from torch import Tensor


def rope_ref(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head.

    x: `[N, H, D]`. cos, signed_sin: `[N, 1, D]` in x's type; the first half of signed_sin carries the minus sign of
    the rotation, so that a roll by D/2 takes the place of a negation and a concatenation. Returns `[N, H, D]`.
    """
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), signed_sin)
