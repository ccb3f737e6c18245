"""The file of an evaluation or a calibration: JSON lines, one a setting and question. A run that is started again goes
on where the last one was killed.

The first line is a header: what all of its answers have in common. A setting has a line of its own before its answers,
and may have one with its speed after them. Next to read: evaluate.py.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pad_engine.errors import RequestError

UNCOMPARED = ("machine",)  # of a header: a run may go on after an update, or elsewhere


class Override(NamedTuple):
    """A token that a rule kept against its base. position: among the answer's tokens, from 0. The rest as in
    state.Overridden; None for infinity, which JSON lacks."""

    position: int
    margin: float | None
    entropy: float | None
    probability: float | None
    pivot_prob: float | None


@dataclass(frozen=True)
class Answered:
    """One question under one setting. right: its utility, 0 or 1. answer: what the task found in the text, if anything.
    tokens: how many were emitted; ids_sha256: of their ids, joined by commas."""

    setting: str
    question: str
    right: int
    answer: str | None
    text: str
    tokens: int
    ids_sha256: str
    rounds: int
    draft_tokens: int
    accepted_tokens: int
    overrides: list[Override]
    finish_reason: str


class Results:
    """An open file. header: as JSON holds it; RequestError names what differs in a file that exists. A last line that a
    killed run left unfinished is taken off."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.header = json.loads(json.dumps(header))
        self.settings: dict[str, dict[str, Any]] = {}
        self.speeds: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, dict[str, Answered]] = {}
        if not (path.exists() and self.read()):
            self.write({"header": self.header})

    def read(self) -> bool:
        """Take over what an earlier run left; whether it left anything."""
        try:
            data = self.path.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                os.truncate(self.path, whole)
        except OSError as error:
            raise RequestError(f"{self.path} cannot be read and gone on from: {error.strerror}") from error
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                record = json.loads(line)
                if number == 1:
                    check_header(self.path, record["header"], self.header)
                else:
                    self.take(record)
            except (ValueError, KeyError, TypeError) as error:
                if isinstance(error, RequestError):
                    raise
                raise RequestError(f"{self.path}, line {number} is no line of results: {error!r}") from error
        return whole > 0

    def take(self, record: dict[str, Any]) -> None:
        """Sort a line in."""
        if "question" in record:
            overrides = [Override(*values) for values in record.pop("overrides")]
            answered = Answered(**record, overrides=overrides)
            self.answers.setdefault(answered.setting, {})[answered.question] = answered
        else:
            lines = self.speeds if "tokens_per_second" in record else self.settings
            lines[record.pop("setting")] = record

    def begin(self, setting: str, facts: Mapping[str, Any]) -> None:
        """The line of a setting, once. RequestError where the file has it with other facts."""
        if setting not in self.settings:
            self.write({"setting": setting, **facts})
        elif self.settings[setting] != facts:
            raise changed(self.path, f"setting {setting}", self.settings[setting], facts)

    def add(self, answered: Answered) -> None:
        """One more answer."""
        self.write(asdict(answered))

    def write(self, record: dict[str, Any]) -> None:
        """Append a line, and take it in."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            raise RequestError(f"{self.path} cannot be written: {error.strerror}") from error
        if "header" not in record:
            self.take(json.loads(line))


def check_header(path: Path, found: dict[str, Any], wanted: Mapping[str, Any]) -> None:
    """RequestError unless a file was begun with the same header."""
    compared = [{key: value for key, value in one.items() if key not in UNCOMPARED} for one in (found, wanted)]
    if compared[0] != compared[1]:
        raise changed(path, "this run", *compared)


def changed(path: Path, what: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> RequestError:
    """The error that names the first difference."""
    key = next(key for key in {**found, **wanted} if found.get(key) != wanted.get(key))
    return RequestError(
        f"{path} was begun with {key} {found.get(key)!r}, and {what} has {wanted.get(key)!r}",
        "give another --out, or the same options as before",
    )
