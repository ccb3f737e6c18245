"""Which of a draft model's mismatched tokens matter: labels for a pivot classifier, by rollouts of the target.

`pad` is the procedure of "Reject Only Critical Tokens: Pivot-Aware Speculative Decoding" (arXiv 2511.00351, as in the
authors' dataset_generation.py). An answer is followed token by token, both models greedy. Where they differ, the target
goes on N times, sampled, from the draft's token and from its own; the token is a pivot if that lowers the utility. The
answer then goes on with the target's token, and with the draft's if it was none: on-policy for the rule to be trained.

`greedy` is the cheap choice, after AutoJudge (arXiv 2504.20039): one greedy continuation from the draft's token, which
is a pivot unless the final answer is that of the target's own greedy run. Beside AutoJudge, a token is also none if
both runs are right by the task (its answers of code are compared so), and a question whose greedy run has no final
answer is discarded.

Both follow one answer, the target's greedy one: until the next token that is kept from the draft it is what the two
models walk along, so its mismatches are found by reading it once. Next to read: rollouts.py, mismatches.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pad_engine.config import SamplingParams
from pad_engine.errors import RequestError
from pad_engine.forest_request import ForestAnswer, ForestRequest
from pad_engine.training.mismatches import Mismatch
from pad_engine.training.rollouts import Read, Walk, rollout_seed
from pad_engine.training.tasks.task import Question, Task

PAD, GREEDY = "pad", "greedy"
Sound = Callable[[Question, str], bool]
# what exceeds a share of counts by rounding alone is no drop
ROUNDING = 1e-9


@dataclass(frozen=True)
class LabelSettings:
    """labeller: "pad" or "greedy". rollouts: N, from each branch, at `temperature`. drop: when a utility `kept` of the
    draft's branch is too low beside `base` of the target's: "ratio:a" (kept < a * base), "difference:a" (kept + a <
    base) or "threshold:a" (kept < a). min_utility: a question that N rollouts from its prompt do not solve oftener is
    discarded. seed: of all rollouts. The greedy labeller uses none of the others."""

    labeller: str = PAD
    rollouts: int = 20
    temperature: float = 0.7
    drop: str = "ratio:0.9"
    min_utility: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.labeller not in (PAD, GREEDY):
            raise RequestError(f"labeller must be {PAD} or {GREEDY}, got {self.labeller!r}")
        if self.rollouts < 1:
            raise RequestError(f"rollouts must be at least 1, got {self.rollouts}")
        if not 0 <= self.min_utility < 1:
            raise RequestError(f"min_utility must be in [0, 1), got {self.min_utility}")
        parse_drop(self.drop)
        SamplingParams(temperature=self.temperature)


def parse_drop(spec: str) -> Callable[[float, float], bool]:
    """From the utilities of the draft's and the target's branch to whether the first is too low."""
    kind, _, number = spec.partition(":")
    try:
        a = float(number)
    except ValueError:
        a = -1.0
    if kind not in ("ratio", "difference", "threshold") or not 0 <= a <= 1:
        raise RequestError(f"drop must be ratio:A, difference:A or threshold:A with A in [0, 1], got {spec!r}")
    if kind == "ratio":
        return lambda kept, base: kept < a * base - ROUNDING
    if kind == "difference":
        return lambda kept, base: kept + a < base - ROUNDING
    return lambda kept, base: kept < a - ROUNDING


@dataclass(frozen=True)
class Rollout:
    """A judged text. seed: None for one that had ended already. ids: of the whole answer. answer: the final one."""

    seed: int | None
    ids: list[int]
    answer: str | None
    finish_reason: str
    utility: int

    def to_dict(self) -> dict[str, Any]:
        """As a record holds it."""
        fields = {key: value for key, value in asdict(self).items() if key != "ids"}
        return fields | {"tokens": len(self.ids)}


@dataclass(frozen=True)
class Step:
    """A labelled mismatch. onward: the target's greedy answer behind the draft's token, where it is known. stop: the
    question ends here."""

    record: dict[str, Any]
    onward: Rollout | None = None
    stop: bool = False


@dataclass(frozen=True)
class Walked:
    """A finished question. reason: "finished", "stopped: ..." or "discarded: ..."."""

    records: list[dict[str, Any]]
    reason: str


@dataclass(frozen=True)
class Labeller:
    """text_of: of token ids. end_ids: tokens that end an answer. max_length: of prompt and answer. sound: a judge of
    the reasoning in a right answer, which can only turn a label into a pivot; without one a branch is sound if any of
    its rollouts is right."""

    task: Task
    settings: LabelSettings
    text_of: Callable[[list[int]], str]
    end_ids: frozenset[int]
    max_length: int
    sound: Sound | None = None

    def walk(self, question: Question, prompt: list[int]) -> Walk[Walked]:
        """Label one question. prompt: its token ids."""
        pad = self.settings.labeller == PAD
        if pad and (objection := (yield from self.objection(question, prompt))):
            return Walked([], f"discarded: {objection}")
        reference = answer = yield from self.greedy(question, prompt, [])
        if not pad and reference.answer is None:
            return Walked([], "discarded: the target's greedy run has no final answer")
        records: list[dict[str, Any]] = []
        mismatches: list[Mismatch] = yield Read(prompt + answer.ids, len(prompt))
        while mismatches:
            found, *mismatches = mismatches
            prefix = answer.ids[: found.index]
            if pad:
                step = yield from self.judge(question, prompt, prefix, found)
            else:
                step = yield from self.judge_greedy(question, prompt, prefix, found, reference)
            records.append(step.record)
            if step.stop:
                return Walked(records, "stopped: both continuations are bad")
            if not step.record["pivot"]:
                answer = step.onward or (yield from self.greedy(question, prompt, [*prefix, found.draft_id]))
                read: list[Mismatch] = yield Read(prompt + answer.ids, len(prompt))
                mismatches = [mismatch for mismatch in read if mismatch.index > found.index]
        return Walked(records, "finished")

    def objection(self, question: Question, prompt: list[int]) -> Walk[str]:
        """Why rollouts would say nothing of a question; "" if they may."""
        s = self.settings
        base = (yield from self.rollouts(question, prompt, {"base": []}, s.rollouts, s.temperature))["base"]
        if utility(base) <= s.min_utility:
            return f"base utility {utility(base):g}"
        return "the target's reasoning is unsound" if self.soundness(question, base) is False else ""

    def judge(self, question: Question, prompt: list[int], prefix: list[int], found: Mismatch) -> Walk[Step]:
        """Label a mismatch by rollouts from both tokens."""
        s = self.settings
        heads = {"draft": [*prefix, found.draft_id], "target": [*prefix, found.target_id]}
        branches = yield from self.rollouts(question, prompt, heads, s.rollouts, s.temperature)
        draft, target = branches["draft"], branches["target"]
        sound = self.soundness(question, draft)
        pivot = parse_drop(s.drop)(utility(draft), utility(target)) or sound is False or utility(draft) == 0
        bad = pivot or utility(target) <= s.min_utility
        stop = bad and (utility(target) == 0 or self.soundness(question, target) is False)
        record = self.record(question, prompt, prefix, found) | {
            "draft_utility": utility(draft), "target_utility": utility(target), "pivot": pivot, "sound": sound,
            "draft_rollouts": [one.to_dict() for one in draft], "target_rollouts": [one.to_dict() for one in target],
        }  # fmt: skip
        return Step(record, stop=stop)

    def judge_greedy(
        self, question: Question, prompt: list[int], prefix: list[int], found: Mismatch, reference: Rollout
    ) -> Walk[Step]:
        """Label a mismatch by the greedy run behind the draft's token. reference: the target's own."""
        onward = yield from self.greedy(question, prompt, [*prefix, found.draft_id])
        same = onward.answer == reference.answer or onward.utility == reference.utility == 1
        record = self.record(question, prompt, prefix, found) | {
            "draft_utility": float(same), "target_utility": 1.0, "pivot": not same, "sound": None,
            "draft_rollouts": [onward.to_dict()], "target_rollouts": [reference.to_dict()],
        }  # fmt: skip
        return Step(record, onward)

    def record(self, question: Question, prompt: list[int], prefix: list[int], found: Mismatch) -> dict[str, Any]:
        """What is known of a mismatch before it is judged."""
        return {
            "question": question.id, "step": found.index, "labeller": self.settings.labeller, "prompt_ids": prompt,
            "prefix_ids": prefix, "draft_id": found.draft_id, "target_id": found.target_id,
            "draft_text": self.text_of([found.draft_id]), "target_text": self.text_of([found.target_id]),
            "margin": found.margin, "entropy": found.entropy, "probability": found.probability,
        }  # fmt: skip

    def greedy(self, question: Question, prompt: list[int], head: list[int]) -> Walk[Rollout]:
        """The target's greedy answer that begins with a head."""
        return (yield from self.rollouts(question, prompt, {"greedy": head}, 1, 0.0))["greedy"][0]

    def rollouts(
        self, question: Question, prompt: list[int], heads: Mapping[str, list[int]], count: int, temperature: float
    ) -> Walk[dict[str, list[Rollout]]]:
        """`count` answers from each of some heads, by their names. A head that ends the answer is taken as it is."""
        going = {name: head for name, head in heads.items() if not self.end_reason(prompt, head)}
        requests = []
        for name, head in going.items():
            for index in range(count):
                seed = rollout_seed(self.settings.seed, question.id, len(head), name, index)
                params = SamplingParams(self.task.max_tokens - len(head), temperature, seed)
                requests.append(ForestRequest([*prompt, *head], params))
        answers: list[ForestAnswer] = yield requests
        ended = {name: self.end_reason(prompt, head) for name, head in heads.items() if name not in going}
        found = {name: [self.judged(question, None, heads[name], reason)] for name, reason in ended.items()}
        for place, (name, head) in enumerate(going.items()):
            part = answers[place * count : (place + 1) * count]
            found[name] = [self.judged(question, a.seed, [*head, *a.token_ids], a.finish_reason) for a in part]
        return found

    def end_reason(self, prompt: list[int], head: list[int]) -> str:
        """Why an answer that begins so has ended; "" if it goes on."""
        if head and head[-1] in self.end_ids:
            return "stop"
        full = len(head) >= self.task.max_tokens or len(prompt) + len(head) >= self.max_length
        return "length" if full else ""

    def judged(self, question: Question, seed: int | None, ids: list[int], finish_reason: str) -> Rollout:
        """The task's verdict on an answer."""
        text = self.text_of(ids)
        return Rollout(seed, ids, self.task.extract(text), finish_reason, int(self.task.utility(question, text)))

    def soundness(self, question: Question, rollouts: Sequence[Rollout]) -> bool | None:
        """The judge's word on the right answer of median length; None without a judge, or a right answer."""
        right = sorted((one for one in rollouts if one.utility), key=lambda one: len(one.ids))
        if self.sound is None or not right:
            return None
        return bool(self.sound(question, self.text_of(right[(len(right) - 1) // 2].ids)))


def utility(rollouts: Sequence[Rollout]) -> float:
    """Share of right ones."""
    return sum(one.utility for one in rollouts) / len(rollouts)
