"""What a forest is asked and what it answers, and a request at work in between. Next to read: forest.py."""

import secrets
from dataclasses import dataclass, field
from typing import Any

from pad_engine.config import SamplingParams
from pad_engine.errors import RequestError
from pad_engine.models.loader import LoadedModel
from pad_engine.prompt import encode
from pad_engine.rules.rule import AcceptanceRule
from pad_engine.rules.select import RelaxedRule, rule_for
from pad_engine.state import Commit, Overridden, State
from pad_engine.text import TextStream


@dataclass(frozen=True)
class ForestRequest:
    """prompt: token ids. key: anything; the answer carries it, and errors name it. rule: instead of the forest's, as
    rules.select.bind makes it."""

    prompt: list[int]
    params: SamplingParams
    key: Any = None
    rule: str | AcceptanceRule | RelaxedRule | None = None


@dataclass(frozen=True)
class ForestAnswer:
    """A finished answer. finish_reason: "stop" or "length". seed: the one that was used. draft_tokens: verified.
    accepted_tokens: drafted and kept. overrides: for each token that only an override kept, its index among the
    answer's tokens, and what it was."""

    key: Any
    token_ids: list[int]
    finish_reason: str
    seed: int
    rounds: int
    draft_tokens: int
    accepted_tokens: int
    overrides: list[tuple[int, Overridden]]


@dataclass
class Running:
    """A request at work. text: looks for its stop texts, if it has any."""

    request: ForestRequest
    state: State
    rule: AcceptanceRule
    text: TextStream | None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    overrides: list[tuple[int, Overridden]] = field(default_factory=list)

    def add(self, commit: Commit) -> None:
        """Count a round, cut where a stop text ends the answer."""
        if self.text is not None and (count := self.text.push(commit.tokens)[1]) is not None:
            commit = self.state.cut(commit, count)
        self.draft_tokens += len(commit.tree) - 1
        self.accepted_tokens += commit.accepted
        first = len(self.state.ids) - self.state.prompt_length - len(commit.tokens)
        depth = commit.tree.depth
        self.overrides += [(first + depth[one.node] - 1, one) for one in commit.overridden]

    def answer(self) -> ForestAnswer:
        """What has been generated."""
        state = self.state
        if self.text is not None and not self.text.stopped:
            self.text.flush()  # a stop text may be complete only with the last bytes
        reason = "stop" if self.text is not None and self.text.stopped else state.finish_reason
        assert reason is not None
        return ForestAnswer(
            self.request.key, state.generated, reason, state.seed, state.round, self.draft_tokens,
            self.accepted_tokens, self.overrides,
        )  # fmt: skip


def start(
    request: ForestRequest, target: LoadedModel, rule: str | AcceptanceRule | RelaxedRule, max_length: int
) -> Running:
    """A request before its first round. max_length: tokens of prompt and answer together at most. RequestError names
    what is wrong with it, and its key."""
    params = request.params
    try:
        prompt = encode(target.tokenizer, request.prompt, target.num_tokens)
        chosen = rule_for(rule, params)
    except RequestError as error:
        raise RequestError(f"request {request.key!r}: {error}", error.hint) from error
    if params.logprobs is not None:
        raise RequestError(f"request {request.key!r}: answers of a forest have no logprobs")
    if len(prompt) >= max_length:
        raise RequestError(
            f"request {request.key!r}: its prompt has {len(prompt)} tokens and leaves no room in a context of "
            f"{max_length}"
        )
    end_ids = frozenset(params.stop_token_ids)
    end_ids |= frozenset() if params.ignore_eos else frozenset(target.eos_token_ids)
    seed = secrets.randbits(53) if params.seed is None else params.seed
    state = State(prompt, len(prompt), max_length, params, seed, end_ids)
    state.draws_from_q = chosen.end.startswith("residual") and not params.greedy
    state.keeps_q = chosen.reads_q
    stops = params.stop_texts
    text = TextStream(target.tokenizer, stops, params.min_tokens) if stops else None
    return Running(request, state, chosen, text)
