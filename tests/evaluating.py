"""Questions, a task and answers written by hand, for the tests of calibration and evaluation."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from pad_engine.forest_request import ForestAnswer, ForestRequest
from pad_engine.state import Overridden
from pad_engine.training.evaluate import Setting, as_requests
from pad_engine.training.results import Answered, Override
from pad_engine.training.tasks.task import Question

KEPT = Overridden(1, 0.25, 1.5, 0.25, float("inf"))


class Parity:
    """A text is right if the number of its characters is even for questions whose number is even, else odd."""

    name, max_tokens = "parity", 12

    def questions(self, split: str, count: int | None = None, seed: int = 0) -> Iterator[Question]:
        for number in range(40 if count is None else min(count, 40)):
            yield Question(f"{split}-{seed}-{number}", f"{split} {seed} says {number * 7919 % 101}", number % 2)

    def extract(self, text: str) -> str | None:
        return str(len(text) % 2) if text else None

    def utility(self, question: Question, text: str) -> int:
        return int(self.extract(text) == str(question.answer))


def answered(setting: str, right: Sequence[int], *, overrides: int = 0, cut: Sequence[int] = ()) -> dict[str, Answered]:
    """Answers to questions q0, q1, ... of ten tokens in four rounds of three drafted tokens, half of them kept."""
    kept = [Override(place, 0.1, 1.0, 0.2, 1.0) for place in range(overrides)]
    return {
        f"q{i}": Answered(
            setting, f"q{i}", ok, "7", "text", 10, f"{setting}{i}", 4, 12, 6, kept, "length" if i in cut else "stop"
        )
        for i, ok in enumerate(right)
    }


class Script:
    """Decodes without a model: of each setting the answers' lengths by question, which decide over right and wrong.
    asked: what was asked, in order."""

    def __init__(self, lengths: Mapping[str, Mapping[str, int]]) -> None:
        self.lengths, self.asked = lengths, list[tuple[str, str]]()

    def __call__(self, asked: Iterable[tuple[Setting, ForestRequest]]) -> Iterator[tuple[Setting, ForestAnswer]]:
        for setting, pairs in groupby(asked, lambda pair: pair[0]):
            for _, request in reversed(list(pairs)):
                self.asked.append((setting.name, request.key))
                ids = list(range(self.lengths[setting.name][request.key]))
                kept = [(1, KEPT)] if setting.depth else []
                yield setting, ForestAnswer(request.key, ids, "stop", 0, 3, 8, 4, kept)


def text_of(ids: list[int]) -> str:
    return "x" * len(ids)


def requests_of(task: Parity, questions: Sequence[Question]) -> list[ForestRequest]:
    return as_requests(questions, task, lambda question: list(str(question.prompt).encode()))
