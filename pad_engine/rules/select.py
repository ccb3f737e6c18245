"""Rules by name and option, and the rule of a request, from the engine's choice and the request's temperature.

A relaxed rule is named once and has a base by temperature: greedy at 0, above it match, or rejection where asked for.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pad_engine.config import SamplingParams, parse_spec, refuse_rest, take_choice, take_float, take_int, take_text
from pad_engine.errors import RequestError
from pad_engine.kernels.row_stats import TOP
from pad_engine.models.decoder import Decoder
from pad_engine.rules import fly, margin, pivot, topk, typical
from pad_engine.rules.classifier import LINEAR_JUDGE, PIVOT_MLP, load_classifier
from pad_engine.rules.greedy import GREEDY
from pad_engine.rules.match import MATCH
from pad_engine.rules.override import Override
from pad_engine.rules.rejection import REJECTION
from pad_engine.rules.rule import AcceptanceRule
from pad_engine.state import HISTORY

BASES = {rule.name: rule for rule in (GREEDY, MATCH, REJECTION)}
Values = dict[str, str]


@dataclass(frozen=True)
class RelaxedRule:
    """A rule with an override, before a request says which base it has. sampled: the base above temperature 0."""

    name: str
    override: Override
    sampled: AcceptanceRule = MATCH

    def on(self, params: SamplingParams) -> AcceptanceRule:
        """The rule of a request."""
        base = GREEDY if params.greedy else self.sampled
        if self.override.either < 1.0 and params.greedy:
            return base  # the released margin rule relaxes sampling alone
        return replace(base, name=self.name, lossless=False, override=self.override)


def make_margin(values: Values, num_tokens: int) -> Override:
    form = take_choice(values, "form", "paper", "rule margin", margin.FORMS)
    if form == "ratio":
        rho = take_float(values, "rho", 0.3, "rule margin", 0.0, 1.0)
        return Override(margin.margin_ratio, margin.margin_ratio_kernel, (margin.log(rho), 0.0))
    if form == "gap":
        return Override(
            margin.margin_gap, margin.margin_gap_kernel, (take_float(values, "m", 0.2, "rule margin", 0.0, 1.0), 0.0)
        )
    theta = take_float(values, "theta", 0.9, "rule margin", 0.0, 1.0)
    return Override(
        margin.margin_paper, margin.margin_paper_kernel, (theta, 0.0), either=theta if form == "released" else 1.0
    )


def make_pivot(values: Values, num_tokens: int) -> Override:
    classifier = load_classifier(take_text(values, "model", "rule pivot"), PIVOT_MLP)
    sigma = take_float(values, "sigma", 0.3, "rule pivot", 0.0, 1.0)
    values.setdefault("floor", str(pivot.FLOOR))
    return Override(pivot.not_pivotal, pivot.not_pivotal_kernel, (sigma, 0.0), classifier=classifier)


def make_judge(values: Values, num_tokens: int) -> Override:
    classifier = load_classifier(take_text(values, "model", "rule judge"), LINEAR_JUDGE)
    delta = take_float(values, "delta", 0.5, "rule judge", 0.0, 1.0)
    return Override(pivot.not_pivotal, pivot.not_pivotal_kernel, (1.0 - delta, 0.0), classifier=classifier)


def make_typical(values: Values, num_tokens: int) -> Override:
    eps = take_float(values, "eps", 0.09, "rule typical", 0.0, 1.0)
    delta = take_float(values, "delta", 0.3, "rule typical", 0.0, 1.0)
    return Override(typical.typical, typical.typical_kernel, (margin.log(eps), margin.log(delta)))


def make_topk(values: Values, num_tokens: int) -> Override:
    k = take_int(values, "k", 3, "rule topk", high=topk.MAX_K)
    return Override(topk.among_top, topk.among_top_kernel if k <= TOP else None, (float(k), 0.0), top=max(k, TOP))


def make_fly(values: Values, num_tokens: int) -> Override:
    form = take_choice(values, "form", "paper", "rule fly", fly.FORMS)
    theta = take_float(values, "theta", 0.3, "rule fly", 0.0, 100.0)
    window = take_int(values, "lookahead", 6, "rule fly")
    if form == "paper":
        threshold = theta * math.log(num_tokens)
        return Override(fly.unsure, fly.unsure_kernel, (threshold, 0.0), lookahead=window)
    return Override(fly.unsure_of_three, fly.unsure_of_three_kernel, (theta, 0.0), lookahead=window - 1, reach=window)


# how each is made, and its own options
OVERRIDES: dict[str, tuple[Callable[[Values, int], Override], str]] = {
    "margin": (make_margin, "form, theta, rho, m"),
    "pivot": (make_pivot, "model, sigma"),
    "judge": (make_judge, "model, delta"),
    "fly": (make_fly, "form, theta, lookahead"),
    "typical": (make_typical, "eps, delta"),
    "topk": (make_topk, "k"),
}
NAMES = ("auto", *BASES, *OVERRIDES)


def make_rule(spec: str, num_tokens: int) -> str | RelaxedRule:
    """`auto` and the lossless rules as they are; `name:key=value,...` with an override made. num_tokens: of the
    vocabulary. Beside its own options every relaxed rule has floor (least probability of an override), outer (1: the
    base must have it as well), max-overrides in any `window` tokens, and base=rejection for sampling."""
    name, values = parse_spec(spec, "rule")
    if name not in NAMES:
        raise RequestError(f"rule must be one of {', '.join(NAMES)}, got {spec!r}")
    if name not in OVERRIDES:
        refuse_rest(values, f"rule {name}", "none")
        return name
    what = f"rule {name}"
    released = name == "margin" and values.get("form") == "released"
    make, own = OVERRIDES[name]
    override = make(values, num_tokens)
    bounded, window = "max-overrides" in values, values.get("window")
    override = replace(
        override,
        log_floor=margin.log(take_float(values, "floor", 0.0, what, 0.0, 1.0)),
        outer_floor=bool(take_int(values, "outer", 0, what, low=0, high=1)),
        max_overrides=take_int(values, "max-overrides", 1, what) if bounded else 0,
        window=take_int(values, "window", HISTORY, what, high=HISTORY),
    )
    base = take_choice(values, "base", "rejection" if released else "match", what, ("match", "rejection"))
    refuse_rest(values, what, f"{own}, floor, outer, max-overrides, window, base")
    if window is not None and not bounded:
        raise RequestError(f"{what}: window={window} bounds nothing without max-overrides")
    if base == "rejection" and (override.lookahead or override.reach or override.outer_floor):
        raise RequestError(f"{what}: base=rejection decides node by node, without lookahead or an outer floor")
    if released and base == "match":
        raise RequestError(f"{what}: form=released is a walk over rejection, so base must be rejection")
    return RelaxedRule(name, override, BASES[base])


def bind(
    rule: str | AcceptanceRule | RelaxedRule, target: Decoder, num_tokens: int
) -> str | AcceptanceRule | RelaxedRule:
    """A rule for a target: made if it is a name, its classifier checked and on the target's device."""
    if not isinstance(rule, str | AcceptanceRule | RelaxedRule):
        raise RequestError(f"rule must be a name or a rule, got {rule!r}")
    rule = make_rule(rule, num_tokens) if isinstance(rule, str) else rule
    override = None if isinstance(rule, str) else rule.override
    if isinstance(rule, str) or override is None or (classifier := override.classifier) is None:
        return rule
    config = target.config
    if classifier.hidden_size != config.hidden_size or not 0 <= classifier.tap_layer < config.num_layers:
        raise RequestError(
            f"the classifier of rule {rule.name} reads {classifier.hidden_size} numbers behind layer "
            f"{classifier.tap_layer}, and this model has {config.hidden_size} and {config.num_layers} layers",
            f"it was trained for {classifier.target or 'another model'}",
        )
    return replace(rule, override=replace(override, classifier=classifier.to(target.device)))


def rule_for(rule: str | AcceptanceRule | RelaxedRule, params: SamplingParams) -> AcceptanceRule:
    """The rule of a request, from what make_rule made, or a rule object. `auto` is greedy at temperature 0 and match
    above."""
    if isinstance(rule, AcceptanceRule):
        return rule
    if isinstance(rule, RelaxedRule):
        return rule.on(params)
    if rule == "auto":
        return GREEDY if params.greedy else MATCH
    if rule == "greedy" and not params.greedy:
        raise RequestError(f"rule greedy needs temperature 0, got {params.temperature}", "use rule auto or match")
    return BASES[rule]
