"""The file of labels as it grows: JSON lines, a header first, then what label_file.py reads.

A line is written as soon as what it says is known, and a question's last one says that it is done. So a run that is
started again loses what was being decoded, and nothing else. Shards are files of their own, and can be put together.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pad_engine.errors import RequestError
from pad_engine.files import write_file
from pad_engine.training.label_file import label_of, read_questions
from pad_engine.training.results import BEGINNING, check_header

SHARD = "shard"


class LabelStore:
    """An open file. header: as JSON holds it; RequestError names what differs in a file that exists. done: questions
    that are finished. begun: the lines of those that are not."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.done: set[str] = set()
        self.begun: dict[str, list[dict[str, Any]]] = {}
        first = line_of({"header": json.loads(json.dumps(header))})
        held = read_bytes(path)
        if first.startswith(held) or (b"\n" not in held and held.startswith(BEGINNING)):
            write_file(path, first)  # new, or killed before its first line was whole
            return
        found, finished, begun = read_questions(path, held, checked)
        check_header(path, found, json.loads(first)["header"])
        self.done = set(finished)
        self.begun = {question: [json.loads(line) for line in lines] for question, lines in begun.items()}
        if not held.endswith(b"\n"):
            write_file(path, held[: held.rfind(b"\n") + 1])

    def keep(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write what has become known of a question."""
        try:
            with self.path.open("ab") as file:
                file.write(b"".join(map(line_of, lines)))
        except OSError as error:
            raise RequestError(f"{self.path} cannot be written: {error.strerror}") from error

    def finish(self, question: str, reason: str, labels: int) -> None:
        """Write that a question is done, and how many labels it has."""
        self.keep([{"question": question, "done": True, "reason": reason, "labels": labels}])
        self.done.add(question)


def merge_labels(out: Path, parts: Sequence[Path]) -> int:
    """Write the finished questions of all shards of one run as one file, one after another; returns how many there are.

    RequestError when the headers differ in more than the shard, a question is in two parts, or a shard is missing.
    """
    together: dict[str, bytes] = {}
    header: dict[str, Any] = {}
    shards: list[str] = []
    for path in parts:
        found, questions = whole_questions(path, read_bytes(path))
        shards.append(str(found.get(SHARD)))
        found[SHARD] = None
        header = header or found
        check_header(parts[0], header, found)
        if twice := set(together) & set(questions):
            raise RequestError(f"question {min(twice)} is in {path} and in a file before it")
        together |= questions
    if missing := missing_shards(shards):
        raise RequestError(
            f"of the run's shards {', '.join(missing)} are not given", "label these too, and give the files of all"
        )
    write_file(out, b"".join((line_of({"header": header}), *together.values())))
    return len(together)


def missing_shards(shards: Iterable[str]) -> list[str]:
    """Those that are not among some, by how many each of these says that there are: 2/2 of 1/2."""
    given = set(shards)
    counts = sorted({int(match[1]) for shard in given if (match := re.fullmatch(r"\d+/(\d+)", shard))})
    return [name for count in counts for k in range(count) if (name := f"{k + 1}/{count}") not in given]


def whole_questions(path: Path, held: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The header of a file's bytes, and the lines of every finished question. RequestError as of read_lines."""
    header, finished, _ = read_questions(path, held, checked)
    return header, {question: b"".join(lines) for question, lines in finished.items()}


def checked(line: bytes, record: Mapping[str, Any]) -> bytes:
    """A line as it stands. Errors as of as_label, if it is a label."""
    label_of(record)
    return line


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
