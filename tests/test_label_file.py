"""Reading the file that `pad label` writes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from labelled import write_labels

from pad_engine.errors import RequestError
from pad_engine.training.label_file import Label, read_labels

LABEL = Label("q1", 3, [1, 2], [], 4, 5, 0.25, 1.0, True)


def line(**fields: Any) -> str:
    return json.dumps(vars(LABEL) | fields)


def test_labels_come_back(tmp_path: Path) -> None:
    labels = [LABEL, replace(LABEL, step=4, prefix_ids=[9], pivot=False), replace(LABEL, question="q2")]
    path = write_labels(tmp_path / "a.jsonl", labels)
    assert read_labels(path) == ({"task": "none", "seed": 0}, labels)


def test_an_unfinished_line_is_passed_over(tmp_path: Path) -> None:
    path = write_labels(tmp_path / "a.jsonl", [LABEL])
    whole = path.read_bytes()
    more = line(question="q\u00fc", draft_text="\u00fc").encode()
    for cut in range(len(more)):
        path.write_bytes(whole + more[:cut])
        assert read_labels(path)[1] == [LABEL]


def done(question: str, labels: int) -> str:
    return json.dumps({"question": question, "done": True, "reason": "finished", "labels": labels})


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{one}\n" for one in ('{"header": {}}', *lines)))
    return path


def test_lines_of_several_questions_may_alternate(tmp_path: Path) -> None:
    """Labels come question by question, of those that are done; notes are passed over."""
    a, b = ([line(question=name, step=step, prefix_ids=[9] * step) for step in (0, 1)] for name in ("a", "b"))
    note = '{"question": "b", "note": "base", "utility": 1.0, "sound": null}'
    path = write(tmp_path / "a.jsonl", note, a[0], b[0], line(question="c"), b[1], done("b", 2), a[1], done("a", 2))
    assert [(one.question, one.step) for one in read_labels(path)[1]] == [("b", 0), ("b", 1), ("a", 0), ("a", 1)]


def test_of_a_question_that_is_there_twice_the_last_copy_counts(tmp_path: Path) -> None:
    first = [line(draft_utility=0.1), line(step=4, draft_utility=0.1), done("q1", 2)]
    last = [line(draft_utility=0.2), done("q1", 1)]
    path = write(tmp_path / "a.jsonl", *first, *last, line(draft_utility=0.3))
    assert read_labels(path)[1] == [replace(LABEL, draft_utility=0.2)]


def test_two_runs_that_wrote_at_once_do_no_harm(tmp_path: Path) -> None:
    steps = [line(step=step, prefix_ids=[9] * step) for step in range(4)]
    expected = [replace(LABEL, step=step, prefix_ids=[9] * step) for step in range(4)]
    for behind in range(5):
        ahead = [one for step in steps[:behind] for one in (step, step)] + steps[behind:]
        path = write(tmp_path / "a.jsonl", *ahead, done("q1", 4), *steps[behind:], done("q1", 4))
        assert read_labels(path)[1] == expected


@pytest.mark.parametrize(
    "broken",
    [
        "{", "[]", "7", "null", "{}", line(prompt_ids=[]), line(prompt_ids="12"), line(prefix_ids=[1.5]),
        line(draft_id=True), line(target_id=None), line(draft_utility=1.5), line(target_utility="all"), line(pivot=1),
        line(step="first"),
    ],
)  # fmt: skip
def test_the_line_at_fault_is_named(tmp_path: Path, broken: str) -> None:
    path = write(tmp_path / "a.jsonl", line(), broken, line(step=7))
    with pytest.raises(RequestError, match="line 3") as caught:
        read_labels(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe\n", "line 1 is no line of labels"),
        (b"", "no first line"),
        (b'{"header": {', "no first line"),
        (b'{"header": 5}\n', "line 1"),
        (b'{"header": {}}\n\xff\n', "line 2"),
        (line().encode() + b"\n", "line 1"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RequestError, match=words):
        read_labels(path)
