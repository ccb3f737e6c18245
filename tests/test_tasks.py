"""Tasks: the final answer as people read it, splits that share nothing, and one clear error for a bad file or name."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tiny import Make, tiny_engine

from pad_engine import SamplingParams
from pad_engine.errors import RequestError
from pad_engine.training.tasks.extraction import KINDS, Extraction
from pad_engine.training.tasks.final_number import final_number
from pad_engine.training.tasks.gsm8k import GSM8K, SHOT_ANSWER
from pad_engine.training.tasks.same_answer import SameAnswer, read_references, write_references
from pad_engine.training.tasks.select import make_task
from pad_engine.training.tasks.splits import SPLITS, pick, split_of
from pad_engine.training.tasks.task import Question, Task

EXAMPLES = Path(__file__).parent.parent / "examples"


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 42.", "42"),
        ("First 3, then $1,234.50.", "1234.5"),
        ("#### 42", "42"),
        ("5 apples\n#### -1,200.00 dollars", "-1200"),
        ("#### $18\nQuestion: what is 3 + 4?\n#### 7", "18"),  # the model went on by itself
        ("so 7\n####", None),  # cut off
        (r"\boxed{42}, which is 7 more", "42"),
        (r"\boxed{1{,}200}", "1200"),
        (r"\boxed{x} = 3", "3"),
        ("10 - 7 = 3 and 3-10=-7", "-7"),
        ("it is 10-7", "7"),
        ("1,2,3", "3"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("\u22125", "-5"),
        ("007 or -0.0", "0"),
        (".5", "0.5"),
        ("50%", "50"),
        ("2/3", "3"),
        ("version 1.2.", "1.2"),
        ("none at all", None),
        ("", None),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == number


def test_splits_share_nothing_and_do_not_depend_on_order() -> None:
    texts = [f"How much is {i} plus {i}?" for i in range(600)]
    pairs = [(text, Question(text, text, None)) for text in texts]
    found = {split: [question.id for question in pick(pairs, split, None, 0)] for split in SPLITS}
    assert sorted(found["train"] + found["calibration"] + found["test"]) == sorted(texts)
    assert all(150 < len(part) < 250 for part in found.values())
    assert [question.id for question in pick(reversed(pairs), "test", None, 0)] == found["test"]
    assert [question.id for question in pick(pairs, "test", 9, 0)] == found["test"][:9]
    other = [question.id for question in pick(pairs, "test", None, 1)]
    assert other != found["test"] and sorted(other) == sorted(found["test"])
    assert split_of("How  MUCH is 1 plus\n1?") == split_of("how much is 1 plus 1?")
    with pytest.raises(RequestError, match="split must be one of train, calibration, test, got 'dev'"):
        pick(pairs, "dev", None, 0)


def test_gsm8k(tmp_path: Path) -> None:
    records = [
        {"question": f"Add {i} and 1.", "answer": f"{i} + 1 = <<{i}+1={i + 1}>>\n#### {i + 1}"} for i in range(30)
    ]
    path = lines(tmp_path / "gsm8k.jsonl", *records, records[3] | {"question": "add 3  and 1."})
    task = make_task(f"gsm8k:path={path},shots=1")
    questions = [question for split in SPLITS for question in task.questions(split)]
    assert len(questions) == len({question.id for question in questions}) == 30  # the repeated one once
    for question in questions:
        user, assistant, asked = question.prompt
        assert [user["role"], assistant["role"], asked["role"]] == ["user", "assistant", "user"]
        number = int(asked["content"].split()[1])
        assert question.answer == str(number + 1)
        assert task.utility(question, records[number]["answer"]) == 1
        assert task.utility(question, f"So it is {number + 1}.0, as I said") == 1
        assert task.utility(question, f"#### {number + 2}") == task.utility(question, "no idea") == 0
    assert final_number(SHOT_ANSWER) == str(6 * 14 * 3 // 4 * 3)
    (plain,) = next(make_task(f"gsm8k:path={path}").questions("test")).prompt
    assert plain["role"] == "user" and "####" in plain["content"]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b'{"question": "a", "answer": "#### 1"}\n{"question": ', "line 2 is not JSON"),
        (b"[1]", "line 1: expected a JSON object, got list"),
        (b'{"question": "a"}', "line 1: expected text under 'answer', got None"),
        (b'{"question": "a", "answer": "1"}', "question 1: the answer does not end in"),
        (b"\xff", "cannot be read"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "gsm8k.jsonl"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=match) as caught:
        GSM8K(path)
    assert str(path) in str(caught.value)
    with pytest.raises(RequestError, match="cannot be read"):
        GSM8K(tmp_path / "none.jsonl")


def test_gzip_and_separators_of_unicode(tmp_path: Path) -> None:
    # U+2028 ends a line for str.splitlines, but not in JSON lines
    content = json.dumps({"question": "a\u2028b", "answer": "#### 1"}, ensure_ascii=False).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    assert GSM8K(tmp_path / "a.jsonl.gz").records == [("a\u2028b", "#### 1")]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content)[:-9])
    with pytest.raises(RequestError, match="cannot be read"):
        GSM8K(tmp_path / "b.jsonl.gz")


def test_extraction_is_told_in_all_ways_and_judged_key_for_key() -> None:
    task = Extraction()
    questions = {split: list(task.questions(split, 400)) for split in SPLITS}
    texts = {split: {q.prompt[0]["content"] for q in part} for split, part in questions.items()}
    assert not texts["train"] & texts["test"] and not texts["calibration"] & (texts["train"] | texts["test"])
    assert questions["test"][7] == next(q for i, q in enumerate(task.questions("test")) if i == 7)
    told = set()
    for question in questions["test"]:
        record, asked = json.loads(question.answer), question.prompt[0]["content"]
        kind = next(kind for kind in KINDS if kind.values.keys() == record.keys())
        told |= {text for text in kind.texts if asked.startswith(text.format(**record) + "\n")}
        right = f"Sure: {json.dumps(record, indent=2)} and {{}}"
        assert task.utility(question, right) == 1
        number = next(key for key, value in record.items() if isinstance(value, int))
        for wrong in ({number: str(record[number])}, {number: record[number] + 1}, {"more": 1}):
            assert task.utility(question, json.dumps(record | wrong)) == 0
        assert task.utility(question, json.dumps({key: record[key] for key in list(record)[1:]})) == 0
        assert task.utility(question, json.dumps(record | {number: float(record[number])})) == 1
    assert told == {text for kind in KINDS for text in kind.texts}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('x {"b": 1.0, "a": [2.5, true]} y {"c": 1}', '{"a": [2.5, true], "b": 1}'),
        ('{not json} {"a": "}"}', '{"a": "}"}'),
        ('{"a": 1', None),
        ('{"a": NaN}', None),
        ("[1]", None),
        ('{"a":' * 100_000, None),
    ],
)
def test_first_object_of_a_text(text: str, found: str | None) -> None:
    assert Extraction().extract(text) == found


def test_same_answer_on_the_targets_own_text(tmp_path: Path, make_model: Make) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"line {i}" for i in range(12)) + "\r\n\n")
    spec = f"same-answer:prompts={prompts},extract=text"
    blind = make_task(spec)
    assert isinstance(blind, SameAnswer)
    blind.max_tokens = 8
    engine = tiny_engine(make_model(), drafter="ngram")
    references = tmp_path / "references.jsonl"
    write_references(engine, blind, references)
    task = make_task(f"{spec},references={references}")
    asked = [question for split in SPLITS for question in task.questions(split)]
    assert sorted(str(question.prompt) for question in asked) == sorted(f"line {i}" for i in range(12))
    assert read_references(references).keys() == {question.id for question in asked}
    for question in asked:
        own = engine.generate(question.prompt, SamplingParams(8)).text
        assert question.answer == own
        assert task.utility(question, f"  {own}\n") == 1 and task.utility(question, own + "x") == 0
    with pytest.raises(RequestError, match="no reference answer to question") as caught:
        blind.utility(next(blind.questions("test")), "x")
    assert "write_references" in caught.value.hint


def test_same_answer_over_another_task_and_its_numbers(tmp_path: Path) -> None:
    inner = make_task("word-problems")
    (question,) = inner.questions("test", 1)
    for reference, text, same in (("#### 5", "it is 5", 0), ("#### 5", "#### 5.0", 1), ("no", "no", 0)):
        task = SameAnswer(inner.questions, inner.extract, {question.id: reference}, inner.max_tokens)
        (mine,) = task.questions("test", 1)
        assert (mine.id, mine.prompt, mine.answer) == (question.id, question.prompt, reference)
        assert task.utility(mine, text) == same


def test_prompt_files(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = lines(
        tmp_path / "p.jsonl", {"prompt": "Once"}, {"prompt": chat}, {"question": "Why?"}, {"turns": ["A", "B"]}
    )
    task = make_task(f"same-answer:prompts={path}")
    prompts = [question.prompt for split in SPLITS for question in task.questions(split)]
    expected = ["Once", chat, [{"role": "user", "content": "Why?"}], [{"role": "user", "content": "A"}]]
    assert sorted(map(str, prompts)) == sorted(map(str, expected))
    for bad in ({"text": "a"}, {"turns": []}, {"turns": "ab"}, {"prompt": [1]}, {"prompt": 1}, {"question": None}):
        with pytest.raises(RequestError, match='expected a "prompt", "question" or "turns" of text'):
            make_task(f"same-answer:prompts={lines(path, bad)}")


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("gsm8k", "task gsm8k needs path="),
        ("gsm8k:path=x,shots=2", r"shots must be in \[0, 1\]|cannot be read"),
        ("word-problems:digits=3", r"digits must be in \[1, 2\], got 3"),
        ("word-problems:steps=2-9", "steps must be a number or a range in 2-4, got '2-9'"),
        ("word-problems:wording=mixed:2", "wording must be a, b or mixed:SHARE"),
        ("word-problems:wording=c", "wording must be a, b or mixed:SHARE"),
        ("extraction:x=1", "task extraction: unknown option 'x'"),
        ("same-answer:prompts=x,extract=json", "extract must be one of number, text|cannot be read"),
        ("nonsense", "there is no task 'nonsense'"),
        ("no_such_module:Task", "there is no task 'no_such_module:Task': No module named"),
        ("json:nothing", "there is no task 'json:nothing'"),
        ("json:JSONDecoder", "is no task: it has no name, max_tokens, questions, extract, utility"),
    ],
)
def test_bad_names_are_one_clear_error(spec: str, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        make_task(spec)


def test_a_users_own_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    task = make_task("sums_task:Sums")
    assert isinstance(task, Task)
    question, *_ = task.questions("test", 5)
    a, b = (int(word) for word in question.prompt.split()[::2])
    assert task.utility(question, f" {a + b}\n7 + 7 = 14") == 1
    assert task.utility(question, f" {a + b + 1}") == task.utility(question, "") == 0
    import sums_task

    monkeypatch.setattr(sums_task, "INSTANCE", sums_task.Sums(), raising=False)
    assert make_task("sums_task:INSTANCE") is sums_task.INSTANCE
    assert len((EXAMPLES / "sums_task.py").read_text().partition("class Sums")[2].splitlines()) <= 20
