"""Typical acceptance (Medusa, arXiv 2401.10774): a token stays if its probability exceeds min(eps, delta exp(-H)).

The likelier of two conditions is enough, and in logarithms each is a sum: log p > log eps, or log p + H > log delta.
"""

from collections.abc import Sequence

import triton
import triton.language as tl  # noqa: F401 - the interpreter wants it in the module of a jitted function
from torch import Tensor

from pad_engine.rules.override import Judged


def typical(judged: Judged, t: Sequence[float]) -> Tensor:
    """t: log eps and log delta."""
    log_p = judged.token_logit - judged.lse
    return (log_p > t[0]) | (log_p + judged.entropy > t[1])


@triton.jit
def typical_kernel(token, id1, id2, id3, z1, z2, z3, lse, entropy, token_logit, pivot_prob, t0, t1):
    log_p = token_logit - lse
    return (log_p > t0) | (log_p + entropy > t1)
