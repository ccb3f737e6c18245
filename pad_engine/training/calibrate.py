"""How far a rule may be relaxed: the loosest setting whose harm is certainly small.

A question is harmed if the target alone answers it rightly and the relaxed rule does not. Settings are tested from
strict to loose, each by the exact upper bound of its rate of harm at the full confidence, up to the first that fails;
the last that passed is certified. Testing hypotheses in an order that is fixed beforehand, and stopping at the first
that is kept, needs no correction for their number: a false certificate takes a false pass of the first setting in the
order that is truly too harmful, which has probability 1 - confidence at most, however the settings' answers depend on
each other (Maurer, Hothorn and Lehmacher 1995; Bauer, Statistics in Medicine 10, 1991). With risks in place of
hypotheses that is Learn then Test with fixed sequence testing (Angelopoulos et al., arXiv 2110.01052). Harm need not
grow along the order for this to hold; where it does, little is lost by stopping. A second try with another order or
other questions is another test: the file of results holds both, and refuses to change them. The certificate is about
questions drawn as the calibration questions were. Next to read: evaluate.py, where the answers come from.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pad_engine.errors import RequestError
from pad_engine.forest_request import ForestRequest
from pad_engine.training.bounds import binomial_cdf, max_count, min_questions, upper_bound
from pad_engine.training.evaluate import Setting, Work, answer_all, answer_each, harmed
from pad_engine.training.tasks.task import Question


@dataclass(frozen=True)
class Limit:
    """max_loss: the largest rate of harm that may be certified. confidence: that the true rate is not above it."""

    max_loss: float = 0.02
    confidence: float = 0.95

    def __post_init__(self) -> None:
        for name in ("max_loss", "confidence"):
            if not 0 < (value := getattr(self, name)) < 1:
                raise RequestError(f"{name.replace('_', '-')} must be in (0, 1), got {value}")

    def __str__(self) -> str:
        return f"a harm of at most {self.max_loss:g} at confidence {self.confidence:g}"


@dataclass(frozen=True)
class Trial:
    """One setting of the sequence: harmed questions, and the largest rate of harm that they leave possible."""

    setting: float
    questions: int
    harms: int
    harm_upper_bound: float
    passed: bool


def run_trials(
    target: Setting,
    sequence: Mapping[float, Setting],
    questions: Sequence[Question],
    requests: Sequence[ForestRequest],
    work: Work,
    limit: Limit,
) -> list[Trial]:
    """Answer the questions by the target alone and by the settings, and test these one after the other as long as they
    pass. Looser ones are answered beside them, as the settings' answers have most in common."""
    reference = answer_all(target, questions, requests, work)
    check_target(sum(answer.right for answer in reference.values()), len(questions), limit)

    def harms() -> Iterator[tuple[float, int]]:
        found = answer_each(list(sequence.values()), questions, requests, work)
        yield from ((value, sum(harmed(reference, answers))) for value, answers in zip(sequence, found, strict=True))

    return fixed_sequence(harms(), len(questions), limit)


def check_rounding(
    target: Setting,
    lossless: Setting,
    questions: Sequence[Question],
    requests: Sequence[ForestRequest],
    work: Work,
    limit: Limit,
) -> None:
    """Warn where lossless speculation itself harms more than a tenth of what is allowed: every setting does so too. To
    be asked of types narrower than fp32, in which a pass of several rows a sequence rounds otherwise than one of
    single rows."""
    reference = answer_all(target, questions, requests, work)
    harms = sum(harmed(reference, answer_all(lossless, questions, requests, work)))
    if harms > limit.max_loss * len(questions) / 10:
        warnings.warn(
            f"lossless speculation itself harms {harms} of {len(questions)} questions, by rounding in this type alone, "
            "and so does every setting beside what it relaxes; --dtype float32 rounds far less",
            stacklevel=2,
        )


def fixed_sequence(harms: Iterable[tuple[float, int]], questions: int, limit: Limit) -> list[Trial]:
    """Test settings in their order up to the first that fails, and ask for no harms beyond it. harms: of each setting
    the number of harmed questions, strict to loose."""
    tested = []
    for setting, count in harms:
        bound = upper_bound(count, questions, limit.confidence)
        tested.append(Trial(setting, questions, count, bound, bound <= limit.max_loss))
        if not tested[-1].passed:
            break
    return tested


def certified(tested: list[Trial], limit: Limit) -> list[Trial]:
    """Those that passed; the last one is certified. RequestError, with what would be needed, if there is none."""
    if passed := [one for one in tested if one.passed]:
        return passed
    first = tested[0]
    allowed = max_count(first.questions, limit.max_loss, limit.confidence)
    rate = first.harms / first.questions
    more = "more questions alone will not help, as its rate of harm itself is above that"
    if rate < limit.max_loss:
        more = f"were the rate of harm to stay {rate:.2g}, about {enough(rate, limit)} questions would do"
    raise RequestError(
        f"nothing can be certified: the strictest setting, {first.setting:g}, harms {first.harms} of {first.questions} "
        f"questions, so its rate of harm may be {first.harm_upper_bound:.4f}; {limit} allows {allowed} harms",
        f"{more}; or test stricter settings first (--settings), or allow more (--max-loss)",
    )


def enough(rate: float, limit: Limit) -> int:
    """Questions with which a setting of this rate of harm would pass."""
    n = min_questions(0, limit.max_loss, limit.confidence)
    while binomial_cdf(round(rate * n), n, limit.max_loss) > 1 - limit.confidence:
        n += max(n // 50, 1)
    return n


def check_enough(questions: int, limit: Limit) -> None:
    """RequestError if not even a setting without harm could pass."""
    needed = min_questions(0, limit.max_loss, limit.confidence)
    if questions < needed:
        raise RequestError(
            f"{questions} questions cannot certify {limit}: {needed} are needed if none is harmed, and "
            f"{min_questions(1, limit.max_loss, limit.confidence)} if one is",
            "give more --questions, or allow more with --max-loss",
        )


def check_target(right: int, questions: int, limit: Limit) -> None:
    """Refuse, or warn of, a target that has so little right that harm can hardly be seen."""
    if right <= max_count(questions, limit.max_loss, limit.confidence):
        raise RequestError(
            f"the target alone has {right} of {questions} questions right: any rule would pass, and the certificate "
            "would say nothing",
            "choose a task that the target can do",
        )
    if right < min_questions(0, limit.max_loss, limit.confidence):
        warnings.warn(
            f"the target alone has only {right} of {questions} questions right; a harm of {limit.max_loss:g} of all "
            f"questions would be {limit.max_loss * questions / right:.0%} of those",
            stacklevel=2,
        )
