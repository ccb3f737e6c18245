"""The rule of a request, from the engine's choice and the request's temperature."""

from pad_engine.config import SamplingParams
from pad_engine.errors import RequestError
from pad_engine.rules.greedy import GREEDY
from pad_engine.rules.match import MATCH
from pad_engine.rules.rejection import REJECTION
from pad_engine.rules.rule import AcceptanceRule

RULES = {rule.name: rule for rule in (GREEDY, MATCH, REJECTION)}


def check_rule(rule: str | AcceptanceRule) -> None:
    """RequestError unless it is a rule, or the name of one."""
    if not isinstance(rule, AcceptanceRule) and rule != "auto" and rule not in RULES:
        raise RequestError(f"rule must be auto or one of {', '.join(RULES)}, got {rule!r}")


def rule_for(rule: str | AcceptanceRule, params: SamplingParams) -> AcceptanceRule:
    """`auto` is greedy at temperature 0 and match above."""
    check_rule(rule)
    if isinstance(rule, AcceptanceRule):
        return rule
    if rule == "auto":
        return GREEDY if params.greedy else MATCH
    if rule == "greedy" and not params.greedy:
        raise RequestError(f"rule greedy needs temperature 0, got {params.temperature}", "use rule auto or match")
    return RULES[rule]
