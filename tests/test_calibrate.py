"""Calibration: the fixed sequence and its error, what is refused and why, and which questions may be asked."""

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from evaluating import Parity, Script, requests_of, text_of

from pad_engine.errors import RequestError
from pad_engine.training import calibrate
from pad_engine.training.apart import check_apart, trained_on, used_questions
from pad_engine.training.bounds import upper_bound
from pad_engine.training.calibrate import (
    Limit,
    Trial,
    certified,
    check_enough,
    check_rounding,
    check_target,
    enough,
    fixed_sequence,
    run_trials,
)
from pad_engine.training.evaluate import Setting, Work, draw
from pad_engine.training.results import Results
from pad_engine.training.tasks.task import Question

LIMIT = Limit(0.02, 0.95)


def test_settings_are_tested_up_to_the_first_that_fails() -> None:
    counts, asked = {0.1: 0, 0.2: 65, 0.3: 66, 0.4: 0}, []

    def harms() -> Iterator[tuple[float, int]]:
        for setting, count in counts.items():
            asked.append(setting)
            yield setting, count

    tested = fixed_sequence(harms(), 4000, LIMIT)
    assert asked == [0.1, 0.2, 0.3] and [one.passed for one in tested] == [True, True, False]
    assert certified(tested, LIMIT) == tested[:2]
    assert tested[1] == Trial(0.2, 4000, 65, upper_bound(65, 4000, 0.95), True)
    assert tested[1].harm_upper_bound <= 0.02 < tested[2].harm_upper_bound
    # where all pass, the loosest is certified
    assert certified(fixed_sequence([(0.5, 0), (0.9, 3)], 4000, LIMIT), LIMIT)[-1].setting == 0.9


@pytest.mark.parametrize(
    "curve",
    [
        (0.001, 0.01, 0.021, 0.05, 0.2),  # rises past the limit
        (0.02, 0.02, 0.02, 0.02, 0.02),  # at the limit everywhere, where nothing is false
        (0.021,) * 12,  # just past it everywhere: the most chances to pass falsely
        (0.005, 0.03, 0.005, 0.03, 0.004),  # falls again
        (0.022, 0.001, 0.03, 0.001),
    ],
)
def test_a_false_certificate_is_rare(curve: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over simulated calibrations, the certified setting's true rate of harm exceeds the limit in at most 5 % of runs,
    whether settings harm the same questions or draw their own."""
    monkeypatch.setattr(calibrate, "upper_bound", lru_cache(upper_bound))
    rng, n, runs = np.random.default_rng(5), 700, 4000
    for shared in (True, False):
        uniforms = rng.random((runs, n)) if shared else None
        counts = np.stack(
            [rng.binomial(n, p, runs) if uniforms is None else (uniforms < p).sum(1) for p in curve], axis=1
        )
        false = 0
        for row in counts.tolist():
            passed = [one for one in fixed_sequence(enumerate(row), n, LIMIT) if one.passed]
            false += any(curve[int(one.setting)] > LIMIT.max_loss for one in passed)
        # 0.05 and three standard errors of the simulation
        assert false / runs <= 0.05 + 3 * (0.05 * 0.95 / runs) ** 0.5


def test_too_few_questions_are_refused_with_the_number_needed() -> None:
    check_enough(299, Limit(0.01, 0.95))
    with pytest.raises(RequestError, match=re.escape("298 questions cannot certify a harm of at most 0.01")) as caught:
        check_enough(298, Limit(0.01, 0.95))
    assert "299 are needed if none is harmed, and 473 if one is" in str(caught.value)


def test_a_strictest_setting_that_fails_is_refused_with_what_would_do() -> None:
    with pytest.raises(RequestError, match=r"strictest setting, 0.1, harms 7 of 400 .* allows 3 harms") as caught:
        certified(fixed_sequence([(0.1, 7), (0.2, 0)], 400, LIMIT), LIMIT)
    n = enough(7 / 400, LIMIT)
    assert f"about {n} questions would do" in caught.value.hint
    assert (
        upper_bound(round(7 / 400 * n), n, 0.95) <= 0.02 < upper_bound(round(7 / 400 * n * 0.9), round(n * 0.9), 0.95)
    )
    with pytest.raises(RequestError, match="nothing can be certified") as caught:
        certified(fixed_sequence([(0.1, 9)], 400, LIMIT), LIMIT)
    assert "more questions alone will not help" in caught.value.hint


def test_a_target_that_is_seldom_right_says_nothing() -> None:
    check_target(149, 4000, LIMIT)
    with pytest.warns(UserWarning, match="only 148 of 4000 questions right; a harm of 0.02 .* would be 54% of those"):
        check_target(148, 4000, LIMIT)
    with pytest.raises(RequestError, match="has 65 of 4000 questions right: any rule would pass"):
        check_target(65, 4000, LIMIT)


@pytest.mark.parametrize("limit", [(0.0, 0.95), (1.0, 0.95), (0.02, 1.0), (float("nan"), 0.9)])
def test_limits_are_probabilities(limit: tuple[float, float]) -> None:
    with pytest.raises(RequestError, match=r"must be in \(0, 1\)"):
        Limit(*limit)


def lengths_of(questions: Sequence[Question], right: set[int]) -> dict[str, int]:
    """Of answers that are right for the questions at these places alone."""
    return {q.id: 2 + (q.answer if i in right else 1 - q.answer) for i, q in enumerate(questions)}


def test_harm_is_paired_by_question_and_nothing_is_decoded_twice(tmp_path: Path) -> None:
    """Of 40 questions the target has 30 right. Two settings have as many right; one of them on other questions."""
    task, limit = Parity(), Limit(0.1, 0.9)
    questions = draw(task, "calibration", 40, 0)
    right = {"target": set(range(30)), "strict": set(range(30)), "loose": set(range(5, 35)), "never": set()}
    lengths = {name: lengths_of(questions, good) for name, good in right.items()}
    settings = {float(i): Setting(name, "greedy", 8) for i, name in enumerate(("strict", "loose", "never"), 1)}
    decode = Script(lengths)

    def tested(script: Script) -> list[Trial]:
        work = Work(task, script, text_of, Results(tmp_path / "r.jsonl", {"a": 1}))
        target = Setting("target", "greedy", 0)
        return run_trials(target, settings, questions, requests_of(task, questions), work, limit)

    found = tested(decode)
    assert [(one.setting, one.harms, one.passed) for one in found] == [(1.0, 0, True), (2.0, 5, False)]
    # the looser one is answered beside the others, up to the last question that they needed, and not tested
    together = [name for _ in range(40) for name in ("strict", "loose", "never")][:-1]
    assert [name for name, _ in decode.asked] == ["target"] * 40 + together
    again = Script(lengths)
    assert tested(again) == found and not again.asked


@pytest.mark.parametrize(("changed", "warned"), [(3, False), (5, True)])
def test_harm_by_rounding_alone_is_said(tmp_path: Path, changed: int, warned: bool) -> None:
    """Lossless speculation that gives other answers to some questions which the target has right. 4 of 40 are a tenth
    of what may be lost here."""
    task, limit = Parity(), Limit(0.99, 0.9)
    questions = draw(task, "calibration", 40, 0)
    right = {"target": set(range(30)), "greedy": set(range(changed, 30))}
    lengths = {name: lengths_of(questions, good) for name, good in right.items()}
    work = Work(task, Script(lengths), text_of, Results(tmp_path / "r.jsonl", {"a": 1}))
    both = Setting("target", "greedy", 0), Setting("greedy", "greedy", 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_rounding(*both, questions, requests_of(task, questions), work, limit)
    said = [str(one.message) for one in caught]
    assert bool(said) == warned and all(f"harms {changed} of 40 questions, by rounding" in text for text in said)


def test_questions_that_were_used_are_refused_by_name(tmp_path: Path) -> None:
    labels, card = tmp_path / "labels.jsonl", tmp_path / "pivot.json"
    lines = ('{"header": {"task": "t"}}', '{"question": "a"}', '{"question": "b"}', '{"question": "e", "done": true}')
    # killed within a character
    labels.write_bytes("\n".join((*lines, '{"question": "\u00fc')).encode()[:-1])
    card.write_text(json.dumps({"kind": "pivot-mlp", "questions": ["c", "d"]}))
    assert used_questions(labels) == {"a", "b", "e"} and used_questions(card) == {"c", "d"}
    assert trained_on(tmp_path / "pivot.safetensors") == {"c", "d"}
    used = {"labels.jsonl": {"a", "b"}, "pivot.json": {"c", "d"}}
    check_apart(["x", "y"], "test", used)
    with pytest.raises(RequestError, match=r"2 questions of the calibration split were used by pivot\.json, 'c' among"):
        check_apart(["x", "d", "c"], "calibration", used)
    card.write_text('{"kind": "pivot-mlp"}')
    assert trained_on(tmp_path / "pivot.safetensors") == set()
    for path, words in (
        (card, "names no questions"),
        (tmp_path / "none.json", "cannot be read"),
        (tmp_path, "cannot be"),
    ):
        with pytest.raises(RequestError, match=words):
            used_questions(path)
