"""Relaxed acceptance: `accept = base | (override & floor)`, and what bounds it along the path.

An override accepts a node that the base rule rejects, from a few numbers of the row that judges it. Switched off it
leaves the base, id for id. Overrides are the only source of loss, so each is named, and a budget may bound them.
Next to read: margin.py for the shortest override, select.py for their names and options.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pad_engine.kernels.row_stats import TOP, RowStats
from pad_engine.record import Record, row_stats
from pad_engine.rules.classifier import Classifier
from pad_engine.state import HISTORY, Overridden
from pad_engine.tree import Forest

BASE_SCORE = 2.0  # of a node that the base accepts: above every probability


class Judged(NamedTuple):
    """What an override may look at, for N nodes, from the raw row that judges each (its parent's): top_id int32
    `[N, 3]`, top_logit fp32 `[N, 3]` (more where `Override.top` asks for more), and of `[N]` each: token int32; lse,
    entropy (nats), token_logit (of the node's token) and pivot_prob (of a classifier, 1 without one), all fp32."""

    token: Tensor
    top_id: Tensor
    top_logit: Tensor
    lse: Tensor
    entropy: Tensor
    token_logit: Tensor
    pivot_prob: Tensor


@dataclass(frozen=True)
class Override:
    """decide: from Judged and the thresholds to bool `[N]`; kernel: the same as a `@triton.jit` function of the scalars
    of Judged and two thresholds. Both are strict comparisons in fp32, so the two agree.

    thresholds: two numbers, in device memory where a round is captured. log_floor: log of the least probability that
    an override may have (-inf: any); outer_floor: the base must have it as well. lookahead: so many nodes must follow
    on the path, all of them the base's. reach: the tree must reach so far beyond the node. max_overrides: among any
    `window` emitted tokens in a row, 0 for no limit. classifier: makes pivot_prob. either: of a walk over rejection,
    which takes any of a row's two likeliest tokens if z2 / z1 exceeds it; 1 is off. top: how many of a row's likeliest
    tokens it looks at; more than the record's make it one without a kernel, decided on the host.
    """

    decide: Callable[[Judged, Sequence[float]], Tensor]
    kernel: Any
    thresholds: tuple[float, float]
    log_floor: float = -float("inf")
    outer_floor: bool = False
    lookahead: int = 0
    reach: int = 0
    max_overrides: int = 0
    window: int = HISTORY
    classifier: Classifier | None = None
    either: float = 1.0
    top: int = TOP

    def __post_init__(self) -> None:
        # as every kernel has them, so that all mean the same by a threshold
        object.__setattr__(self, "thresholds", tuple(as_fp32(value) for value in self.thresholds))
        object.__setattr__(self, "log_floor", as_fp32(self.log_floor))

    @property
    def scalars(self) -> list[float]:
        """What differs between rules of one kernel: fp32 `[8]` of kernels/relaxed.py."""
        bounds = (self.outer_floor, self.lookahead, self.reach, self.max_overrides, self.window)
        return [*self.thresholds, self.log_floor, *map(float, bounds)]


def as_fp32(value: float) -> float:
    """The nearest number in single precision."""
    return float(torch.tensor(value, dtype=torch.float32))


class Verdict(NamedTuple):
    """Of N nodes: accept and overridden bool `[N]`, score fp32 `[N]`; among accepted siblings the best score stays."""

    accept: Tensor
    overridden: Tensor
    score: Tensor


def judged_nodes(record: Record, override: Override) -> Judged:
    """The numbers of a record that an override looks at, on the record's device: of the rows as the request changes
    them (penalties, biases, bans, filters), so that no override brings back what it lowers; a classifier's are raw."""
    rows, (judges, token) = record.processed, record.judged_entries
    if rows is record.logits and override.top == TOP:
        stats, logit = record.judge_stats, record.judge_token_logit
    else:
        stats = RowStats(*(field[judges] for field in row_stats(rows, override.top)))
        logit = rows[judges, token]
    pivot_prob = torch.ones_like(stats.lse)
    if override.classifier is not None:
        raw = record.judge_stats
        features = {"entropy": raw.entropy, "probability": record.judge_p, "margin": raw.margin}
        pivot_prob = override.classifier.pivot_prob(record.taps[override.classifier.tap_layer], features)
    return Judged(token.int(), stats.top_id, stats.top_logit, stats.lse, stats.entropy, logit, pivot_prob)


def on_host(judged: Judged) -> Judged:
    """The same on the CPU, by one transfer of the bits of all columns."""
    columns = [column.view(torch.int32).view(len(column), -1) for column in judged]
    parts = torch.cat(columns, 1).cpu().split([column.shape[1] for column in columns], 1)
    return Judged(*(part.view(own.dtype).reshape(own.shape) for part, own in zip(parts, judged, strict=True)))


def relax(base: Tensor, judged: Judged, override: Override) -> Verdict:
    """base: bool `[N]`, what the base accepts."""
    log_p = judged.token_logit - judged.lse
    allowed = log_p >= override.log_floor
    chosen = override.decide(judged, override.thresholds)
    accept = (base | chosen) & allowed if override.outer_floor else base | (chosen & allowed)
    score = log_p.exp() if override.classifier is None else 1.0 - judged.pivot_prob
    return Verdict(accept, accept & ~base, torch.where(base, BASE_SCORE, score))


def kept_length(
    path: Sequence[int], overridden: Sequence[bool], forest: Forest, override: Override, history: int
) -> int:
    """How much of a path, rows of a forest from the root on, an override's bounds leave; its root always. overridden:
    by row. history: bit b says that the token emitted b tokens before the next one was an override."""
    window = (1 << override.window) - 1
    for place, row in enumerate(path[1:], 1):
        history = history << 1 | overridden[row]
        if not overridden[row]:
            continue
        following = path[place + 1 : place + 1 + override.lookahead]
        if len(following) < override.lookahead or any(overridden[other] for other in following):
            return place
        if override.reach and override.reach > forest.reach[row]:
            return place
        if override.max_overrides and (history & window).bit_count() > override.max_overrides:
            return place
    return len(path)


@dataclass(frozen=True)
class Relaxed:
    """What an override says of the nodes of a record, for whoever asks node by node. The tensors of the verdict are on
    the CPU."""

    record: Record
    override: Override
    judged: Judged
    verdict: Verdict

    @cached_property
    def facts(self) -> list[list[float]]:
        """Of each row what Overridden tells of it."""
        judged = self.judged
        best, second = judged.top_logit[:, :2].double().unbind(1)
        probability = (judged.token_logit - judged.lse).exp()
        columns = (best - second, judged.entropy.double(), probability.double(), judged.pivot_prob.double())
        return torch.stack(columns, 1).tolist()

    @cached_property
    def accepted(self) -> tuple[list[bool], list[float]]:
        """The verdict's accept and score."""
        return self.verdict.accept.tolist(), self.verdict.score.tolist()

    def describe(self, row: int, node: int) -> Overridden:
        """An override by name. row: of the forest; node: of its own tree."""
        return Overridden(node, *self.facts[row])

    def has_room(self, history: int) -> bool:
        """Whether the budget has room for one more override."""
        o = self.override
        return not o.max_overrides or (history << 1 & ((1 << o.window) - 1)).bit_count() < o.max_overrides

    def may_take(self, row: int, token: int, history: int) -> bool:
        """Whether a token that the base may not choose can follow a row of the forest: the floor and the budget."""
        rows = self.record.processed
        log_p = rows[row, token] - rows[row].logsumexp(-1)
        return self.has_room(history) and bool(log_p >= self.override.log_floor)

    def rescue(self, children: Sequence[int], start: int, history: int) -> int | None:
        """Of a node's children, none of which the base accepts, the override with the best score, if the budget has
        room. history: as of kept_length, up to the node."""
        if not self.has_room(history):
            return None
        accept, score = self.accepted
        accepted = [child for child in children if accept[start + child]]
        return max(accepted, key=lambda child: (score[start + child], -child), default=None)
