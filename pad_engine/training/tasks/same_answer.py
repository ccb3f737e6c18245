"""The target's own greedy answer as the truth (as AutoJudge has it): any prompts become a task, without a checker.

The references are made once by the target, `write_references`, and read from their file ever after.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pad_engine.config import SamplingParams
from pad_engine.errors import RequestError
from pad_engine.files import write_file
from pad_engine.training.tasks.final_number import final_number
from pad_engine.training.tasks.json_lines import read_json_lines, read_text
from pad_engine.training.tasks.splits import SPLITS, pick, text_hash
from pad_engine.training.tasks.task import Prompt, Question

if TYPE_CHECKING:
    from pad_engine.engine import Engine

Extract = Callable[[str], str | None]
Ask = Callable[[str, int | None, int], Iterator[Question]]


def whole_text(text: str) -> str | None:
    """A text without differences of space; None if there is nothing else."""
    return " ".join(text.split()) or None


ANSWERS: dict[str, Extract] = {"number": final_number, "text": whole_text}


class SameAnswer:
    """ask: where questions come from, the `questions` of a PromptFile or of another task. extract: the part of a text
    that must be the same. references: the target's greedy text by question id; without one a question can be asked but
    not judged, and where the reference has no final answer, nothing is right."""

    name = "same-answer"

    def __init__(
        self, ask: Ask, extract: Extract, references: Mapping[str, str] | None = None, max_tokens: int = 256
    ) -> None:
        self.ask, self.extract, self.references, self.max_tokens = ask, extract, references or {}, max_tokens

    def questions(self, split: str, count: int | None = None, seed: int = 0) -> Iterator[Question]:
        """Question.answer is the target's greedy text, or None where it is not known."""
        for question in self.ask(split, count, seed):
            yield replace(question, answer=self.references.get(question.id))

    def utility(self, question: Question, text: str) -> int:
        """Whether a text ends where the target's own does. RequestError where that is not known."""
        if question.answer is None:
            raise RequestError(
                f"there is no reference answer to question {question.id}",
                "write them with write_references (pad_engine/training/tasks/same_answer.py) and give references=FILE",
            )
        answer = self.extract(text)
        return int(answer is not None and answer == self.extract(question.answer))


class PromptFile:
    """Prompts of a file: a line of text each, to be completed; or JSON lines with a "prompt" (text to complete, or chat
    messages), a "question" or "turns", whose first turn is the message of a chat."""

    def __init__(self, path: Path) -> None:
        text = read_text(path)
        if text.lstrip().startswith("{"):
            self.prompts = [prompt_of(record, path) for record in read_json_lines(path)]
        else:
            self.prompts = [line.rstrip("\r") for line in text.split("\n") if line.strip()]
        if not self.prompts:
            raise RequestError(f"{path} is empty: expected a prompt a line")

    def questions(self, split: str, count: int | None = None, seed: int = 0) -> Iterator[Question]:
        """Those whose text falls into the split, without answers."""
        texts = ((prompt if isinstance(prompt, str) else json.dumps(prompt), prompt) for prompt in self.prompts)
        return pick(((text, Question(text_hash(text), prompt, None)) for text, prompt in texts), split, count, seed)


def prompt_of(record: Mapping[str, Any], path: Path) -> Prompt:
    """The prompt that a JSON line holds."""
    prompt = record.get("prompt")
    if isinstance(prompt, str):
        return prompt
    turns = record.get("turns", [record.get("question")])
    first = turns[0] if isinstance(turns, list) and turns else None
    messages = [{"role": "user", "content": first}] if prompt is None else prompt
    if not isinstance(messages, list) or not messages or not all(is_message(message) for message in messages):
        raise RequestError(f'{path}: expected a "prompt", "question" or "turns" of text, got {record!r:.200}')
    return messages


def is_message(value: Any) -> bool:
    """Whether a value has a role and a content."""
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def read_references(path: Path) -> dict[str, str]:
    """What write_references wrote: JSON lines of id and text."""
    return {record["id"]: record["text"] for record in read_json_lines(path, ["id", "text"])}


def write_references(engine: "Engine", task: SameAnswer, path: Path, count: int | None = None) -> None:
    """Answer greedily what a task asks in each split, at most count questions, and write the texts: all of them or
    none. engine: of a lossless rule; its drafter changes nothing but the time."""
    params = SamplingParams(task.max_tokens)
    asked = {question.id: question.prompt for split in SPLITS for question in task.questions(split, count)}
    lines = [json.dumps({"id": name, "text": engine.generate(prompt, params).text}) for name, prompt in asked.items()]
    write_file(path, "\n".join([*lines, ""]).encode())
