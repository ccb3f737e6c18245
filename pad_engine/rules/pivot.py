"""Pivot-aware decoding (PAD, arXiv 2511.00351): a drafted token is rejected only if it would change the result.

A classifier says how likely that is (classifier.py). The same test serves a linear judge (arXiv 2501.19309), whose
pivot_prob is one less the probability that the token is right.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pad_engine.rules.override import Judged

FLOOR = 1e-4  # of the paper: the least probability of an override, unless a spec says otherwise


def not_pivotal(judged: Judged, t: Sequence[float]) -> Tensor:
    """pivot_prob <= sigma; nothing at sigma 0, whatever the classifier says."""
    return judged.pivot_prob <= t[0] if t[0] > 0 else torch.zeros_like(judged.pivot_prob, dtype=torch.bool)


@triton.jit
def not_pivotal_kernel(token, id1, id2, id3, z1, z2, z3, lse, entropy, token_logit, pivot_prob, t0, t1):
    return pivot_prob <= tl.where(t0 > 0, t0, -1.0)
