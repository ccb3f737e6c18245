"""Text to JSON: a record told in prose, and an object with fixed keys as the answer. The texts are made here."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count as integers
from itertools import islice
from typing import Any

from pad_engine.training.tasks.splits import check_split, split_of, text_hash
from pad_engine.training.tasks.task import Question

PEOPLE = (
    "Amira Haddad", "Ben Osei", "Carla Reyes", "Dmitri Volkov", "Elena Fischer", "Farid Khan", "Grace Liu",
    "Hugo Lambert", "Ines Duarte", "Jonas Berg", "Keiko Tanaka", "Luca Moretti", "Maya Cohen", "Nils Larsen",
    "Olga Petrova", "Pablo Ruiz", "Quinn Taylor", "Rosa Silva", "Samir Patel", "Tove Nilsson",
)  # fmt: skip
CITIES = (
    "Lisbon", "Oslo", "Nairobi", "Quito", "Hanoi", "Krakow", "Dublin", "Seville", "Tampere", "Leipzig", "Adelaide",
    "Calgary", "Busan", "Accra", "Lyon",
)  # fmt: skip
ITEMS = (
    "desk lamps", "oak chairs", "wool blankets", "coffee grinders", "garden hoses", "picture frames", "tea kettles",
    "bicycle pumps", "chess sets", "rain jackets", "steel bowls", "wall clocks",
)  # fmt: skip
JOBS = (
    "nurse", "carpenter", "pilot", "teacher", "chemist", "baker", "surveyor", "translator", "welder", "librarian",
    "florist", "plumber",
)  # fmt: skip
EVENTS = (
    "jazz night", "book fair", "chess open", "spring market", "film evening", "robotics show", "choir concert",
    "poetry reading", "photo walk", "science day",
)  # fmt: skip
MONTHS = ("January", "March", "April", "May", "June", "August", "September", "October", "December")


@dataclass(frozen=True)
class Kind:
    """values: of each key, the words it is taken from or the range of a number. texts: ways to tell a record."""

    name: str
    values: dict[str, tuple[str, ...] | range]
    texts: tuple[str, ...]


KINDS = (
    Kind(
        "order",
        {"customer": PEOPLE, "item": ITEMS, "quantity": range(2, 200), "city": CITIES},
        (
            "{customer} ordered {quantity} {item}, to be delivered to {city}.",
            "Please send {quantity} {item} to {city}. The customer is {customer}.",
            "From {city} came an order for {item}: {quantity} of them, signed by {customer}.",
            "We had a call from {customer}, who wants {item} in {city}. The number of pieces is {quantity}.",
            "The parcel for {city} holds {quantity} {item}. It was paid for by {customer}.",
            "{quantity} {item} are on their way to {customer} in {city}.",
        ),
    ),
    Kind(
        "person",
        {"name": PEOPLE, "age": range(18, 90), "job": JOBS, "city": CITIES},
        (
            "{name} is {age} years old, lives in {city} and works as a {job}.",
            "At {age}, {name} has moved to {city} to work as a {job}.",
            "Everyone in {city} knows {name}, the {job}, who has just turned {age}.",
            "My neighbour {name} ({age}) was born in {city}. By trade {name} is a {job}.",
            "The {job} who spoke last, {name}, is {age} and comes from {city}.",
            "In {city} we met a {job} of {age} years by the name of {name}.",
        ),
    ),
    Kind(
        "event",
        {"title": EVENTS, "city": CITIES, "month": MONTHS, "day": range(1, 31), "guests": range(20, 900)},
        (
            "The {title} in {city} is on {month} {day}, and {guests} guests are expected.",
            "On {day} {month} about {guests} guests will come to {city} for the {title}.",
            "{guests} people have booked the {title}. It takes place in {city} on {month} {day}.",
            "Mark {month} {day}: the {title} returns to {city}, with seats for {guests} guests.",
            "{city} invites you to its {title}. The date is {day} {month}, and there is room for {guests} guests.",
            "With {guests} guests, the {title} of {month} {day} will be the largest that {city} has seen.",
        ),
    ),
)  # fmt: skip


class Extraction:
    """Question.answer is the object as JSON text in canonical form. The prompt is a chat."""

    name = "extraction"
    max_tokens = 96

    def questions(self, split: str, count: int | None = None, seed: int = 0) -> Iterator[Question]:
        """The i-th question depends on split, seed and i alone."""
        check_split(split)
        return islice((self.question(split, seed, index) for index in integers()), count)

    def question(self, split: str, seed: int, index: int) -> Question:
        """One question: the first text of this seed and index that falls into the split."""
        draw = random.Random(f"extraction/{split}/{seed}/{index}")
        while True:
            kind = draw.choice(KINDS)
            record = {key: draw.choice(values) for key, values in kind.values.items()}
            text = draw.choice(kind.texts).format(**record)
            if split_of(text) == split:
                break
        keys = ", ".join(f'"{key}"' for key in record)
        asked = f"{text}\n\nWrite this {kind.name} as one JSON object with the keys {keys}. Write nothing else."
        prompt = [{"role": "user", "content": asked}]
        return Question(f"{split}-{seed}-{index}-{text_hash(text)[:8]}", prompt, canonical(record))

    def extract(self, text: str) -> str | None:
        """The first JSON object in a text, in canonical form."""
        decoder = json.JSONDecoder(parse_constant=refuse)
        start = text.find("{")
        while start >= 0:
            try:
                return canonical(decoder.raw_decode(text, start)[0])
            except ValueError:
                start = text.find("{", start + 1)
            except RecursionError:
                break  # from the next brace it would be as deep
        return None

    def utility(self, question: Question, text: str) -> int:
        """Whether the object has the same keys and values; a number in quotes is not a number."""
        return int(self.extract(text) == question.answer)


def canonical(record: Any) -> str:
    """JSON in which equal objects are equal texts: keys in order, and 3.0 written as 3."""
    return json.dumps(plain_numbers(record), sort_keys=True, ensure_ascii=False)


def plain_numbers(value: Any) -> Any:
    """Whole floats as integers, at every depth."""
    if isinstance(value, dict):
        return {key: plain_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def refuse(constant: str) -> None:
    """NaN and Infinity are not JSON."""
    raise ValueError(constant)
