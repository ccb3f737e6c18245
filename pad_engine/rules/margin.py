"""Margin-aware verification (MARS, arXiv 2601.15498): where the target hesitates between two tokens, either will do.

`paper` asks for a ratio of raw logits, z2 / z1 > theta, which means nothing unless z1 > 0 and changes when a constant
is added to all logits; `ratio` (p2 / p1 > rho) and `gap` (p1 - p2 < m) are its twins that do not. `released` is what
the authors' code does, above temperature 0 only; it is a walk over rejection (rejection.py).
"""

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from pad_engine.rules.override import Judged

FORMS = ("paper", "ratio", "gap", "released")


def margin_paper(judged: Judged, t: Sequence[float]) -> Tensor:
    """The runner-up, if z2 > theta z1 > 0."""
    z1, z2 = judged.top_logit[:, 0], judged.top_logit[:, 1]
    return (judged.token == judged.top_id[:, 1]) & (z1 > 0) & (z2 > t[0] * z1)


@triton.jit
def margin_paper_kernel(token, id1, id2, id3, z1, z2, z3, lse, entropy, token_logit, pivot_prob, t0, t1):
    return (token == id2) & (z1 > 0) & (z2 > t0 * z1)


def margin_ratio(judged: Judged, t: Sequence[float]) -> Tensor:
    """The runner-up, if z2 - z1 > log rho."""
    return (judged.token == judged.top_id[:, 1]) & (judged.top_logit[:, 1] - judged.top_logit[:, 0] > t[0])


@triton.jit
def margin_ratio_kernel(token, id1, id2, id3, z1, z2, z3, lse, entropy, token_logit, pivot_prob, t0, t1):
    return (token == id2) & (z2 - z1 > t0)


def margin_gap(judged: Judged, t: Sequence[float]) -> Tensor:
    """The runner-up, if p1 - p2 < m."""
    p = (judged.top_logit[:, :2] - judged.lse[:, None]).exp()
    return (judged.token == judged.top_id[:, 1]) & (p[:, 0] - p[:, 1] < t[0])


@triton.jit
def margin_gap_kernel(token, id1, id2, id3, z1, z2, z3, lse, entropy, token_logit, pivot_prob, t0, t1):
    return (token == id2) & (tl.exp(z1 - lse) - tl.exp(z2 - lse) < t0)


def log(value: float) -> float:
    """Of a threshold; 0 becomes -inf."""
    return math.log(value) if value > 0 else -math.inf
