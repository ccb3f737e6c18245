"""The contract of a task: questions, the final answer in a text, and whether it is right.

Next to read: select.py, how tasks are named; word_problems.py, one whose questions are made.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

Prompt = str | list[dict[str, str]]


@dataclass(frozen=True)
class Question:
    """id: the same question has the same id in every run. prompt: text to complete, or chat messages. answer: what the
    task needs to judge a text; JSON can hold it."""

    id: str
    prompt: Prompt
    answer: Any


@runtime_checkable
class Task(Protocol):
    """name: in reports and files. max_tokens: of an answer; one that needs more counts as wrong."""

    name: str
    max_tokens: int

    def questions(self, split: str, count: int | None = None, seed: int = 0) -> Iterator[Question]:
        """Questions of a split ("train", "calibration", "test"), at most count of them, in an order by the seed.

        No two splits share a question. Without a count all there are; a task that makes its questions never ends.
        """
        ...

    def extract(self, text: str) -> str | None:
        """The final answer in a text, in a form that can be compared, or None if there is none."""
        ...

    def utility(self, question: Question, text: str) -> int:
        """1 if a text answers the question rightly, else 0."""
        ...
