"""Which split a question belongs to: decided by its text alone, so that no order, file or seed can change it."""

import random
from collections.abc import Iterable, Iterator
from hashlib import sha256

from pad_engine.errors import RequestError
from pad_engine.training.tasks.task import Question

SPLITS = ("train", "calibration", "test")


def split_of(text: str) -> str:
    """A third of all texts each. Texts that differ in spaces and capitals only go together."""
    return SPLITS[int(text_hash(text), 16) % len(SPLITS)]


def text_hash(text: str) -> str:
    """16 hex digits that stand for a text, apart from spaces and capitals."""
    return sha256(" ".join(text.split()).lower().encode("utf-8", "replace")).hexdigest()[:16]


def check_split(split: str) -> None:
    """RequestError for a split that there is not."""
    if split not in SPLITS:
        raise RequestError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")


def pick(questions: Iterable[tuple[str, Question]], split: str, count: int | None, seed: int) -> Iterator[Question]:
    """Of pairs (text, question) those of a split: each text once, in an order that depends on the seed and not on the
    order they come in, at most count of them."""
    check_split(split)
    mine = {question.id: question for text, question in questions if split_of(text) == split}
    ids = sorted(mine)
    random.Random(f"{split}/{seed}").shuffle(ids)
    return (mine[name] for name in ids[:count])
