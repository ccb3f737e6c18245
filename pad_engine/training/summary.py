"""What the answers under each setting amount to: utility, harm, speed in tokens a round, and rules compared at equal
numbers of overrides. Next to read: bounds.py for the intervals, report.py for the tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pad_engine.training.bounds import interval, paired_interval, sign_test, upper_bound
from pad_engine.training.evaluate import harmed
from pad_engine.training.results import Answered
from pad_engine.training.settings import DIRECT, TARGET, families

Answers = Mapping[str, Answered]  # by question
Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Summary:
    """One setting over n questions, beside the target alone on the same ones.

    utility: share of right answers, with its exact interval. harms: questions that only the target has right;
    harm_upper_bound: exact and one-sided. gains: those that only the setting has right; net: gains less harms over n,
    with its paired interval. truncated: not right and stopped at the limit of tokens; wrong: not right though the
    answer ended by itself. mean_accept_length: drafted tokens kept a round. Figures of drafts are None where nothing
    was drafted, or only to follow a rule without speculation. same_as_target: answers whose ids are the target's own,
    one for one.
    """

    setting: str
    questions: int
    right: int
    utility: float
    utility_interval: tuple[float, float]
    harms: int
    harm: float
    harm_upper_bound: float
    gains: int
    net: float
    net_interval: tuple[float, float]
    wrong: int
    truncated: int
    tokens: int
    rounds: int
    draft_tokens: int
    accepted_tokens: int
    tokens_per_round: float
    mean_accept_length: float | None
    acceptance_rate: float | None
    overrides: int
    overrides_per_100_tokens: float
    same_as_target: int


def summarise(setting: str, answers: Answers, target: Answers, confidence: float) -> Summary:
    """The figures of a setting. answers, target: of the same questions."""
    given, n = list(answers.values()), len(answers)
    right = sum(answer.right for answer in given)
    harms = sum(harmed(target, answers))
    gains = sum(harmed(answers, target))
    total = {name: sum(getattr(answer, name) for answer in given)
             for name in ("tokens", "rounds", "draft_tokens", "accepted_tokens")}  # fmt: skip
    rounds = total["rounds"]
    # there a drafted token that is kept ends its round and is not counted as accepted (baselines.py)
    drafted = 0 if setting.startswith(DIRECT) else total["draft_tokens"]
    truncated = sum(answer.finish_reason == "length" and not answer.right for answer in given)
    overrides = sum(len(answer.overrides) for answer in given)
    return Summary(
        setting=setting,
        questions=n,
        right=right,
        utility=right / n,
        utility_interval=interval(right, n, confidence),
        harms=harms,
        harm=harms / n,
        harm_upper_bound=upper_bound(harms, n, confidence),
        gains=gains,
        net=(gains - harms) / n,
        net_interval=paired_interval(gains, harms, n, confidence),
        wrong=n - right - truncated,
        truncated=truncated,
        **total,
        tokens_per_round=total["tokens"] / rounds,
        mean_accept_length=total["accepted_tokens"] / rounds if drafted else None,
        acceptance_rate=total["accepted_tokens"] / drafted if drafted else None,
        overrides=overrides,
        overrides_per_100_tokens=100 * overrides / total["tokens"],
        same_as_target=sum(answer.ids_sha256 == target[question].ids_sha256 for question, answer in answers.items()),
    )


def interpolated(curve: Curve, x: float) -> float | None:
    """The height of a curve at x, on straight lines between its points; None beyond its last one."""
    points = sorted(curve)
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y1 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


def at_equal_overrides(families: Mapping[str, Sequence[Summary]]) -> list[dict[str, Any]]:
    """The rate of harm of each family of settings at the numbers of overrides that those of the first one had: an
    override less often made is not a better one. Every family passes through no overrides and no harm."""
    curves = {name: [(0.0, 0.0), *((one.overrides, one.harm) for one in sweep)] for name, sweep in families.items()}
    first = next(iter(curves.values()), [])
    counts = sorted({overrides for overrides, _ in first if overrides > 0})
    return [
        {"overrides": count, "harm": {name: interpolated(curve, count) for name, curve in curves.items()}}
        for count in counts
    ]


@dataclass(frozen=True)
class Step:
    """Two settings next to each other in a sweep, strict to loose. fewer, more: questions that only the stricter, and
    only the looser, one harms. p_value: of so many fewer if the looser one harmed no less."""

    strict: str
    loose: str
    fewer: int
    more: int
    p_value: float


def falls(sweep: Sequence[tuple[str, Answers]], target: Answers, confidence: float) -> list[Step]:
    """The steps of a sweep, strict to loose, on which harm falls by more than chance explains; none is what a monotone
    sweep gives, with the stated confidence for all of its steps together (Bonferroni)."""
    steps = []
    for (strict, before), (loose, after) in pairwise(sweep):
        pairs = list(zip(harmed(target, before), harmed(target, after), strict=True))
        fewer, more = pairs.count((True, False)), pairs.count((False, True))
        steps.append(Step(strict, loose, fewer, more, sign_test(fewer, more)))
    return [step for step in steps if step.p_value <= (1 - confidence) / len(steps)]


@dataclass(frozen=True)
class Evaluation:
    """All of a run. settings: in the order they were named. families: of relaxed rules, each strict to loose. equal: as
    at_equal_overrides gives it. falls: where a looser setting certainly harms less."""

    settings: list[Summary]
    families: dict[str, list[Summary]]
    equal: list[dict[str, Any]]
    falls: list[Step]


def evaluation(answers: Mapping[str, Answers], specs: Sequence[str], confidence: float) -> Evaluation:
    """answers: by setting, TARGET among them. specs: of the relaxed rules."""
    target = answers[TARGET]
    summaries = {name: summarise(name, given, target, confidence) for name, given in answers.items()}
    members = families(specs)
    sweeps = {name: [summaries[spec] for spec in sweep] for name, sweep in members.items()}
    found = [
        step
        for sweep in members.values()
        for step in falls([(spec, answers[spec]) for spec in sweep], target, confidence)
    ]
    return Evaluation(list(summaries.values()), sweeps, at_equal_overrides(sweeps), found)
