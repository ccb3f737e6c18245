"""What one verification pass says of each node, and nothing more: rules decide from these few numbers.

`row_*` describes a node's own row, the target's distribution after it; `judge_*` describes the row that judges the
node, its parent's. A root is judged by nobody: its judge values are those of its own row, and rules always accept it.
Next to read: rules/rule.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from pad_engine.kernels.row_stats import TOP, RowStats
from pad_engine.tree import Forest

# of logits that are worked on at a time: what is computed of them on the way would fill the memory in a large forest
ENTRIES = 1 << 26


def rows_at_once(width: int) -> int:
    """How many rows of so many entries are worked on at a time."""
    return max(1, ENTRIES // width)


def row_stats(logits: Tensor, top: int = TOP) -> RowStats:
    """kernels.row_stats.row_stats_ref without sorting whole rows for a few of their tokens."""
    parts = [part_stats(rows.float(), top) for rows in logits.split(rows_at_once(logits.shape[1]))]
    return parts[0] if len(parts) == 1 else RowStats(*(torch.cat(field) for field in zip(*parts, strict=True)))


def part_stats(rows: Tensor, top: int) -> RowStats:
    """The same of a few rows."""
    # what was taken must rank behind what is impossible
    left, ids = rows.clamp(min=torch.finfo(torch.float32).min), []
    for _ in range(top):
        ids.append(left.argmax(-1, keepdim=True))  # the lowest id at ties; a NaN before any number
        left.scatter_(1, ids[-1], -torch.inf)
    top_id = torch.cat(ids, 1)
    top_logit = rows.gather(1, top_id)
    lse = rows.logsumexp(-1)
    p = torch.sub(rows, lse[:, None], out=left).exp_()
    entropy = lse - (rows.masked_fill(p == 0, 0.0).mul_(p)).sum(-1)
    return RowStats(top_id.int(), top_logit, lse, entropy, top_logit[:, 0] - top_logit[:, 1])


@dataclass(frozen=True)
class Record:
    """A verified forest of N nodes.

    logits: fp32 `[N, V]`, raw. processed: the same after penalties, biases and filters, -inf where filtered out (the
    very same tensor where nothing was asked for). row_pick: int32 `[N]` on the CPU, the target's own token after
    each node, -1 where the row has none because it is not finite. taps: hidden states `[N, hidden_size]` by layer.
    q_rows: those of the trees, as of DraftTree, or none at all. Statistics are computed when a rule first asks for one.
    """

    forest: Forest
    logits: Tensor
    processed: Tensor
    row_pick: Tensor
    taps: dict[int, Tensor]
    q_rows: Sequence[Tensor | None] = ()

    @property
    def token(self) -> Tensor:
        """int32 `[N]`: the nodes' tokens."""
        return self.forest.token

    @cached_property
    def judges(self) -> Tensor:
        """int64 `[N]`: the row that judges each node."""
        parent = self.forest.parent.long()
        return torch.where(parent >= 0, parent, torch.arange(len(parent)))

    @cached_property
    def judged_entries(self) -> tuple[Tensor, Tensor]:
        """int64 `[N]` each, beside the logits: the row that judges each node, and the node's token."""
        entries = torch.stack((self.judges, self.token.long())).to(self.logits.device, non_blocking=True)
        return entries[0], entries[1]

    @cached_property
    def picks(self) -> list[int]:
        """row_pick."""
        return self.row_pick.tolist()

    @cached_property
    def row_stats(self) -> RowStats:
        """Top ids and logits, log-sum-exp, entropy and margin of each row."""
        return row_stats(self.logits)

    @cached_property
    def judge_stats(self) -> RowStats:
        """The same of the row that judges each node."""
        return RowStats(*(field[self.judged_entries[0]] for field in self.row_stats))

    @cached_property
    def judge_pick(self) -> Tensor:
        """int32 `[N]`: the target's own choice where the node's token was proposed."""
        return self.row_pick[self.judges]

    @cached_property
    def judge_token_logit(self) -> Tensor:
        """fp32 `[N]`: the raw logit of the node's token in the row that judges it."""
        return self.logits[self.judged_entries]

    @cached_property
    def judge_p(self) -> Tensor:
        """fp32 `[N]`: the target's probability of the node's token, at temperature 1."""
        return (self.judge_token_logit - self.judge_stats.lse).exp()

    @cached_property
    def judge_possible(self) -> Tensor:
        """bool `[N]` on the CPU: whether filters, bans and biases leave the node's token possible where it stands."""
        return (self.processed[self.judged_entries] > -torch.inf).cpu()

    @cached_property
    def divergence(self) -> list[float]:
        """Of each node the KL(target || draft), in nats, of the raw row after it from the one that its children were
        drawn from: infinite where nothing was drawn, or the draft model cannot say what the target can."""
        starts = [*self.forest.starts, len(self.logits)]
        longest = max(end - start for start, end in pairwise(starts))
        # in double precision, and several of them
        step = max(1, rows_at_once(4 * self.logits.shape[1]) // longest)
        drawn = next((q for q in self.q_rows if q is not None), self.logits[:, :1])
        nothing = drawn.new_zeros(longest, drawn.shape[1])
        q_rows = self.q_rows or [None] * len(self.forest.starts)
        found = []
        for first in range(0, len(q_rows), step):
            sizes = [end - start for start, end in pairwise(starts[first : first + step + 1])]
            each = zip(q_rows[first : first + step], sizes, strict=True)
            q = torch.cat([nothing[:size] if rows is None else rows for rows, size in each])
            logits = self.logits[starts[first] : starts[first] + len(q)]
            found.append(divergences(logits, q.to(logits.device)))
        return torch.cat(found).tolist()


def divergences(logits: Tensor, q: Tensor) -> Tensor:
    """fp64 `[n]`: KL(softmax(logits) || q) of rows. logits: `[n, V]`; q: `[n, V']`, V' <= V."""
    target = logits.double().log_softmax(-1)
    draft = torch.full_like(target, -torch.inf)
    draft[:, : q.shape[1]] = q.double().log_()
    p = target.exp()
    # what the target cannot say adds nothing, whatever the draft model makes of it
    return target.sub_(draft).mul_(p).masked_fill_(p == 0, 0.0).sum(-1)
