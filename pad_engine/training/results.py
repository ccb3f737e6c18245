"""The file of an evaluation or a calibration: JSON lines, one a setting and question. A run that is started again goes
on where the last one was killed.

The first line is a header: what all of its answers have in common. A setting has a line of its own before its answers,
and may have one with its speed after them. Next to read: evaluate.py.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pad_engine.errors import RequestError

UNCOMPARED = ("machine",)  # of a header: a run may go on after an update, or elsewhere
BEGINNING = b'{"header": '
SAME_RUN = "give another --out, or the same options, models and questions as before"
SAME_ANSWERS = "answers are taken from a file of `pad eval` on the same questions, with the same options and models"


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
    killed run left unfinished is taken off. Without a header a file that exists is read, and left as it is."""

    def __init__(self, path: Path, header: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.settings: dict[str, dict[str, Any]] = {}
        self.speeds: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, dict[str, Answered]] = {}
        whole = self.read() if header is None or path.exists() else 0
        if header is None:
            return
        found, self.header = self.header, json.loads(json.dumps(header))
        if whole:
            check_header(path, found, self.header)
        self.cut(whole)
        if not whole:
            self.write({"header": self.header})

    def read(self) -> int:
        """Take in the file's header and whole lines; how many bytes these are."""
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise RequestError(f"the results {self.path} cannot be read: {error.strerror}") from error
        # a killed run may have left as little as the beginning of this
        if not data.startswith(BEGINNING[: len(data)]):
            raise RequestError(f"{self.path} holds no results: its first line does not begin with {BEGINNING.decode()}")
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                record = json.loads(line)
                if number == 1:
                    self.header = dict(record["header"])
                else:
                    self.take(record)
            except (ValueError, KeyError, TypeError) as error:
                raise RequestError(f"{self.path}, line {number} is no line of results: {error!r}") from error
        return whole

    def cut(self, whole: int) -> None:
        """Take off what follows the whole lines of a file that is there."""
        try:
            if self.path.exists():
                os.truncate(self.path, whole)
        except OSError as error:
            raise RequestError(f"{self.path} cannot be written: {error.strerror}") from error

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

    def check(self, shared: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]) -> None:
        """RequestError, with the first difference, unless answers of this file can be taken over. shared: what its
        header must have. settings: whose answers, with their facts."""
        check_header(self.path, {key: self.header[key] for key in shared if key in self.header}, shared, SAME_ANSWERS)
        for name in [name for name in settings if name in self.settings]:
            if self.settings[name] != settings[name]:
                raise changed(self.path, f"setting {name}", self.settings[name], settings[name], SAME_ANSWERS)

    def take_over(self, given: "Results", settings: Iterable[str]) -> None:
        """Write what another file, which is checked, has answered under some settings and this one has not."""
        for name in [name for name in settings if name in given.settings]:
            self.begin(name, given.settings[name])
            done = self.answers.setdefault(name, {})
            for answered in given.answers.get(name, {}).values():
                if answered.question not in done:
                    self.add(answered)

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


def check_header(path: Path, found: dict[str, Any], wanted: Mapping[str, Any], hint: str = SAME_RUN) -> None:
    """RequestError unless a file was begun with the same header."""
    ours, theirs = ({key: value for key, value in one.items() if key not in UNCOMPARED} for one in (wanted, found))
    if theirs != ours:
        raise changed(path, "this run", theirs, ours, hint)


def changed(
    path: Path, what: str, found: Mapping[str, Any], wanted: Mapping[str, Any], hint: str = SAME_RUN
) -> RequestError:
    """The error that names the first difference."""
    key = next(key for key in {**found, **wanted} if key not in found or key not in wanted or found[key] != wanted[key])
    begun = f"with {key} {found[key]!r}" if key in found else f"without {key}"
    ours = repr(wanted[key]) if key in wanted else "none"
    return RequestError(f"{path} was begun {begun}, and {what} has {ours}", hint)
