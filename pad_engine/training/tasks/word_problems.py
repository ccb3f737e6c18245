"""Arithmetic word problems of several steps, made here: as many fresh ones as a calibration needs, and worked solutions
to train models on.

Next to read: word_stories.py, then word_solutions.py.
"""

import random
from collections.abc import Iterator
from itertools import count as integers
from itertools import islice

from pad_engine.errors import RequestError
from pad_engine.training.tasks.final_number import MARKER, final_number
from pad_engine.training.tasks.splits import check_split, split_of, text_hash
from pad_engine.training.tasks.task import Question
from pad_engine.training.tasks.word_solutions import worded
from pad_engine.training.tasks.word_stories import THINGS, Story, Teller

MIN_STEPS, MAX_STEPS = 2, 4
FACTORS = {1: 9, 2: 99}  # the larger one of a product at most, by its digits


class WordProblems:
    """steps: of a solution, "3" or "2-4". digits: of a product's larger factor at most, 1 or 2. wording: of worked
    solutions, "a", "b" (no sentence in common with "a") or "mixed:0.3" (that share of the problems in "b": those
    about 6 of the 20 kinds of things).

    The questions of a seed are the same in every wording. The answer is the number behind "####".
    """

    name = "word-problems"
    max_tokens = 192

    def __init__(self, steps: str = "2-4", digits: int = 2, wording: str = "a") -> None:
        self.steps = parse_steps(steps)
        if digits not in FACTORS:
            raise RequestError(f"digits must be 1 or 2, got {digits}")
        self.factor, self.share = FACTORS[digits], parse_wording(wording)

    def questions(self, split: str, count: int | None = None, seed: int = 0) -> Iterator[Question]:
        """The i-th question depends on split, seed and i alone. Question.answer is the number, as text."""
        return (question for question, _ in self.stories(split, count, seed))

    def examples(self, split: str, count: int | None = None, seed: int = 0) -> Iterator[tuple[Question, str]]:
        """The questions, each with a worked solution: what a model should write after the prompt."""
        for question, story in self.stories(split, count, seed):
            yield question, worded(story, self.wording_of(story), random.Random(f"solution/{question.id}"))

    def wording_of(self, story: Story) -> str:
        """The wording of a story's solution: the things that it is about decide. Were it a toss, a model could not tell
        them apart, and would write the commoner one always."""
        return "b" if THINGS.index(story.things) < self.share * len(THINGS) else "a"

    def stories(self, split: str, count: int | None, seed: int) -> Iterator[tuple[Question, Story]]:
        """The questions, each with the story behind it."""
        check_split(split)
        return islice((self.story(split, seed, index) for index in integers()), count)

    def story(self, split: str, seed: int, index: int) -> tuple[Question, Story]:
        """The first story of this seed and index whose text falls into the split."""
        draw = random.Random(f"word-problems/{split}/{seed}/{index}")
        while True:
            story = Teller(draw, self.factor).tell(draw.randint(*self.steps))
            if split_of(story.text) == split:
                break
        name = f"{split}-{seed}-{index}-{text_hash(story.text)[:8]}"
        return Question(name, f"Question: {story.text}\nAnswer:", str(story.steps[-1].result)), story

    def extract(self, text: str) -> str | None:
        """The number behind the marker: a solution that was cut off has no answer."""
        return final_number(text) if MARKER in text else None

    def utility(self, question: Question, text: str) -> int:
        """Whether the number is right."""
        return int(self.extract(text) == question.answer)


def parse_steps(text: str) -> tuple[int, int]:
    """ "3" and "2-4" as the least and the largest number."""
    low, _, high = text.partition("-")
    try:
        least, most = int(low), int(high or low)
    except ValueError:
        least, most = 0, 0
    if not MIN_STEPS <= least <= most <= MAX_STEPS:
        raise RequestError(f"steps must be a number or a range in {MIN_STEPS}-{MAX_STEPS}, got {text!r}")
    return least, most


def parse_wording(text: str) -> float:
    """The share of problems in wording "b"."""
    name, _, share = text.partition(":")
    shares = {"a": 0.0, "b": 1.0}
    if name in shares and not share:
        return shares[name]
    try:
        value = float(share) if name == "mixed" else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise RequestError(f"wording must be a, b or mixed:SHARE with a share in [0, 1], got {text!r}")
    return value
