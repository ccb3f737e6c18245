"""A round on another runtime's logits: what to draft after a sequence, and which of it libpad lets stay.

The runtime reads the last committed token and the drafted ones in one pass, and hands over the logits of those rows; a
chain of drafted tokens is all there is, so any runtime that can drop the last entries of its cache will do. Used by
transformers.py and examples/llama_cpp_margin.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pad_engine.drafters.ngram import NGram
from pad_engine.errors import NonFiniteError, RequestError
from pad_engine.kernels.row_stats import TOP
from pad_engine.native_accept import match_path
from pad_engine.native_tail import Kind, Rule, gather_judged, make_rule, relaxed_path, row_stats
from pad_engine.rules import fly, margin, select, topk, typical
from pad_engine.rules.match import MATCH
from pad_engine.rules.override import Judged, Override
from pad_engine.state import HISTORY
from pad_engine.tree import DraftTree, make_forest
from pad_engine.trees.chain import Chain

MAX_DRAFT = 63  # with the root, what pad_relaxed_path takes
# of an override that the engine would decide in torch, the kind that libpad has for it
KINDS: dict[Callable[[Judged, Sequence[float]], Tensor], Kind] = {
    margin.margin_paper: Kind.MARGIN_PAPER,
    margin.margin_ratio: Kind.MARGIN_RATIO,
    margin.margin_gap: Kind.MARGIN_GAP,
    typical.typical: Kind.TYPICAL,
    topk.among_top: Kind.TOPK,
    fly.unsure: Kind.FLY_PAPER,
    fly.unsure_of_three: Kind.FLY_RELEASED,
}


@dataclass
class Stats:
    """What became of the drafts of one answer, without what was cut behind its end."""

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    overrides: int = 0
    tokens: int = 0

    @property
    def tokens_per_round(self) -> float:
        """All that were emitted, the token after each path included."""
        return self.tokens / max(1, self.rounds)


class PromptLookup:
    """What followed the same words earlier in the sequence: drafters/ngram.py by itself."""

    def __init__(self, min_match: int = 2) -> None:
        self.search = NGram(Chain(), min_match)

    def __call__(self, ids: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens after ids, which is the last call's sequence and more."""
        self.search.extend(list(ids[len(self.search.ids) :]))
        matches = self.search.matches()
        return self.search.continuation(matches[0][1], count) if matches else []


def native_rule(spec: str, num_tokens: int) -> Rule:
    """A rule of the engine, by its name and options, as libpad has it. num_tokens: the width of the logits.

    RequestError for those that read more than logits, or walk from sibling to sibling.
    """
    made = select.make_rule(spec, num_tokens)
    if isinstance(made, str):
        if made == "rejection":
            raise RequestError("rule rejection needs the drafter's probabilities, which a chain here has not")
        return make_rule(Kind.BASE)
    override = made.override
    if override.classifier is not None:
        raise RequestError(f"rule {made.name} reads hidden states, and here are logits only", "use margin or fly")
    if made.sampled is not MATCH or override.either < 1.0:
        raise RequestError(f"rule {spec} walks over rejection, and here the base is greedy or match")
    if override.top > TOP:
        raise RequestError(f"rule {spec}: k must be in [1, {TOP}] here")
    return bounded(KINDS[override.decide], override)


def bounded(kind: Kind, override: Override) -> Rule:
    """The kind with an override's thresholds and bounds."""
    return make_rule(
        kind,
        *override.thresholds,
        log_floor=override.log_floor,
        outer_floor=override.outer_floor,
        lookahead=override.lookahead,
        reach=override.reach,
        max_overrides=override.max_overrides,
        window=override.window,
    )


class Decided(NamedTuple):
    """The tokens that a round emits: those of the draft that stay, and the target's own after them; which of them are
    overrides; and how many were drafted."""

    tokens: list[int]
    overridden: list[bool]
    drafted: int


class Judge:
    """Decides the rounds of one sequence, and keeps what its rule and its statistics remember."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.history, self.stats = rule, 0, Stats()

    def decide(self, logits: Tensor, row_pick: Tensor, draft: Sequence[int]) -> Decided:
        """One round; `emit` says how much of it was used.

        logits: raw, fp32 `[1 + D, V]` on the CPU, of the last committed token and the D drafted ones. row_pick: int32
        `[1 + D]`, the target's own token after each row, -1 where that row is not finite.
        """
        forest = make_forest([DraftTree.chain([0, *draft])], [0])
        columns = forest.token, forest.parent, row_pick, forest.tree_mask_bits, forest.depth, forest.seq
        overridden = [False] * len(logits)
        if self.rule.kind == Kind.BASE:
            paths, ends = match_path(*columns, 1)
        else:
            judged = gather_judged(row_stats(logits), logits, forest.token, forest.parent)
            found = relaxed_path(self.rule, *columns, judged, 1, [self.history])
            paths, ends, overridden = found.paths, found.ends, found.overridden
        if ends[0] < 0:
            raise NonFiniteError("the target's logits hold a NaN or an infinity, or exclude every token")
        kept = len(paths[0]) - 1
        return Decided([*draft[:kept], ends[0]], [*overridden[1 : 1 + kept], False], len(draft))

    def emit(self, decided: Decided, count: int) -> None:
        """The answer took the first `count` tokens of a round: all of them, unless it ended there."""
        flags = decided.overridden[:count]
        for flag in flags:
            self.history = (self.history << 1 | flag) & (1 << HISTORY) - 1
        self.stats.rounds += 1
        self.stats.draft_tokens += decided.drafted
        self.stats.accepted_tokens += min(count, len(decided.tokens) - 1)
        self.stats.overrides += sum(flags)
        self.stats.tokens += count


def allowed(draft: Sequence[int], processed: Tensor) -> list[int]:
    """The draft up to its first token that the processed logits `[1 + D, V]` exclude: a rule reads raw logits, and
    would let it pass."""
    if not draft:
        return []
    chosen = processed[: len(draft)].gather(1, torch.tensor(draft)[:, None])[:, 0]
    return list(draft[: int((chosen > -torch.inf).long().cumprod(0).sum())])
