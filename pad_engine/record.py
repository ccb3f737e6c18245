"""What one verification pass says of each node, and nothing more: rules decide from these few numbers.

`row_*` describes a node's own row, the target's distribution after it; `judge_*` describes the row that judges the
node, its parent's. A root is judged by nobody: its judge values are those of its own row, and rules always accept it.
Next to read: rules/rule.py.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pad_engine.kernels.row_stats import RowStats, row_stats_ref
from pad_engine.tree import Forest


@dataclass(frozen=True)
class Record:
    """A verified forest of N nodes.

    logits: fp32 `[N, V]`, raw. processed: the same after penalties, biases and filters, -inf where filtered out (the
    very same tensor where nothing was asked for). row_pick: int32 `[N]`, the target's own token after each node, -1
    where the row has none because it is not finite. taps: hidden states `[N, hidden_size]` by layer. The statistics are
    computed when a rule first asks for one.
    """

    forest: Forest
    logits: Tensor
    processed: Tensor
    row_pick: Tensor
    taps: dict[int, Tensor]

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
    def row_stats(self) -> RowStats:
        """Top ids and logits, log-sum-exp, entropy and margin of each row."""
        return row_stats_ref(self.logits)

    @cached_property
    def judge_stats(self) -> RowStats:
        """The same of the row that judges each node."""
        return RowStats(*(field[self.judges.to(field.device)] for field in self.row_stats))

    @cached_property
    def judge_pick(self) -> Tensor:
        """int32 `[N]`: the target's own choice where the node's token was proposed."""
        return self.row_pick[self.judges]

    @cached_property
    def judge_token_logit(self) -> Tensor:
        """fp32 `[N]`: the raw logit of the node's token in the row that judges it."""
        judges, token = self.judges.to(self.logits.device), self.token.long().to(self.logits.device)
        return self.logits[judges, token]

    @cached_property
    def judge_p(self) -> Tensor:
        """fp32 `[N]`: the target's probability of the node's token, at temperature 1."""
        return (self.judge_token_logit - self.judge_stats.lse).exp()

    @cached_property
    def judge_possible(self) -> Tensor:
        """bool `[N]` on the CPU: whether filters, bans and biases leave the node's token possible where it stands."""
        judges, token = self.judges.to(self.logits.device), self.token.long().to(self.logits.device)
        return (self.processed[judges, token] > -torch.inf).cpu()
