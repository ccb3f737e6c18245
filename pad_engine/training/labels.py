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
models walk along, so its mismatches are found by reading it once. Next to read: progress.py, rollouts.py,
mismatches.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pad_engine.config import SamplingParams
from pad_engine.errors import RequestError
from pad_engine.forest_request import ForestAnswer, ForestRequest
from pad_engine.training.mismatches import Mismatch
from pad_engine.training.progress import Keep, Line, Progress, Rollout, followed, passed
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

    def walk(
        self, question: Question, prompt: list[int], lines: Iterable[Line] = (), keep: Keep = lambda lines: None
    ) -> Walk[Walked]:
        """Label one question. prompt: its token ids. lines: what `keep` was given of it before, in a run that was
        killed; nothing of that is decoded again."""
        pad, so_far = self.settings.labeller == PAD, Progress(lines, keep)
        if pad and not so_far.passed and (objection := (yield from self.objection(question, prompt, so_far))):
            return Walked([], f"discarded: {objection}")
        reference = so_far.reference or (yield from self.follow(question, prompt, [], so_far))
        if not pad and reference.answer is None:
            return Walked([], "discarded: the target's greedy run has no final answer")
        while not so_far.stopped:
            answer = so_far.answer or (yield from self.follow(question, prompt, so_far.head, so_far))
            mismatches: list[Mismatch] = yield Read(prompt + answer.ids, len(prompt))
            for found in (mismatch for mismatch in mismatches if mismatch.index >= so_far.left):
                prefix = answer.ids[: found.index]
                if pad:
                    judged = yield from self.judge(question, prompt, prefix, found)
                else:
                    judged = yield from self.judge_greedy(question, prompt, prefix, found, reference)
                so_far.add(*judged)
                if so_far.stopped or not judged[0]["pivot"]:
                    break
            else:
                return Walked(so_far.records, "finished")
        return Walked(so_far.records, "stopped: both continuations are bad")

    def objection(self, question: Question, prompt: list[int], so_far: Progress) -> Walk[str]:
        """Why rollouts would say nothing of a question; "" if they may."""
        s = self.settings
        base = (yield from self.rollouts(question, prompt, {"base": []}, s.rollouts, s.temperature))["base"]
        if utility(base) <= s.min_utility:
            return f"base utility {utility(base):g}"
        if (sound := self.soundness(question, base)) is False:
            return "the target's reasoning is unsound"
        so_far.add(passed(question.id, utility(base), sound))
        return ""

    def follow(self, question: Question, prompt: list[int], head: list[int], so_far: Progress) -> Walk[Rollout]:
        """The target's greedy answer that begins with a head, as one to go along."""
        answer = yield from self.greedy(question, prompt, head)
        so_far.add(followed(question.id, head, answer))
        return answer

    def judge(self, question: Question, prompt: list[int], prefix: list[int], found: Mismatch) -> Walk[list[Line]]:
        """The label of a mismatch by rollouts from both tokens."""
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
            "stop": stop,
            "draft_rollouts": [one.to_dict() for one in draft], "target_rollouts": [one.to_dict() for one in target],
        }  # fmt: skip
        return [record]

    def judge_greedy(
        self, question: Question, prompt: list[int], prefix: list[int], found: Mismatch, reference: Rollout
    ) -> Walk[list[Line]]:
        """The label of a mismatch by the greedy run behind the draft's token, and that run if it is to be followed.
        reference: the target's own."""
        head = [*prefix, found.draft_id]
        onward = yield from self.greedy(question, prompt, head)
        same = onward.answer == reference.answer or onward.utility == reference.utility == 1
        record = self.record(question, prompt, prefix, found) | {
            "draft_utility": float(same), "target_utility": 1.0, "pivot": not same, "sound": None, "stop": False,
            "draft_rollouts": [onward.to_dict()], "target_rollouts": [reference.to_dict()],
        }  # fmt: skip
        return [record, followed(question.id, head, onward)] if same else [record]

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
