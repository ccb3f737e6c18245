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
    with path.open("a") as file:
        file.write('{"question": "q2", "done": true, "reason": "end"}\n')
    assert read_labels(path) == ({"task": "none", "seed": 0}, labels)


def test_an_unfinished_line_is_passed_over(tmp_path: Path) -> None:
    path = write_labels(tmp_path / "a.jsonl", [LABEL, replace(LABEL, step=4)])
    whole = path.read_bytes()
    for cut in (1, 2, 20, len(line()), len(line()) + 1):
        path.write_bytes(whole[:-cut])
        assert read_labels(path)[1] == [LABEL]


@pytest.mark.parametrize(
    "broken",
    [
        "{", "[]", "7", "null", "{}", line(prompt_ids=[]), line(prompt_ids="12"), line(prefix_ids=[1.5]),
        line(draft_id=True), line(target_id=None), line(draft_utility=1.5), line(target_utility="all"), line(pivot=1),
        line(step="first"),
    ],
)  # fmt: skip
def test_the_line_at_fault_is_named(tmp_path: Path, broken: str) -> None:
    path = write_labels(tmp_path / "a.jsonl", [LABEL])
    with path.open("a") as file:
        file.write(f"{broken}\n{line(step=7)}\n")
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
