"""Prompts to measure with: Spec-Bench questions (Xia et al. 2024) from the user's file, and one edit of our own."""

import json
from pathlib import Path
from typing import Any

from pad_engine.models.loader import LoadedModel
from pad_engine.prompt import encode

Message = dict[str, str]
GROUPS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")

# An edit: most of the answer stands in the question already.
EDIT = """Correct the spelling mistakes in this text and write the whole text again:

The old lighthouse keper climbed the stairs every evning. He lit the lamp, wiped the glass, and wrote the wether into \
his book. When the ships passed, he counted them. In the morning he put out the lamp, closed the book, and went down \
to the beach to look for driftwood."""


def edit_messages() -> list[Message]:
    """The edit prompt as a chat."""
    return [{"role": "user", "content": EDIT}]


def load(path: Path) -> dict[str, list[list[Message]]]:
    """Spec-Bench's first turns by group: the eight MT-bench categories are one group."""
    groups: dict[str, list[list[Message]]] = {group: [] for group in GROUPS}
    for line in path.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        group = question["category"] if question["category"] in groups else "mt_bench"
        groups[group].append([{"role": "user", "content": question["turns"][0]}])
    return groups


def chosen(path: Path, per_group: int) -> dict[str, list[list[Message]]]:
    """Of each group so many questions, evenly spaced."""
    return {group: found[:: max(1, len(found) // per_group)][:per_group] for group, found in load(path).items()}


def encoded(model: LoadedModel, messages: list[Message]) -> list[int]:
    """A question as the model's own chat, or as bare text for a model without a chat template."""
    return encoded_by(model.tokenizer, messages, model.num_tokens)


def encoded_by(tokenizer: Any, messages: list[Message], num_tokens: int) -> list[int]:
    """The same by the tokenizer alone."""
    chat = bool(getattr(tokenizer, "chat_template", None))
    return encode(tokenizer, messages if chat else messages[0]["content"], num_tokens)


def spread(path: Path, count: int) -> list[list[Message]]:
    """`count` questions, evenly spaced over the whole file."""
    questions = [question for group in load(path).values() for question in group]
    return [questions[i * len(questions) // count] for i in range(count)]
