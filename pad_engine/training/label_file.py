"""The file that `pad label` writes, as training reads it: JSON lines, a header first. Next to read: features.py.

A line is a label, a note (progress.py) or the word that a question is done, which is its last one. Lines of several
questions may alternate, as they are worked on at once.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pad_engine.errors import RequestError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Label:
    """One judged token: the drafter's, where the target would have gone on with another.

    prompt_ids, prefix_ids: the tokens before it, those of the prompt and of the answer. draft_utility, target_utility:
    share of the target's continuations of either token that are right, in [0, 1]. pivot: whether keeping it does harm.
    """

    question: str
    step: int
    prompt_ids: list[int]
    prefix_ids: list[int]
    draft_id: int
    target_id: int
    draft_utility: float
    target_utility: float
    pivot: bool


def read_labels(path: Path) -> tuple[dict[str, Any], list[Label]]:
    """The header and the labels of finished questions, question by question. RequestError as of read_lines."""
    header, labels, _ = read_finished(path)
    return header, labels


def read_finished(path: Path) -> tuple[dict[str, Any], list[Label], Counter[str]]:
    """The same, and why the questions ended, and how many of them."""
    try:
        held = path.read_bytes()
    except OSError as error:
        raise RequestError(f"the labels {path} cannot be read: {error}", "make them with `pad label`") from error
    header, finished, _ = read_questions(path, held, lambda line, record: label_of(record) or record.get("reason"))
    items = [item for items in finished.values() for item in items]
    labels = [item for item in items if isinstance(item, Label)]
    return header, labels, Counter(item for item in items if isinstance(item, str))


def read_questions(
    path: Path, held: bytes, item: Callable[[bytes, Mapping[str, Any]], Item]
) -> tuple[dict[str, Any], dict[str, list[Item]], dict[str, list[Item]]]:
    """The header of a file's bytes, and by question what `item` makes of its lines: of the questions that are done, and
    of those that are only begun. Of one that is there twice the last copy counts. RequestError as of read_lines."""
    finished: dict[str, list[Item]] = {}
    begun: dict[str, dict[tuple[Any, Any], Item]] = {}

    def take(line: bytes, record: Mapping[str, Any]) -> None:
        question = str(record["question"])
        lines = begun.setdefault(question, {})
        kind = "done" if "done" in record else record.get("note")
        # two runs that wrote at once have written each line of a question twice
        lines[kind, record.get("step")] = item(line, record)
        if kind == "done":
            del begun[question]
            # of the run that was behind only the end is left
            whole = record.get("labels") == sum(one is None for one, _ in lines)
            if whole or question not in finished:
                finished[question] = list(lines.values())

    header = read_lines(path, held, take)
    left = {question: list(lines.values()) for question, lines in begun.items() if question not in finished}
    return header, finished, left


def read_lines(path: Path, held: bytes, take: Callable[[bytes, Mapping[str, Any]], None]) -> dict[str, Any]:
    """The header of a file's bytes. `take` is given every line after it, as it stands and as what it holds, and refuses
    one by a ValueError, KeyError or TypeError.

    A last line that a killed run left unfinished is passed over; RequestError names the file and the line of anything
    else that is none of labels.
    """
    header: dict[str, Any] | None = None
    for number, line in enumerate(held[: held.rfind(b"\n") + 1].splitlines(keepends=True), 1):
        try:
            record = json.loads(line)
            if header is None:
                header = dict(record["header"])
            else:
                take(line, record)
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(f"{path}, line {number} is no line of labels: {error!r}") from error
    if header is None:
        raise RequestError(f"{path} holds no labels: it has no first line", "make them with `pad label`")
    return header


def label_of(record: Mapping[str, Any]) -> Label | None:
    """A line as a label, None if it is another one. Errors as of as_label."""
    return None if "done" in record or "note" in record else as_label(record)


def as_label(record: Mapping[str, Any]) -> Label:
    """A line as a label; ValueError, KeyError or TypeError where it is none."""
    draft_id, target_id = ids([record["draft_id"], record["target_id"]])
    label = Label(
        question=str(record["question"]), step=int(record["step"]), prompt_ids=ids(record["prompt_ids"]),
        prefix_ids=ids(record["prefix_ids"]), draft_id=draft_id, target_id=target_id,
        draft_utility=rate(record["draft_utility"]), target_utility=rate(record["target_utility"]),
        pivot=record["pivot"],
    )  # fmt: skip
    if not label.prompt_ids or not isinstance(label.pivot, bool):
        raise ValueError(f"prompt_ids {label.prompt_ids}, pivot {label.pivot!r}: expected ids and true or false")
    return label


def ids(values: Any) -> list[int]:
    """Token ids."""
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise ValueError(f"{values!r} is no list of token ids")
    return values


def rate(value: Any) -> float:
    """A share in [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{value!r} is no utility in [0, 1]")
    return float(value)
