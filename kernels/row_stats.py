"""The statistics of a row of logits that acceptance rules use, so that no probabilities need to be kept."""

from typing import NamedTuple

from torch import Tensor

TOP = 3


class RowStats(NamedTuple):
    """For N rows: top_id int32 `[N, TOP]`, top_logit fp32 `[N, TOP]`, and fp32 `[N]` each: lse, entropy (nats) and
    margin (largest logit minus second largest), all raw, at temperature 1."""

    top_id: Tensor
    top_logit: Tensor
    lse: Tensor
    entropy: Tensor
    margin: Tensor


def row_stats_ref(logits: Tensor, top: int = TOP) -> RowStats:
    """logits: `[N, V]` in any float type, V at least `top`. Equal logits rank by id, lowest first.

    entropy = lse - sum(exp(z - lse) z), with impossible tokens (-inf) adding nothing.
    """
    rows = logits.float()
    # a stable sort keeps equal logits in the order of their ids; topk promises nothing
    order = rows.sort(dim=-1, descending=True, stable=True)
    top_logit, top_id = order.values[:, :top], order.indices[:, :top].int()
    lse = rows.logsumexp(-1)
    p = (rows - lse[:, None]).exp()
    entropy = lse - (p * rows.masked_fill(p == 0, 0.0)).sum(-1)
    return RowStats(top_id, top_logit, lse, entropy, top_logit[:, 0] - top_logit[:, 1])
