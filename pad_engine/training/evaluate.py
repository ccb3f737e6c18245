"""Put the same questions to a model pair under several settings, all at temperature 0, and keep every answer.

The reference is the target alone. Answers are decoded many at once (forest.py); that is no measure of latency, so the
speed of a setting is measured apart, one stream at a time, on a few questions (runner.py). Next to read: summary.py.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from pad_engine.config import SamplingParams
from pad_engine.errors import RequestError
from pad_engine.forest_request import ForestAnswer, ForestRequest
from pad_engine.state import Overridden
from pad_engine.training.baselines import Rule
from pad_engine.training.results import Answered, Override, Results
from pad_engine.training.tasks.task import Question, Task


@dataclass(frozen=True)
class Setting:
    """How questions are answered. name: in results. depth: drafted tokens a round. draft_alone: by the draft model.
    classifier: the SHA-256 of the file that the rule reads, if it reads one."""

    name: str
    rule: Rule
    depth: int
    draft_alone: bool = False
    classifier: str | None = None

    @property
    def facts(self) -> dict[str, int | str | None]:
        """What its line in a file of results holds."""
        return {"depth": self.depth, "classifier": self.classifier}


# answers of requests by their keys, each under its setting, in any order; settings of one call draft alike
Decode = Callable[[Iterable[tuple[Setting, ForestRequest]]], Iterator[tuple[Setting, ForestAnswer]]]


@dataclass(frozen=True)
class Work:
    """What every setting of a run shares. text_of: of ids. progress: is told a setting, how many questions it has
    answered, and of how many."""

    task: Task
    decode: Decode
    text_of: Callable[[list[int]], str]
    results: Results
    progress: Callable[[str, int, int], None] = lambda setting, done, count: None


def draw(task: Task, split: str, count: int, seed: int) -> list[Question]:
    """So many questions of a split. RequestError if it has fewer, or gives one twice."""
    questions = list(task.questions(split, count, seed))
    if len(questions) < count:
        raise RequestError(
            f"task {task.name} has {len(questions)} questions in its {split} split, and {count} are asked for"
        )
    if len({question.id for question in questions}) < count:
        raise RequestError(f"task {task.name} gives a question twice in its {split} split")
    return questions


def questions_digest(questions: Sequence[Question]) -> str:
    """A SHA-256 over their ids, prompts and answers, in whatever order they come."""
    found = hashlib.sha256()
    for question in sorted(questions, key=lambda question: question.id):
        try:
            text = json.dumps([question.id, question.prompt, question.answer])
        except (TypeError, ValueError) as error:
            raise RequestError(f"question {question.id} is expected to be of what JSON can hold: {error}") from error
        found.update(f"{text}\n".encode())
    return found.hexdigest()


def as_requests(
    questions: Sequence[Question], task: Task, encode: Callable[[Question], list[int]]
) -> list[ForestRequest]:
    """Their prompts, to be answered greedily. The seed is of use to a rule that throws coins, each question its own."""
    return [
        ForestRequest(
            encode(question), SamplingParams(task.max_tokens, seed=zlib.crc32(question.id.encode())), question.id
        )
        for question in questions
    ]


def answer_all(
    setting: Setting, questions: Sequence[Question], requests: Sequence[ForestRequest], work: Work
) -> dict[str, Answered]:
    """answer_each of one setting."""
    return next(answer_each([setting], questions, requests, work))


def answer_each(
    settings: Sequence[Setting], questions: Sequence[Question], requests: Sequence[ForestRequest], work: Work
) -> Iterator[dict[str, Answered]]:
    """The answers of each setting by question, in the order of the settings, decoded as far as the results lack them.
    requests: of the questions.

    Settings that draft alike are decoded together, as far as their answers agree once for all (forest.py): many cost
    little more than the one whose answers differ most from the target's.
    """
    for _, alike in groupby(settings, lambda setting: (setting.depth, setting.draft_alone)):
        yield from answer_alike(list(alike), questions, requests, work)


def answer_alike(
    settings: Sequence[Setting], questions: Sequence[Question], requests: Sequence[ForestRequest], work: Work
) -> Iterator[dict[str, Answered]]:
    """answer_each of settings that draft alike."""
    results, by_id = work.results, {question.id: question for question in questions}
    for setting in [setting for setting in settings if setting.name in results.settings]:
        results.begin(setting.name, setting.facts)  # refuses other facts before anything is decoded
    done = {setting.name: results.answers.setdefault(setting.name, {}) for setting in settings}
    # those of a question side by side: they share what their answers have in common
    asked = [(setting, one) for one in requests for setting in settings if one.key not in done[setting.name]]
    decoded = work.decode(asked)
    for setting in settings:
        work.progress(setting.name, len(done[setting.name]), len(questions))
        while len(done[setting.name]) < len(questions):
            of, answer = next(decoded)
            results.begin(of.name, of.facts)
            results.add(judged(of, by_id[answer.key], answer, work.text_of(answer.token_ids), work.task))
            if of is setting:
                work.progress(of.name, len(done[of.name]), len(questions))
        yield {question.id: done[setting.name][question.id] for question in questions}


def judged(setting: Setting, question: Question, answer: ForestAnswer, text: str, task: Task) -> Answered:
    """An answer with the task's verdict on it."""
    ids = ",".join(map(str, answer.token_ids))
    return Answered(
        setting.name, question.id, int(task.utility(question, text)), task.extract(text), text, len(answer.token_ids),
        hashlib.sha256(ids.encode()).hexdigest(), answer.rounds, answer.draft_tokens, answer.accepted_tokens,
        [as_override(position, kept) for position, kept in answer.overrides], answer.finish_reason,
    )  # fmt: skip


def as_override(position: int, kept: Overridden) -> Override:
    """An override without infinities."""
    numbers = (kept.margin, kept.entropy, kept.probability, kept.pivot_prob)
    return Override(position, *(number if math.isfinite(number) else None for number in numbers))


def harmed(target: Mapping[str, Answered], relaxed: Mapping[str, Answered]) -> list[bool]:
    """For each question whether the target has it right and the other does not."""
    return [bool(target[question].right and not answer.right) for question, answer in relaxed.items()]
