"""Evaluation: settings and their order, the file of results, figures and tables."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from evaluating import Parity, Script, answered, requests_of, text_of
from relaxing import VOCAB, random_record
from tiny import random_classifier

from pad_engine.errors import RequestError
from pad_engine.forest_request import ForestAnswer, ForestRequest
from pad_engine.rules.classifier import LINEAR_JUDGE, PIVOT_MLP
from pad_engine.rules.override import judged_nodes
from pad_engine.rules.select import RelaxedRule
from pad_engine.training.baselines import make_any_rule
from pad_engine.training.evaluate import Setting, Work, answer_all, answer_each, draw, questions_digest
from pad_engine.training.results import Override, Results
from pad_engine.training.settings import SWEEPS, families, named, ordered, sweep_of, with_setting
from pad_engine.training.summary import at_equal_overrides, evaluation, falls, interpolated, summarise
from pad_engine.training.tasks.task import Question

# --- settings


# a coin looks at no record: tests/test_baselines.py
@pytest.mark.parametrize("kind", [kind for kind in SWEEPS if kind not in ("random", "kl")])
def test_every_sweep_goes_from_strict_to_loose(kind: str, tmp_path: Path) -> None:
    """On random records each setting keeps all that the one before it kept, and the last keeps more than the first."""
    name, _, form = kind.partition(" ")
    files = {"pivot": PIVOT_MLP, "judge": LINEAR_JUDGE}
    model = f"model={random_classifier(tmp_path, files[name], 8, 1)}" if name in files else ""
    spec = ":".join(filter(None, (name, f"form={form}" if form else model)))
    sweep, rng = sweep_of(spec), np.random.default_rng(2)
    assert sweep == SWEEPS[kind]
    overrides = []
    for value in sweep.values:
        rule = make_any_rule(with_setting(spec, sweep.option, value), VOCAB)
        assert isinstance(rule, RelaxedRule)
        overrides.append(rule.override)
    total = [0] * len(overrides)
    for record in (random_record(rng)[0] for _ in range(40)):
        kept = [override.decide(judged_nodes(record, override), override.thresholds) for override in overrides]
        for strict, loose in pairwise(kept):
            assert not (strict & ~loose).any()
        total = [count + int(one.sum()) for count, one in zip(total, kept, strict=True)]
    assert total[0] < total[-1]


def test_settings_of_a_command_line() -> None:
    assert named("greedy; margin:theta=0.9|0.8,floor=0.1 ;topk") == [
        "greedy", "margin:theta=0.9,floor=0.1", "margin:theta=0.8,floor=0.1", "topk",
    ]  # fmt: skip
    assert ordered(sweep_of("margin"), "0.5,0.9,0.7") == (0.9, 0.7, 0.5)
    assert ordered(sweep_of("pivot:model=x"), "0.5,0.25") == (0.25, 0.5)
    assert (
        with_setting("topk", "k", 3.0) == "topk:k=3"
        and with_setting("pivot:model=f", "sigma", 0.25) == "pivot:model=f,sigma=0.25"
    )
    specs = ["margin:theta=0.5", "margin:form=gap,m=0.5", "margin:theta=0.9", "typical", "margin:form=gap,m=0.1", "fly"]
    assert families(specs) == {
        "margin": ["margin:theta=0.9", "margin:theta=0.5"],
        "margin:form=gap": ["margin:form=gap,m=0.1", "margin:form=gap,m=0.5"],
        "typical (as it is)": ["typical"],
        "fly (as it is)": ["fly"],
    }
    for text, words in (("", "names no rule"), ("a;a", "names a twice")):
        with pytest.raises(RequestError, match=words):
            named(text)
    for spec in ("greedy", "margin:form=released"):
        with pytest.raises(RequestError, match="no settings from strict to loose"):
            sweep_of(spec)
    for text in ("0.1,x", "0.1,0.1", "nan"):
        with pytest.raises(RequestError, match="--settings must be"):
            ordered(sweep_of("topk"), text)


# --- answers and their file


def work_of(path: Path, script: Script, **header: object) -> Work:
    return Work(Parity(), script, text_of, Results(path, {"task": "parity", "machine": {"cpus": 2}} | header))


def test_answers_are_kept_and_a_killed_run_goes_on(tmp_path: Path) -> None:
    path, setting = tmp_path / "r.jsonl", Setting("topk:k=2", "greedy", 8)
    questions = draw(Parity(), "test", 6, 3)
    lengths = {"topk:k=2": {q.id: 3 for q in questions}}
    requests = requests_of(Parity(), questions)
    found = answer_all(setting, questions, requests, work_of(path, Script(lengths)))
    assert [a.right for a in found.values()] == [q.answer for q in questions] and list(found) == [
        q.id for q in questions
    ]
    first = found[questions[0].id]
    assert first.overrides == [Override(1, 0.25, 1.5, 0.25, None)] and (first.text, first.tokens) == ("xxx", 3)
    assert (first.answer, first.rounds, first.draft_tokens, first.accepted_tokens) == ("1", 3, 8, 4)
    # questions throw coins of their own
    assert len({request.params.seed for request in requests}) == 6
    whole = path.read_bytes()
    for cut in (1, 40):
        path.write_bytes(whole[:-cut])
        again = Script(lengths)
        # another machine may go on
        assert answer_all(setting, questions, requests, work_of(path, again, machine={"cpus": 64})) == found
        assert len(again.asked) == 1 and path.read_bytes() == whole
    for lines in (0, 1, 2, 5):
        path.write_bytes(b"".join(whole.splitlines(keepends=True)[:lines]))
        again = Script(lengths)
        assert answer_all(setting, questions, requests, work_of(path, again)) == found
        assert len(again.asked) == 6 - max(lines - 2, 0) and path.read_bytes() == whole


def test_settings_that_draft_alike_are_answered_together(tmp_path: Path) -> None:
    """Those of a question side by side, in any order of completion; each setting is there once all of its answers are,
    and what was answered ahead is kept, and not asked for again."""
    questions = draw(Parity(), "test", 4, 3)
    settings = [Setting("target", "greedy", 0)] + [Setting(f"topk:k={k}", "greedy", 8) for k in (2, 3, 4)]
    lengths = {setting.name: {q.id: 3 for q in questions} for setting in settings}
    script, calls = Script(lengths), []

    def decode(asked: Iterable[tuple[Setting, ForestRequest]]) -> Iterator[tuple[Setting, ForestAnswer]]:
        calls.append(asked := list(asked))
        # the last setting's answers come last, all of them
        asked = sorted(asked, key=lambda one: one[0] is settings[-1])
        yield from script((setting, one) for setting, one in asked)

    requests = requests_of(Parity(), questions)
    work = Work(Parity(), decode, text_of, Results(tmp_path / "r.jsonl", {"task": "parity"}))
    found = answer_each(settings, questions, requests, work)
    first, second, third = next(found), next(found), next(found)
    assert [list(one) for one in (first, second, third)] == [[q.id for q in questions]] * 3
    assert [(setting.name, one.key) for setting, one in calls[1]] == [
        (setting.name, q.id) for q in questions for setting in settings[1:]
    ]
    assert len(script.asked) == 4 + 8
    found.close()
    again = Work(Parity(), decode, text_of, Results(tmp_path / "r.jsonl", {"task": "parity"}))
    assert list(answer_each(settings, questions, requests, again))[:3] == [first, second, third]
    assert [len(asked) for asked in calls] == [4, 12, 4]


def test_other_settings_and_broken_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    Results(path, {"task": "a", "depth": 8}).begin("pivot:sigma=0.1", {"depth": 8, "classifier": "aa"})
    with pytest.raises(RequestError, match="begun with depth 8, and this run has 4"):
        Results(path, {"task": "a", "depth": 4})
    with pytest.raises(RequestError, match="begun without model, and this run has 'm'"):
        Results(path, {"task": "a", "depth": 8, "model": "m"})
    with pytest.raises(RequestError, match="begun without model, and this run has None"):
        Results(path, {"task": "a", "depth": 8, "model": None})
    with pytest.raises(RequestError, match="begun with depth 8, and this run has none"):
        Results(path, {"task": "a"})
    with pytest.raises(RequestError, match=r"begun with classifier 'aa', and setting pivot:sigma=0\.1 has 'bb'"):
        Results(path, {"task": "a", "depth": 8}).begin("pivot:sigma=0.1", {"depth": 8, "classifier": "bb"})
    path.write_text(path.read_text() + "{}x\n" + '{"setting": "s"}\n')
    with pytest.raises(RequestError, match="line 3 is no line of results"):
        Results(path, {"task": "a", "depth": 8})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json\n", "holds no results: its first line does not begin with"),
        ('{"answers": [1, 2]}', "holds no results"),  # all of it in a line that nothing ends
        ('{"question": "a"}\n{"question": "b"}', "holds no results"),
        ('{"header": 3}\n', "line 1 is no line of results"),
        ('{"header": {"task": "b"}}\n{"setting": "s"}\n{"sett', "begun with task 'b', and this run has 'a'"),
        ('{"header": {"task": "a"}}\n{"setting": "s"}\n{}\n{"sett', "line 3 is no line of results"),
    ],
)
def test_a_file_that_is_refused_is_left_as_it_is(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(content)
    with pytest.raises(RequestError, match=words):
        Results(path, {"task": "a"})
    assert path.read_text() == content


@pytest.mark.parametrize("left", [0, 1, 9, 15, -1, None])
def test_a_header_that_was_not_whole_is_written_again(left: int | None, tmp_path: Path) -> None:
    path, line = tmp_path / "r.jsonl", '{"header": {"task": "a"}}\n'
    path.write_text(line[:left])
    assert Results(path, {"task": "a"}).header == {"task": "a"} and path.read_text() == line


def test_a_split_must_have_the_questions() -> None:
    with pytest.raises(RequestError, match="has 40 questions in its test split, and 41 are asked for"):
        draw(Parity(), "test", 41, 0)


def test_a_digest_of_questions_is_that_of_all_that_is_asked() -> None:
    """In any order, so that a task that shuffles them is no other; what JSON cannot hold is named."""
    questions = [Question("a", "1 + 1", 2), Question("b", [{"role": "user", "content": "2 + 2"}], {"is": [4]})]
    digest = questions_digest(questions)
    assert questions_digest(questions[::-1]) == digest
    for change in ({"id": "c"}, {"prompt": "1 + 2"}, {"answer": "2"}):
        assert questions_digest([replace(questions[0], **change), questions[1]]) != digest
    assert questions_digest(questions[:1]) != digest
    with pytest.raises(RequestError, match="question c is expected to be of what JSON can hold"):
        questions_digest([*questions, Question("c", "?", {1})])


# --- figures


def test_figures_of_answers_written_by_hand() -> None:
    target = answered("target", [1] * 6 + [0] * 4)
    loose = answered("topk:k=3", [0, 0, 0, 1, 1, 1, 1, 0, 0, 0], overrides=2, cut=[0, 7, 3])
    one = summarise("topk:k=3", loose, target, 0.95)
    assert (one.right, one.harms, one.gains, one.wrong, one.truncated) == (4, 3, 1, 4, 2)
    assert one.utility == 0.4 and one.net == pytest.approx(-0.2) and one.net_interval[0] < -0.2 < one.net_interval[1]
    assert one.harm_upper_bound == pytest.approx(0.60662, abs=1e-5)  # of 3 among 10, Clopper and Pearson
    assert one.utility_interval == pytest.approx((0.12155, 0.73762), abs=1e-5)
    assert (one.acceptance_rate, one.mean_accept_length, one.tokens_per_round) == (0.5, 1.5, 2.5)
    assert (one.overrides, one.overrides_per_100_tokens, one.same_as_target) == (20, 20.0, 0)
    same = summarise("target", target, target, 0.95)
    assert (same.harms, same.gains, same.net, same.same_as_target) == (0, 0, 0.0, 10)
    # without speculation a kept draft is no accepted one
    direct = summarise("direct topk:k=3", loose, target, 0.95)
    assert (direct.acceptance_rate, direct.mean_accept_length, direct.tokens_per_round) == (None, None, 2.5)


def test_harm_is_compared_at_equal_numbers_of_overrides() -> None:
    target = answered("target", [1] * 10)

    def sweep(*points: tuple[int, int]):
        return [summarise(str(n), answered(str(n), [0] * bad + [1] * (10 - bad), overrides=n), target, 0.9)
                for n, bad in points]  # fmt: skip

    rows = at_equal_overrides(
        {"pivot": sweep((1, 0), (3, 2)), "margin": sweep((2, 4)), "random": sweep((4, 8), (1, 2))}
    )
    assert [row["overrides"] for row in rows] == [10, 30]
    assert rows[0]["harm"] == pytest.approx({"pivot": 0.0, "margin": 0.2, "random": 0.2})
    assert rows[1]["harm"] == {"pivot": pytest.approx(0.2), "margin": None, "random": pytest.approx(0.6)}
    assert interpolated([(0, 0), (0, 1), (2, 3)], 0) is not None and interpolated([], 1) is None


def test_a_sweep_that_falls_is_found() -> None:
    target = answered("target", [1] * 60)
    bad = {"a": 2, "b": 12, "c": 1, "d": 0}
    sweep = [(name, answered(name, [0] * n + [1] * (60 - n))) for name, n in bad.items()]
    found = falls(sweep, target, 0.95)
    # from c to d one question less, which chance explains
    assert [(step.strict, step.loose, step.fewer, step.more) for step in found] == [("b", "c", 11, 0)]
    assert found[0].p_value == pytest.approx(2.0**-11)
    assert falls(sweep[:1], target, 0.95) == []


def test_an_evaluation_is_json_and_a_table(tmp_path: Path) -> None:
    from dataclasses import asdict

    from pad_engine.training.report import markdown, plot

    answers = {"target": answered("target", [1, 1, 0, 1]), "draft": answered("draft", [0, 0, 0, 1])}
    answers |= {name: answered(name, [1, 1, 0, 1]) for name in ("greedy", "topk:k=3", "topk:k=2")}
    answers["margin:theta=0.9"] = answered("margin:theta=0.9", [1, 0, 0, 1], overrides=3)
    answers["direct topk:k=2"] = answered("direct topk:k=2", [1, 1, 0, 1])
    found = evaluation(answers, ["topk:k=3", "margin:theta=0.9", "topk:k=2"], 0.95)
    assert [one.setting for one in found.families["topk"]] == ["topk:k=2", "topk:k=3"]
    assert json.loads(json.dumps(asdict(found), allow_nan=False))["settings"][0]["setting"] == "target"
    speeds = {name: {"tokens_per_second": value} for name, value in (("target", 8.0), ("greedy", 12.0), ("draft", 9.0))}
    text = markdown(found, speeds | {"draft": speeds["draft"] | {"machine": "another"}})
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert {len(row) for row in rows[:9]} == {13} and rows[4][-1] == "12.0 (1.50x) |"
    assert rows[3][-1] == "9.0 |"  # of what another machine has measured there is no ratio
    assert rows[8][0] == "| direct topk:k=2" and rows[8][6:9] == ["-", "-", "2.50"]
    assert "ids for 0 of 4 questions" in text
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert not plot(tmp_path / "p.png", found) and not list(tmp_path.iterdir())
        pytest.skip("matplotlib is not installed, so the plot was NOT tested")
    assert plot(tmp_path / "p.png", found)
    assert [path.name for path in tmp_path.iterdir()] == ["p.png"]
    assert re.match(rb"\x89PNG", (tmp_path / "p.png").read_bytes())
