"""The file of labels as it grows: JSON lines, a header first, then question by question what label_file.py reads.

A question's lines are written at once, when it is done, with a line that says so last. So a run that is started again
loses what was at work, and nothing else. Shards are files of their own, and can be put together.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pad_engine.errors import RequestError
from pad_engine.files import write_file
from pad_engine.training.label_file import read_lines
from pad_engine.training.results import check_header

SHARD = "shard"


class LabelStore:
    """An open file. header: as JSON holds it; RequestError names what differs in a file that exists. done: questions
    that are in the file."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.done: set[str] = set()
        first = line_of({"header": json.loads(json.dumps(header))})
        held = read_bytes(path)
        if first.startswith(held) or (b"\n" not in held and held.startswith(b'{"header": ')):
            write_file(path, first)  # new, or killed before its first line was whole
            return
        found, questions = whole_questions(path, held)
        check_header(path, found, json.loads(first)["header"])
        self.done = set(questions)
        kept = b"".join((held[: held.index(b"\n") + 1], *questions.values()))
        if kept != held:
            write_file(path, kept)

    def add(self, question: str, records: Sequence[Mapping[str, Any]], reason: str) -> None:
        """Write a finished question."""
        done = {"question": question, "done": True, "reason": reason, "labels": len(records)}
        try:
            with self.path.open("ab") as file:
                file.write(b"".join(map(line_of, (*records, done))))
        except OSError as error:
            raise RequestError(f"{self.path} cannot be written: {error.strerror}") from error
        self.done.add(question)


def merge_labels(out: Path, parts: Sequence[Path]) -> int:
    """Write the finished questions of several shards of one run as one file; returns how many there are.

    RequestError when the headers differ in more than the shard, or a question is in two parts.
    """
    together: dict[str, bytes] = {}
    header: dict[str, Any] = {}
    for path in parts:
        found, questions = whole_questions(path, read_bytes(path))
        found[SHARD] = None
        header = header or found
        check_header(parts[0], header, found)
        if twice := set(together) & set(questions):
            raise RequestError(f"question {min(twice)} is in {path} and in a file before it")
        together |= questions
    write_file(out, b"".join((line_of({"header": header}), *together.values())))
    return len(together)


def whole_questions(path: Path, held: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The header of a file's bytes, and the lines of every finished question. RequestError as of read_lines."""
    questions: dict[str, bytes] = {}
    lines: list[bytes] = []

    def take(line: bytes, record: Mapping[str, Any]) -> None:
        question = str(record["question"])
        lines.append(line)
        if "done" in record:
            questions[question] = b"".join(lines)
            lines.clear()

    return read_lines(path, held, take), questions


def line_of(record: Mapping[str, Any]) -> bytes:
    """A record as a line."""
    return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_bytes(path: Path) -> bytes:
    """The file's content; none if there is no file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
