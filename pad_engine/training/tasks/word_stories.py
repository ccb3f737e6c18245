"""Stories of word problems: steps of arithmetic on a number of things, told in changing words.

Every number in between is whole and at least 2, and products stay within 9 x 9 or 9 x 99, so that a small model can
learn all of it. Next to read: word_solutions.py, how a worked solution is worded.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

NAMES = (
    "Anna", "Boris", "Chloe", "Daniel", "Elif", "Felix", "Greta", "Hassan", "Irene", "Jakob", "Karin", "Leo", "Mina",
    "Noah", "Olivia", "Peter", "Rita", "Simon", "Tara", "Viktor", "Wanda", "Yusuf", "Zoe", "Amos", "Bella",
)  # fmt: skip
THINGS = (
    "apples", "marbles", "stamps", "pencils", "cookies", "shells", "stickers", "coins", "buttons", "candles", "books",
    "postcards", "eggs", "tickets", "beads", "lemons", "roses", "bricks", "cups", "toys",
)  # fmt: skip
BOXES = ("boxes", "bags", "baskets", "crates", "packs", "drawers", "trays", "jars", "sacks", "cartons")

SMALL_FACTOR, SUMMAND = 9, 99  # at most

# What happens, by kind; {n} and {k} are the numbers of it. Six wordings of each.
START = (
    "{name} has {n} {things}.",
    "{name} starts out with {n} {things}.",
    "At first {name} owns {n} {things}.",
    "There are {n} {things} on {name}'s table.",
    "In the morning {name} counts {n} {things}.",
    "A parcel with {n} {things} arrives for {name}.",
)
START_PACKED = (
    "{name} has {k} {boxes} with {n} {things} in each.",
    "{name} buys {k} {boxes} of {n} {things} each.",
    "There are {k} {boxes} in {name}'s room, and each holds {n} {things}.",
    "{name} puts {n} {things} into each of {k} {boxes}.",
    "With {n} {things} in every one, {name} fills {k} {boxes}.",
    "{name} owns {k} {boxes}. Every one of them holds {n} {things}.",
)
GAIN = (
    "{name} gets {n} more.",
    "Then {name} buys another {n} {things}.",
    "{other} gives {name} {n} {things}.",
    "Later {n} {things} are added.",
    "{name} finds {n} more {things} in the attic.",
    "The next day {n} new {things} arrive.",
)
LOSE = (
    "{name} gives {n} {things} to {other}.",
    "Then {n} {things} are sold.",
    "Sadly, {n} of the {things} get lost.",
    "{name} leaves {n} {things} behind on the way.",
    "{other} takes {n} {things} and does not bring them back.",
    "After that {name} throws away {n} {things}.",
)
GAIN_PACKED = (
    "{name} also gets {k} {boxes} with {n} {things} in each.",
    "Then {k} {boxes} arrive, each with {n} {things}.",
    "{other} brings {k} {boxes} of {n} {things} each.",
    "{name} buys {n} {things} in each of {k} shops.",
    "For {k} days {name} adds {n} {things} a day.",
    "Every week for {k} weeks {name} finds {n} {things}.",
)
LOSE_PACKED = (
    "{name} gives {n} {things} to each of {k} friends.",
    "Then {k} children take {n} {things} each.",
    "{name} sells {k} {boxes} with {n} {things} in each.",
    "For {k} days {name} uses {n} {things} a day.",
    "{name} drops off {n} {things} at each of {k} houses.",
    "Each of {k} visitors takes {n} {things}.",
)
TIMES = (
    "By the end of the year there are {k} times as many.",
    "A gift makes the number of {things} {k} times as large.",
    "Over the summer the collection becomes {k} times as big.",
    "Then {name} gets so many that there are {k} times as many {things} as before.",
    "{name} makes the stock {k} times as large.",
    "Soon the number of {things} has grown to {k} times what it was.",
)
SHARE = (
    "{name} shares them equally among {k} friends. How many {things} does each friend get?",
    "They are put into {k} {boxes}, the same number in each. How many {things} are in one of them?",
    "Now {k} people split them evenly. How many {things} does one person have?",
    "{name} packs them into {k} equal {boxes}. What is the number of {things} in each?",
    "In the end {k} children get the same number. How many {things} is that for each child?",
    "{name} makes {k} equal piles. How many {things} are in a pile?",
)
PRICE = (
    "Each one is sold for {k} dollars. How much money does {name} make?",
    "{name} sells them all at {k} dollars each. How many dollars is that?",
    "One of them costs {k} dollars. What do all of them cost?",
    "{other} pays {k} dollars for every one. How many dollars does {name} get?",
    "At a price of {k} dollars each, how much are they worth together?",
    "What are they worth in dollars if each is worth {k} dollars?",
)
COUNT = (
    "How many {things} does {name} have now?",
    "How many {things} are there in the end?",
    "What is the number of {things} after all this?",
    "How many {things} is that altogether?",
    "Find the number of {things} that {name} has at the end.",
    "With how many {things} does {name} end up?",
)

APPLY: dict[str, Callable[[int, int], int]] = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
    "/": int.__floordiv__,
}


@dataclass(frozen=True)
class Step:
    """left op right = result. unit: what the result counts."""

    left: int
    op: str
    right: int
    unit: str

    @property
    def result(self) -> int:
        """A whole number; a division has no rest."""
        return APPLY[self.op](self.left, self.right)


@dataclass(frozen=True)
class Story:
    """text: the question. name, things: whom and what it is about. steps: in the order of the solution; the last result
    is the answer."""

    text: str
    name: str
    things: str
    steps: tuple[Step, ...]


class Teller:
    """Tells one story with the draws of one generator. factor: the larger factor of a product at most."""

    def __init__(self, draw: random.Random, factor: int) -> None:
        self.draw, self.factor = draw, factor
        name, other = draw.sample(NAMES, 2)
        self.words = {"name": name, "other": other, "things": draw.choice(THINGS), "boxes": draw.choice(BOXES)}
        self.sentences: list[str] = []
        self.steps: list[Step] = []
        self.total = 0

    def tell(self, count: int) -> Story:
        """A story of so many steps."""
        self.draw.choice([self.start, self.start_packed])()
        while (room := count - len(self.steps)) > 0:
            self.draw.choice(self.possible(room))()
        if self.sentences[-1][-1] != "?":
            self.say(COUNT)
        return Story(" ".join(self.sentences), self.words["name"], self.words["things"], tuple(self.steps))

    def possible(self, room: int) -> list[Callable[[], None]]:
        """What may happen next, with so many steps to go; share and price end a story."""
        found = [self.gain]
        if self.total >= 4:
            found.append(self.lose)
        if self.total <= self.factor:
            found.append(self.times)
        if room > 1:
            found.append(self.gain_packed)
        if room > 1 and self.total >= 6:
            found.append(self.lose_packed)
        if room == 1 and self.total <= self.factor:
            found.append(self.price)
        if room == 1 and self.shares():
            found.append(self.share)
        return found

    def start(self) -> None:
        self.total = self.draw.randint(2, SUMMAND)
        self.say(START, n=self.total)

    def start_packed(self) -> None:
        k, n = self.factors(self.factor)
        self.say(START_PACKED, k=k, n=n)
        self.step(k, "*", n)

    def gain(self) -> None:
        n = self.draw.randint(2, SUMMAND)
        self.say(GAIN, n=n)
        self.step(self.total, "+", n)

    def lose(self) -> None:
        n = self.draw.randint(2, min(SUMMAND, self.total - 2))
        self.say(LOSE, n=n)
        self.step(self.total, "-", n)

    def gain_packed(self) -> None:
        total, (k, n) = self.total, self.factors(self.factor)
        self.say(GAIN_PACKED, k=k, n=n)
        self.step(k, "*", n)
        self.step(total, "+", k * n)

    def lose_packed(self) -> None:
        total, (k, n) = self.total, self.factors((self.total - 2) // 2)
        self.say(LOSE_PACKED, k=k, n=n)
        self.step(k, "*", n)
        self.step(total, "-", k * n)

    def times(self) -> None:
        k = self.draw.randint(2, SMALL_FACTOR)
        self.say(TIMES, k=k)
        self.step(self.total, "*", k)

    def share(self) -> None:
        k = self.draw.choice(self.shares())
        self.say(SHARE, k=k)
        self.step(self.total, "/", k)

    def price(self) -> None:
        k = self.draw.randint(2, SMALL_FACTOR)
        self.say(PRICE, k=k)
        self.step(self.total, "*", k, unit="dollars")

    def factors(self, most: int) -> tuple[int, int]:
        """Two factors in either order; the product is at most twice `most` if that is small."""
        small = self.draw.randint(2, min(SMALL_FACTOR, most))
        large = self.draw.randint(2, min(self.factor, 2 * most // small))
        return (small, large) if self.draw.random() < 0.5 else (large, small)

    def shares(self) -> list[int]:
        """Into how many parts the total can be split evenly, each part as large as a factor may be."""
        return [k for k in range(2, SMALL_FACTOR + 1) if self.total % k == 0 and 2 <= self.total // k <= self.factor]

    def say(self, wordings: tuple[str, ...], **numbers: int) -> None:
        """One of the wordings."""
        self.sentences.append(self.draw.choice(wordings).format(**self.words, **numbers))

    def step(self, left: int, op: str, right: int, unit: str = "") -> None:
        """A step of the solution, whose result is the number of things from now on."""
        self.steps.append(Step(left, op, right, unit or self.words["things"]))
        self.total = self.steps[-1].result
