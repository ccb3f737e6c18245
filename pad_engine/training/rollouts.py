"""Continuations of answers, many questions at once: a question is a generator that yields what it wants decoded or read
and receives the result, and a small scheduler keeps the forest's batch full.

N rollouts from several branches are so many requests whose prompts begin alike: the forest reads a beginning once and
copies it to the others. A rollout's seed is a hash of where it stands, so results do not depend on what ran beside it.
Next to read: labels.py.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar

from pad_engine.forest import Forest
from pad_engine.forest_request import ForestAnswer, ForestRequest

READ_BATCH = 16  # answers that are read together

Found = TypeVar("Found")


@dataclass(frozen=True)
class Read:
    """A wish to have an answer read by both models. ids: prompt and answer."""

    ids: list[int]
    prompt_length: int


Ask = list[ForestRequest] | Read
# it receives the answers to its requests in their order, or what its answer was read as
Walk = Generator[Ask, Any, Found]
Reader = Callable[[Sequence[Read]], Sequence[Any]]


def rollout_seed(seed: int, question: str, step: int, branch: str, index: int) -> int:
    """A seed of 53 bits, which JSON holds exactly everywhere."""
    name = "\0".join(map(str, (seed, question, step, branch, index)))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 11


@dataclass
class Job:
    """A question at work: what it has asked for, and the answers so far."""

    name: str
    walk: Walk[Any]
    answers: list[ForestAnswer | None] = field(default_factory=list)


class Scheduler:
    """Runs walks over one forest. reader: reads answers for them, several at once. parallel: questions at work at most;
    a new one begins when the forest would not be full otherwise."""

    def __init__(self, forest: Forest, reader: Reader, parallel: int) -> None:
        self.forest, self.reader, self.parallel = forest, reader, parallel
        self.jobs: dict[int, Job] = {}
        self.queue: deque[ForestRequest] = deque()
        self.reads: deque[tuple[int, Read]] = deque()
        self.numbers = count()

    def run(self, walks: Iterable[tuple[str, Walk[Found]]]) -> Iterator[tuple[str, Found]]:
        """What each walk returns, by its name, as they end."""
        waiting = iter(walks)
        while True:
            while len(self.jobs) < self.parallel and len(self.queue) < self.forest.room:
                if (begun := next(waiting, None)) is None:
                    break
                number = next(self.numbers)
                self.jobs[number] = Job(*begun)
                yield from self.advance(number, None)
            while self.queue and self.forest.room:
                self.forest.add(self.queue.popleft())
            if self.reads and (len(self.reads) >= READ_BATCH or not self.queue):
                yield from self.read()
            elif self.forest.busy:
                for answer in self.forest.step():
                    yield from self.deliver(answer)
            elif not self.jobs:
                return

    def advance(self, number: int, value: Any) -> Iterator[tuple[str, Any]]:
        """Give a walk what it has asked for, and queue what it asks for next."""
        job = self.jobs[number]
        try:
            ask = job.walk.send(value)
            while ask == []:
                ask = job.walk.send([])
        except StopIteration as end:
            del self.jobs[number]
            yield job.name, end.value
            return
        if isinstance(ask, Read):
            self.reads.append((number, ask))
            return
        job.answers = [None] * len(ask)
        self.queue.extend(replace(request, key=(job.name, number, place)) for place, request in enumerate(ask))

    def deliver(self, answer: ForestAnswer) -> Iterator[tuple[str, Any]]:
        """Sort an answer in; the last one that a walk waits for lets it go on."""
        _, number, place = answer.key
        answers = self.jobs[number].answers
        answers[place] = answer
        if all(answers):
            yield from self.advance(number, answers)

    def read(self) -> Iterator[tuple[str, Any]]:
        """Read the answers that wait for it."""
        batch = [self.reads.popleft() for _ in range(min(READ_BATCH, len(self.reads)))]
        for (number, _), found in zip(batch, self.reader([read for _, read in batch]), strict=True):
            yield from self.advance(number, found)
