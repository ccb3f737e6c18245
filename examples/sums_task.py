"""A task of one's own, for `PYTHONPATH=examples pad label --task sums_task:Sums ...`: sums of two numbers.

Next to read: pad_engine/training/tasks/task.py, what a task must offer.
"""

from collections.abc import Iterator

from pad_engine.training.tasks.final_number import final_number
from pad_engine.training.tasks.splits import pick
from pad_engine.training.tasks.task import Question


class Sums:
    name = "sums"
    max_tokens = 12

    def questions(self, split: str, count: int | None = None, seed: int = 0) -> Iterator[Question]:
        sums = ((f"{a} + {b} =", a + b) for a in range(100) for b in range(100))
        # a third of all texts falls into each split
        return pick(((text, Question(text, text, str(c))) for text, c in sums), split, count, seed)

    def extract(self, text: str) -> str | None:
        return final_number(text.partition("\n")[0])

    def utility(self, question: Question, text: str) -> int:
        return int(self.extract(text) == question.answer)
