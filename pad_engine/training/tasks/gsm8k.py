"""GSM8K (Cobbe et al. 2021): word problems of grade school, from the user's own file of the data set."""

from collections.abc import Iterator
from pathlib import Path

from pad_engine.errors import RequestError
from pad_engine.training.tasks.final_number import MARKER, final_number
from pad_engine.training.tasks.json_lines import read_json_lines
from pad_engine.training.tasks.splits import pick, text_hash
from pad_engine.training.tasks.task import Prompt, Question

INSTRUCTION = f'Solve the problem step by step. End with a line "{MARKER} " and the answer as a number.'
SHOT_QUESTION = (
    "A gardener plants 6 rows of tulips with 14 tulips in each. Frost kills a quarter of them, and she sells the rest "
    "for $3 each. How many dollars does she get?"
)
SHOT_ANSWER = (
    "She plants 6 * 14 = 84 tulips.\nThe frost kills 84 / 4 = 21 of them.\nThat leaves 84 - 21 = 63 tulips.\n"
    f"She gets 63 * 3 = 189 dollars.\n{MARKER} 189"
)


class GSM8K:
    """path: JSON lines with a "question" and an "answer" that ends in "#### NUMBER". shots: 1 shows a solved problem
    first. The prompt is a chat."""

    name = "gsm8k"
    max_tokens = 512

    def __init__(self, path: Path, shots: int = 0) -> None:
        self.records = [
            (record["question"], record["answer"]) for record in read_json_lines(path, ["question", "answer"])
        ]
        self.shots = shots
        for number, (_, answer) in enumerate(self.records, 1):
            if MARKER not in answer or final_number(answer) is None:
                raise RequestError(f'{path}, question {number}: the answer does not end in "{MARKER} NUMBER"')

    def questions(self, split: str, count: int | None = None, seed: int = 0) -> Iterator[Question]:
        """Those of the file whose text falls into the split. Question.answer is the number, as text."""
        found = (
            (text, Question(text_hash(text), self.prompt(text), final_number(answer))) for text, answer in self.records
        )
        return pick(found, split, count, seed)

    def prompt(self, text: str) -> Prompt:
        """The messages that ask a question."""
        shown = [("user", ask(SHOT_QUESTION)), ("assistant", SHOT_ANSWER)] if self.shots else []
        return [{"role": role, "content": content} for role, content in [*shown, ("user", ask(text))]]

    def extract(self, text: str) -> str | None:
        """The final number."""
        return final_number(text)

    def utility(self, question: Question, text: str) -> int:
        """Whether the final number is the reference's."""
        return int(final_number(text) == question.answer)


def ask(text: str) -> str:
    """A user's message."""
    return f"{text}\n\n{INSTRUCTION}"
