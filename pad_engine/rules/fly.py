"""Loosely speculative decoding (FLy, arXiv 2511.22972): a mismatch stays where the target is unsure, if what follows it
on the path is what the target itself would have said.

The paper's form compares the entropy over log V; the released code the entropy of the three likeliest tokens alone, and
its window counts the mismatch itself. Either is decided along the path that the tree's scores lead to (override.py).
On a chain that is the papers' window over the draft; on trees it is this project's reading of it.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pad_engine.rules.override import Judged

FORMS = ("paper", "released")


def unsure(judged: Judged, t: Sequence[float]) -> Tensor:
    """entropy >= theta log V. t: the product."""
    return judged.entropy >= t[0]


@triton.jit
def unsure_kernel(token, id1, id2, id3, z1, z2, z3, lse, entropy, token_logit, pivot_prob, t0, t1):
    return entropy >= t0


def unsure_of_three(judged: Judged, t: Sequence[float]) -> Tensor:
    """-sum of p log p over the three likeliest tokens >= theta."""
    log_p = judged.top_logit - judged.lse[:, None]
    terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p)
    return -(terms[:, 0] + terms[:, 1] + terms[:, 2]) >= t[0]


@triton.jit
def plogp(z, lse):
    log_p = z - lse
    return tl.where(log_p == float("-inf"), 0.0, tl.exp(log_p) * log_p)


@triton.jit
def unsure_of_three_kernel(token, id1, id2, id3, z1, z2, z3, lse, entropy, token_logit, pivot_prob, t0, t1):
    return -(plogp(z1, lse) + plogp(z2, lse) + plogp(z3, lse)) >= t0
