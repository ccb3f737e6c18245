"""Rules for comparison only, beside those of rules/select.py: entropy, KL, random, and any rule's own distribution
without speculation. Next to read: settings.py.

`entropy:h=` keeps a mismatch where the judging row has at least h nats of entropy: FLy's gate (arXiv 2511.22972)
without its window. `random:rate=` keeps a mismatch by a coin: what overrides cost that look at nothing. Its uniforms
are Philox numbers of the request's seed, the position and the token, so they do not depend on how rounds fall. An
Override sees no position, so the coin is thrown on a walk along the tree, on the host. `kl:t=` keeps a mismatch where
the two models' distributions differ by less than t nats, KL(target || draft) of raw rows (KL-Judge, "Revisiting Judge
Decoding from First Principles", arXiv 2601.04766): a walk too, as an Override does not see the draft model's rows.

`direct` is what a relaxed rule means without speculation ("Revisiting Lossy Verification", arXiv 2607.26627, asks for
this comparison). At temperature 0 a rule that judges each token by itself makes of every prefix one next token: the
drafter's where the rule keeps it, else the target's. Drafting K tokens follows this, but for one thing: the token after
a wholly accepted draft is the target's own whatever the drafter would have said, one in K + 1 where all is accepted.
So speculation, at depth 1 most of all, is nearer to the target than the rule itself, which is the limit of deep drafts.
`direct` drafts one token a round and ends the round with it if it is kept, so that every token is offered, but for the
last one that a limit allows, which is never drafted.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pad_engine.config import SamplingParams, parse_spec, refuse_rest, take_float
from pad_engine.errors import RequestError
from pad_engine.kernels.gumbel import ACCEPT, uniform
from pad_engine.record import Record
from pad_engine.rules import fly
from pad_engine.rules.greedy import GREEDY
from pad_engine.rules.override import Judged, Override, Relaxed
from pad_engine.rules.rule import AcceptanceRule, Accepted
from pad_engine.rules.select import RelaxedRule, make_rule
from pad_engine.state import Overridden, State
from pad_engine.tree import DraftTree

Rule = str | AcceptanceRule | RelaxedRule
MAX_ENTROPY = MAX_DIVERGENCE = 100.0  # nats; no vocabulary has so much entropy


def make_any_rule(spec: str, num_tokens: int) -> Rule:
    """The rules of rules/select.py, and `entropy:h=`, `kl:t=` and `random:rate=`, all over greedy."""
    name, values = parse_spec(spec, "rule")
    what = f"rule {name}"
    if name == "entropy":
        override = Override(fly.unsure, fly.unsure_kernel, (take_float(values, "h", 1.0, what, 0.0, MAX_ENTROPY), 0.0))
        refuse_rest(values, what, "h")
        return RelaxedRule(name, override)
    if name == "random":
        rate = take_float(values, "rate", 0.1, what, 0.0, 1.0)
        refuse_rest(values, what, "rate")
        return walked(replace(GREEDY, name=name, override=EVERY), Offer(rate=rate))
    if name == "kl":
        limit = take_float(values, "t", 0.1, what, 0.0, MAX_DIVERGENCE)
        refuse_rest(values, what, "t")
        return walked(replace(GREEDY, name=name, override=EVERY, reads_q=True), Offer(divergence=limit))
    return make_rule(spec, num_tokens)


def every(judged: Judged, t: object) -> Tensor:
    """Any token at all."""
    return torch.ones_like(judged.lse, dtype=torch.bool)


EVERY = Override(every, None, (0.0, 0.0))


@dataclass(frozen=True)
class Offer:
    """Which mismatches an override is offered: a share `rate` of them, by coins; and where `divergence` is given, those
    of rows whose KL(target || draft) is below it, in nats."""

    rate: float = 1.0
    divergence: float | None = None


def direct(rule: Rule, name: str) -> AcceptanceRule:
    """A relaxed rule's own distribution at temperature 0, for drafts of one token. RequestError for a rule that has
    none, as it looks ahead, or relaxes nothing. name: of the rule, as it was given."""
    greedy = rule.on(SamplingParams()) if isinstance(rule, RelaxedRule) else rule
    if isinstance(greedy, str) or greedy.override is None:
        raise RequestError(f"rule {name} relaxes nothing, so its own distribution is the target's")
    if greedy.override.lookahead or greedy.override.reach:
        raise RequestError(f"rule {name} judges a token by those after it, so it has no distribution to draw from")
    if isinstance(greedy.walk_path, partial):
        return replace(greedy, walk_path=partial(greedy.walk_path, single=True))
    return walked(greedy, Offer(), single=True)


def walked(rule: AcceptanceRule, offer: Offer, single: bool = False) -> AcceptanceRule:
    """A rule over greedy that is decided by the walk below."""
    return replace(
        rule, walk="sequential", lossless=False, walk_path=partial(walk_path, offer=offer, single=single)
    )  # fmt: skip


def walk_path(
    record: Record, start: int, state: State, tree: DraftTree, relaxed: Relaxed | None, *, offer: Offer, single: bool
) -> Accepted:
    """The greedy path, with an override where the target's own token was not drafted.

    offer: of the tokens that the override takes, which it is offered. single: the round ends with the first drafted
    token that stays; no token of the target's follows it.
    """
    assert relaxed is not None, "the rule has an override"
    path, history, children = [0], state.history, tree.children
    overridden: tuple[Overridden, ...] = ()
    while True:
        node = path[-1]
        pick = record.picks[start + node]
        if pick < 0:
            return Accepted(path, -1, overridden)
        kept = next((child for child in children[node] if tree.tokens[child] == pick), None)
        rescued = None
        if kept is None:
            position = len(state.ids) + len(path) - 1
            near = offer.divergence is None or record.divergence[start + node] < offer.divergence
            offered = [
                c for c in children[node] if near
                and (offer.rate >= 1.0 or uniform(state.seed, position, tree.tokens[c], ACCEPT, 0) < offer.rate)
            ]  # fmt: skip
            kept = rescued = relaxed.rescue(offered, start, history)
        if kept is None:
            return Accepted(path, pick, overridden)
        if rescued is not None:
            overridden += (relaxed.describe(start + rescued, rescued),)
        if single:
            return Accepted(path, tree.tokens[kept], overridden)
        history = history << 1 | (rescued is not None)
        path.append(kept)
