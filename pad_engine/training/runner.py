"""A loaded pair of models, as evaluation and calibration use it: many questions at once, or one stream to be timed.

Next to read: forest.py for the former, engine.py for the latter.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pad_engine.errors import RequestError
from pad_engine.forest import Pair, decode_forest
from pad_engine.forest_request import ForestAnswer, ForestRequest
from pad_engine.loader import draft_engine
from pad_engine.models.decoder import Decoder
from pad_engine.models.loader import LoadedModel
from pad_engine.prompt import encode
from pad_engine.rules.select import bind
from pad_engine.text import TextStream
from pad_engine.training.apart import classifier_of
from pad_engine.training.baselines import direct, make_any_rule
from pad_engine.training.evaluate import Setting
from pad_engine.training.settings import DIRECT, DRAFT, GREEDY, TARGET
from pad_engine.training.tasks.task import Question


@dataclass(frozen=True)
class Runner:
    """draft: the pair's draft model. depth: drafted tokens a round. batch: questions decoded at once. digests: of the
    pair's files, as a header holds them."""

    pair: Pair
    draft: Decoder
    depth: int = 8
    batch: int = 64
    digests: Mapping[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> LoadedModel:
        """The pair's target."""
        return self.pair.target

    def encode(self, question: Question) -> list[int]:
        """The ids of a question's prompt. RequestError names the question that has none, or too many."""
        try:
            ids = encode(self.target.tokenizer, question.prompt, self.target.num_tokens)
        except RequestError as error:
            raise RequestError(f"question {question.id}: {error}", error.hint) from error
        if len(ids) >= self.target.decoder.max_length:
            raise RequestError(
                f"question {question.id} has {len(ids)} tokens and leaves no room in a context of "
                f"{self.target.decoder.max_length}",
                "raise --max-length if the model allows",
            )
        return ids

    def text_of(self, ids: list[int]) -> str:
        """The text of an answer, as the engine gives it."""
        return TextStream(self.target.tokenizer).decode(ids)

    def setting(self, spec: str) -> Setting:
        """TARGET, DRAFT, or a rule by its spec, which may begin with DIRECT."""
        if spec in (TARGET, DRAFT):
            return Setting(spec, GREEDY, 0, draft_alone=spec == DRAFT)
        name = spec.removeprefix(DIRECT)
        rule = bind(make_any_rule(name, self.target.num_tokens), self.target.decoder, self.target.num_tokens)
        if name == spec:
            return Setting(spec, rule, self.depth, classifier=file_hash(name))
        return Setting(spec, direct(rule, name), 1, classifier=file_hash(name))

    def decode(self, asked: Iterable[tuple[Setting, ForestRequest]]) -> Iterator[tuple[Setting, ForestAnswer]]:
        """The answers of requests, each under its setting, in order of completion. The settings draft alike."""
        asked = list(asked)
        if not asked:
            return
        settings = {setting.name: setting for setting, _ in asked}
        first = next(iter(settings.values()))
        assert all((one.depth, one.draft_alone) == (first.depth, first.draft_alone) for one in settings.values())
        pair = self.pair_of(first)
        # every sequence's cache is as long as the longest may get
        longest = max(len(request.prompt) + request.params.max_tokens for _, request in asked)
        length, batch = min(longest, pair.target.decoder.max_length), min(self.batch, len(asked))
        requests = (replace(one, key=(setting.name, one.key), rule=setting.rule) for setting, one in asked)
        for answer in decode_forest(pair, requests, depth=first.depth, batch=batch, max_length=length):
            name, key = answer.key
            yield settings[name], replace(answer, key=key)

    def pair_of(self, setting: Setting) -> Pair:
        """The pair, or the draft model in the target's place, with what it knows of the target's vocabulary."""
        if not setting.draft_alone:
            return self.pair
        return Pair(replace(self.target, decoder=self.draft, num_tokens=self.pair.shared_tokens))

    def speed(self, setting: Setting, requests: Sequence[ForestRequest], fixed: bool = False) -> dict[str, Any]:
        """Answer requests one by one by the engine, whose controller decides how much is drafted, once without a clock
        and once with it, all rounds captured before. Prefill is left out. fixed: the whole depth is drafted in every
        round, whatever the controller would say."""
        loaded, options = self.pair_of(setting).target, {"rule": setting.rule, "fixed_budget": fixed}
        engine = draft_engine(loaded, self.draft, self.pair.shared_tokens, setting.depth, **options)
        engine.warm_up(requests[0].prompt)
        for _ in range(2):
            outputs = [engine.generate(request.prompt, request.params).stats for request in requests]
        tokens, seconds = (
            sum(getattr(one, name) for one in outputs) for name in ("completion_tokens", "decode_seconds")
        )
        rounds = sum(one.rounds for one in outputs)
        return {"tokens_per_second": tokens / seconds, "tokens_per_round": tokens / rounds, "questions": len(outputs),
                "tokens": tokens, "seconds": seconds, "device": str(loaded.decoder.device)}  # fmt: skip


def file_hash(spec: str) -> str | None:
    """The SHA-256 of the classifier that a rule's spec names, so that answers of another one are not taken for its."""
    path = classifier_of(spec)
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
