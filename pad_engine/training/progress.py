"""How far a question has come, kept line by line, so that a killed run goes on from there.

A label is a line as soon as its place is judged. So is what else costs decoding: that the question has passed the
rollouts from its prompt, and each answer that is followed. Lines that are new and lines of a run before are taken in
alike. Next to read: labels.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

BASE, FOLLOWED = "base", "greedy"  # notes: what a line holds that is no label
Line = Mapping[str, Any]
Keep = Callable[[Sequence[Line]], None]


@dataclass(frozen=True)
class Rollout:
    """A judged text. seed: None for one that had ended already. ids: of the whole answer. answer: the final one."""

    seed: int | None
    ids: list[int]
    answer: str | None
    finish_reason: str
    utility: int

    def to_dict(self) -> dict[str, Any]:
        """As a record holds it."""
        fields = {key: value for key, value in asdict(self).items() if key != "ids"}
        return fields | {"tokens": len(self.ids)}


def passed(question: str, utility: float, sound: bool | None) -> Line:
    """The line of a question whose rollouts from the prompt say that it can be labelled."""
    return {"question": question, "note": BASE, "utility": utility, "sound": sound}


def followed(question: str, head: Sequence[int], answer: Rollout) -> Line:
    """The line of the target's greedy answer that begins with a head."""
    return {"question": question, "note": FOLLOWED, "step": len(head), "rollout": asdict(answer)}


class Progress:
    """lines: of one question, of a run before. keep: is given the new ones.

    passed: whether its rollouts from the prompt have been judged. reference: the target's own answer. answer: the one
    that is followed, which begins with `head`. Both are None until they are decoded. records: the labels so far. left:
    index of the first place that may lack one. stopped: whether the last label ends the question.
    """

    def __init__(self, lines: Iterable[Line], keep: Keep) -> None:
        self.keep = keep
        self.passed = self.stopped = False
        self.reference: Rollout | None = None
        self.answer: Rollout | None = None
        self.head: list[int] = []
        self.records: list[dict[str, Any]] = []
        self.left = 0
        for line in lines:
            self.take(line)

    def add(self, *lines: Line) -> None:
        """Keep what is new, and take it in."""
        self.keep(lines)
        for line in lines:
            self.take(line)

    def take(self, line: Line) -> None:
        """Take a line in."""
        if "note" not in line:
            self.take_label(line)
        elif line["note"] == BASE:
            self.passed = True
        else:
            answer = Rollout(**line["rollout"])
            if line["step"] == 0:
                self.reference = answer
            if line["step"] == len(self.head):
                self.answer = answer

    def take_label(self, record: Line) -> None:
        """Take a label in. A token that is no pivot is kept, and what comes behind it is another answer."""
        self.records.append(dict(record))
        self.left = record["step"] + 1
        self.stopped = record["stop"]
        if not record["pivot"]:
            self.head, self.answer = [*record["prefix_ids"], record["draft_id"]], None
