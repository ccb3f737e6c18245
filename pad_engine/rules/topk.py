"""Top-k acceptance: any of the target's k likeliest tokens stays (the baseline of Cactus, arXiv 2604.04987).

Equal logits rank by id, so exactly k tokens are among them. The record holds three; a larger k ranks
the rows again, on the host.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from pad_engine.rules.override import Judged

MAX_K = 64


def among_top(judged: Judged, t: Sequence[float]) -> Tensor:
    """The token is one of the first k of top_id. t: k."""
    return (judged.token[:, None] == judged.top_id[:, : int(t[0])]).any(1)


@triton.jit
def among_top_kernel(token, id1, id2, id3, z1, z2, z3, lse, entropy, token_logit, pivot_prob, t0, t1):
    rank = tl.where(token == id1, 1.0, tl.where(token == id2, 2.0, tl.where(token == id3, 3.0, 4.0)))
    return rank <= t0
