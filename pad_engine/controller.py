"""How much to draft in the next round: from measured costs and from what was accepted lately.

Two safeguards. The expected tokens per second of every draft length are compared, with plain decoding among them. And
whatever the estimates say, the time lost against plain decoding is counted, and when it passes a bound the next rounds
are plain: FLOOR says how slow a request can get at worst.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median

from pad_engine.tree import DraftTree

# A request takes at most 1 / FLOOR times the time of plain decoding, plus an allowance, as far as measured costs
# foretell those of the next round: what the smallest draft may lose, but no less and no more than so many plain steps.
# One of 64 tokens is thus never slower by more than 2 % if a draft costs up to 0.6 steps more than none. What a request
# has not used of it, or has won, the next one may lose besides: what two of the smallest drafts may lose, or dear ones
# would never be tried in short requests, but no less and no more than so many plain steps.
FLOOR = 0.99
LEAST_ALLOWANCE, MOST_ALLOWANCE = 0.6, 1.0
LEAST_CARRIED, MOST_CARRIED = 1.0, 4.0
# One that has a draft at every place, a draft model, may lose so many plain steps besides, once in an engine's life:
# its drafts are dear, and a first one that fails would else be the last for a long time.
TRIAL = 4.0
# Where a request's first draft kept nothing, the next one's comes so many tokens later, and from so many on at the
# start again: the place may be one at which the drafter is always wrong, and a request may have no second try.
LATER, LATEST = 3, 24
# Credit from rounds that won is kept for at most this many plain steps: a good start does not pay for a slow end.
MAX_CREDIT = 8.0
# What one round keeps of the counts before it: a window of about twenty rounds, after which old failures are forgotten
# and drafting is tried again.
DECAY = 0.95
# Before anything was seen, a draft token is taken to be accepted this often, with the weight of this many tries; one of
# a draft model more often, or those whose drafts cost much would never be tried.
PRIOR_ACCEPTANCE, MODEL_ACCEPTANCE, PRIOR_WEIGHT = 0.6, 0.8, 1.0
# Until a row count was measured, each row is taken to cost this share of a plain step.
ROW_SHARE = 0.03
# A cost is known once it was measured so many times; what was not measured for so many requests is measured anew. One
# round may be slow for a reason of its own, as those are that find the card asleep: it must neither end all drafts of
# its size, in later processes too, nor be what drafts are compared with.
FEW, STALE = 3, 16
BUDGETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
# Where the draft is part of a captured round, each budget is a graph of its own, made at its first use.
CAPTURED_BUDGETS = (1, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class RoundPlan:
    """budget: nodes of the tree, root included. depth: drafted tokens in a row at most. readings: passes of the draft
    model's own ahead of its draft, over tokens that plain rounds have left to it."""

    budget: int = 1
    depth: int = 0
    readings: int = 0


class Cost:
    """Milliseconds of one thing: the median of the last few measurements, 0 when there is none."""

    def __init__(self) -> None:
        self.samples: deque[float] = deque(maxlen=5)
        self.seen = self.unseen = 0  # how often it was measured, and requests since then

    def add(self, milliseconds: float, times: int = 1) -> None:
        """One measurement. times: that it stands for."""
        self.samples.append(milliseconds)
        self.seen, self.unseen = self.seen + times, 0

    def begin(self) -> None:
        """A new request, which does not believe what was measured too seldom or too long ago."""
        self.unseen += 1
        if self.seen < FEW or self.unseen > STALE:
            self.samples.clear()

    @property
    def milliseconds(self) -> float:
        """What is expected."""
        return median(self.samples) if self.samples else 0.0


class CostTable:
    """The cost of a pass by its number of rows, and a line between measured counts."""

    def __init__(self) -> None:
        self.costs: defaultdict[int, Cost] = defaultdict(Cost)

    @property
    def samples(self) -> dict[int, deque[float]]:
        """The last few measurements of each count that has any."""
        return {rows: cost.samples for rows, cost in self.costs.items() if cost.samples}

    def add(self, rows: int, milliseconds: float, times: int = 1) -> None:
        """One measured pass, as of Cost."""
        self.costs[rows].add(milliseconds, times)

    def begin(self) -> None:
        """A new request, as of Cost; a plain pass, which every request has, stays."""
        for rows, cost in self.costs.items():
            if rows > 1:
                cost.begin()

    def __call__(self, rows: int) -> float:
        """The expected cost of a pass of so many rows; 0 when nothing was measured yet."""
        known = {count: cost.milliseconds for count, cost in self.costs.items() if cost.samples}
        if not known or rows in known:
            return known.get(rows, 0.0)
        below, above = [c for c in known if c < rows], [c for c in known if c > rows]
        if below and above:
            low, high = max(below), min(above)
            return known[low] + (known[high] - known[low]) * (rows - low) / (high - low)
        nearest = max(below) if below else min(above)
        return known[nearest] * (1 + ROW_SHARE * rows) / (1 + ROW_SHARE * nearest)


class DraftCost:
    """The cost of drafting so many tokens in a row: so much a token."""

    def __init__(self) -> None:
        self.token = Cost()

    def add(self, depth: int, milliseconds: float, times: int = 1) -> None:
        """One measured draft, as of Cost."""
        self.token.add(milliseconds / depth, times)

    def __call__(self, depth: int) -> float:
        """The expected cost of a draft; 0 when nothing was measured yet."""
        return depth * self.token.milliseconds


class Acceptance:
    """For each class of rounds and each depth: how often a drafted token was accepted, once all before it were."""

    def __init__(self, prior: float = PRIOR_ACCEPTANCE) -> None:
        self.prior = prior
        self.tried: dict[tuple[Hashable, int], float] = defaultdict(float)
        self.accepted: dict[tuple[Hashable, int], float] = defaultdict(float)

    def add(self, kind: Hashable, depth: int, accepted: int) -> None:
        """A round that drafted `depth` tokens in a row and kept `accepted` of them."""
        for level in range(1, min(depth, accepted + 1) + 1):
            self.tried[kind, level] += 1
            self.accepted[kind, level] += level <= accepted

    def decay(self) -> None:
        """Let old rounds count less."""
        for counts in (self.tried, self.accepted):
            for key in counts:
                counts[key] *= DECAY

    def expected_lengths(self, kind: Hashable, depth: int) -> list[float]:
        """Expected number of accepted tokens for draft lengths 0 to `depth`. A depth that was seldom reached leans on
        the rate of the depth before it."""
        expected, product, prior = [0.0], 1.0, self.prior
        for level in range(1, depth + 1):
            key = (kind, level)
            prior = (self.accepted[key] + PRIOR_WEIGHT * prior) / (self.tried[key] + PRIOR_WEIGHT)
            product *= prior
            expected.append(expected[-1] + product)
        return expected


class Controller:
    """Decides each round's budget. fixed: always draft `max_budget` nodes (benchmarks, tests of equality).

    max_budget: nodes of a tree at most, root included. max_depth: drafted tokens in a row at most. branching: trees
    have branches, so what is accepted depends on their size as well as on their depth, and is counted by size. budgets:
    to choose from, beside the largest. prior: how often a drafted token is taken to be accepted at first. everywhere:
    the drafter has a draft at every place, so that all first ones would be tried at the same.
    """

    def __init__(
        self,
        max_budget: int,
        max_depth: int,
        *,
        branching: bool = False,
        fixed: bool = False,
        budgets: Sequence[int] = BUDGETS,
        prior: float = PRIOR_ACCEPTANCE,
        everywhere: bool = False,
    ) -> None:
        self.branching, self.prior, self.everywhere = branching, prior, everywhere
        self.max_budget, self.max_depth, self.fixed = max_budget, max_depth, fixed
        self.verify_cost, self.draft_cost, self.read_cost = CostTable(), DraftCost(), Cost()
        self.budgets = sorted({budget for budget in budgets if 1 < budget < max_budget} | {max_budget})
        self.lost = 0.0  # milliseconds spent beyond what plain decoding would have needed
        self.allowed = 0.0
        self.trial = TRIAL if everywhere else 0.0  # plain steps, what is left of them
        self.start = self.emitted = 0  # the token from which a request drafts, and those that it has
        self.first_kept: bool | None = None  # whether a request's first draft kept a token
        self.begin()

    def begin(self) -> None:
        """A new request: what was accepted before says little about it; the costs stay."""
        self.acceptance = Acceptance(self.prior)
        if not self.fixed:  # who always drafts as much does not need them, and one engine warms up by many such
            self.verify_cost.begin()
            self.draft_cost.token.begin()
            self.read_cost.begin()
        plain, smallest = self.verify_cost(1), min(self.extra(self.plans(self.max_depth)), default=0.0)
        if plain:
            self.trial = max(self.trial - max(self.lost - self.allowed, 0.0) / plain, 0.0)
        most = min(max(2 * smallest, LEAST_CARRIED * plain), MOST_CARRIED * plain)
        carried = min(max(self.allowed - self.lost, 0.0), most)
        self.lost, self.allowed = -carried, 0.0
        if self.everywhere and not self.fixed and self.first_kept is not None:
            self.start = max(0, self.start - 1) if self.first_kept else (self.start + LATER) % LATEST
        self.emitted, self.first_kept = 0, None

    def decide(
        self,
        evidence: int,
        remaining: int,
        pinned: bool = False,
        at_work: Sequence[RoundPlan] = (),
        readings: int = 0,
    ) -> RoundPlan:
        """The next round's size. evidence: the drafter's class of its draft, negative when it has none. remaining: how
        many tokens may still be emitted; the last of them is never drafted. pinned: always as much as is allowed.
        at_work: rounds whose outcome is not known yet; what they may lose counts as lost. readings: as of RoundPlan, of
        a draft in this round."""
        depth = min(self.max_depth, remaining - 1, self.max_budget - 1)
        if evidence < 0 or depth < 1:
            return RoundPlan()
        if not pinned and self.emitted + len(at_work) < self.start:
            return RoundPlan()
        if self.fixed or pinned:
            return RoundPlan(self.max_budget, depth, readings)
        plain = self.verify_cost(1)
        if self.verify_cost.costs[1].seen < FEW:  # the yardstick comes first: a plain step must be known
            return RoundPlan()
        plans = self.plans(depth, readings)
        extra = self.extra(plans)
        allowance = min(max(min(extra), LEAST_ALLOWANCE * plain), MOST_ALLOWANCE * plain) + self.trial * plain
        lost = self.lost + sum(self.cost(plan) - plain for plan in at_work if plan.depth)
        best, best_rate = RoundPlan(), 1.0
        for plan, more in zip(plans, extra, strict=True):
            lengths = self.acceptance.expected_lengths((evidence, self.branching * plan.budget), plan.depth)
            rate = (1 + lengths[plan.depth]) * plain / (plain + more)
            # a round that is rejected whole must not pass the bound either
            if rate > best_rate and lost + more <= self.allowed + allowance:
                best, best_rate = plan, rate
        return best

    def plans(self, depth: int, readings: int = 0) -> list[RoundPlan]:
        """The rounds to choose from, of so many drafted tokens in a row at most."""
        return [RoundPlan(budget, min(budget - 1, depth), readings) for budget in self.budgets]

    def extra(self, plans: Sequence[RoundPlan]) -> list[float]:
        """The expected milliseconds of rounds beyond a plain one's."""
        plain = self.verify_cost(1)
        return [self.cost(plan) - plain for plan in plans]

    def cost(self, plan: RoundPlan) -> float:
        """The expected milliseconds of a round."""
        reading = plan.readings * self.read_cost.milliseconds
        return self.verify_cost(plan.budget) + self.draft_cost(plan.depth) + reading

    def observe(
        self,
        tree: DraftTree,
        accepted: int,
        emitted: int,
        draft_ms: float,
        verify_ms: float,
        budget: int,
        typical: bool = True,
        waited: bool = False,
        depth: int | None = None,
        rows: int | None = None,
        readings: int = 0,
    ) -> None:
        """A finished round: its tree, how many tokens were accepted and emitted, what its parts cost, and the budget
        that it was planned with. typical: False where something was made during the round that later ones will
        find. waited: a plain round that took longer for the draft before it. depth, rows: of a draft that was not the
        host's and may have found less than it was made for. readings: as of RoundPlan."""
        depth, rows = max(tree.depth) if depth is None else depth, len(tree) if rows is None else rows
        if depth:
            self.acceptance.add((tree.evidence, self.branching * budget), depth, accepted)
            self.first_kept = accepted > 0 if self.first_kept is None else self.first_kept
        self.emitted += emitted
        self.acceptance.decay()
        if not typical:
            return
        if readings and self.verify_cost.costs[rows].seen >= FEW:
            self.read_cost.add(max(verify_ms - self.verify_cost(rows), 0.0) / readings)
        elif not waited:
            self.verify_cost.add(rows, verify_ms)
        if depth:
            self.draft_cost.add(depth, draft_ms)
        plain = self.verify_cost(1)
        self.allowed += emitted * plain * (1 / FLOOR - 1)
        if depth or waited:
            # any other plain round differs from plain decoding by noise only, which is nobody's loss
            self.lost = max(self.lost + draft_ms + verify_ms - emitted * plain, self.allowed - MAX_CREDIT * plain)
