"""What a request gives back: text and ids, why it ended, and what its rounds were like."""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from pad_engine.state import Commit


@dataclass
class Stats:
    """Counts of one request. Times are in seconds; decode_seconds runs from the first pass after the prompt's.

    seed: the one that was used. reused_tokens: of the prompt, in the cache already. draft_tokens: verified, roots
    excluded. accepted_tokens: drafted and kept. overrides: accepted although the target would have chosen otherwise.
    acceptance_by_position: of the rounds that drafted so deep, the share that kept a token there.
    """

    seed: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    overrides: int = 0
    prefill_seconds: float = 0.0
    time_to_first_token: float = 0.0
    decode_seconds: float = 0.0
    tried_by_position: list[int] = field(default_factory=list, repr=False)
    accepted_by_position: list[int] = field(default_factory=list, repr=False)

    def add(self, commit: Commit) -> None:
        """Count one round."""
        self.rounds += 1
        self.completion_tokens += len(commit.tokens)
        self.draft_tokens += len(commit.tree) - 1
        self.accepted_tokens += commit.accepted
        self.overrides += len(commit.overridden)
        depth = max(commit.tree.depth)
        missing = depth - len(self.tried_by_position)
        self.tried_by_position += [0] * missing
        self.accepted_by_position += [0] * missing
        for position in range(depth):
            self.tried_by_position[position] += 1
            self.accepted_by_position[position] += position < commit.accepted

    @property
    def mean_accept_length(self) -> float:
        """Drafted tokens kept a round, the token after them excluded."""
        return self.accepted_tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_round(self) -> float:
        """All tokens emitted a round."""
        return self.completion_tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the time of decoding, the prompt's excluded."""
        return self.completion_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of kept tokens at each drafted position."""
        return [a / t for a, t in zip(self.accepted_by_position, self.tried_by_position, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """All figures, as JSON holds them."""
        counts = {key: value for key, value in asdict(self).items() if not key.endswith("_by_position")}
        names = ("mean_accept_length", "tokens_per_round", "tokens_per_second", "acceptance_by_position")
        return counts | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class TokenLogprobs:
    """One emitted token, its log-probability under the target's raw logits (natural, temperature 1), and the likeliest
    tokens at its place, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


def token_logprobs(logits: Tensor, commit: Commit, count: int) -> list[TokenLogprobs]:
    """The log-probabilities of a round's tokens. logits: raw, fp32 `[N, V]` of the round's tree. count: likeliest
    tokens to report."""
    rows = logits[commit.path[: len(commit.tokens)]].log_softmax(-1)
    ranked = rows.sort(dim=-1, descending=True, stable=True)
    values, ids = ranked.values[:, :count].tolist(), ranked.indices[:, :count].tolist()
    return [
        TokenLogprobs(token, float(row[token]), list(zip(top_ids, top, strict=True)))
        for token, row, top_ids, top in zip(commit.tokens, rows, ids, values, strict=True)
    ]


@dataclass(frozen=True)
class Delta:
    """A piece of a streamed answer. text may be empty while a character is incomplete or a stop text may have begun.
    The last one has a finish_reason."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stats: Stats | None = None


@dataclass(frozen=True)
class Output:
    """A finished answer. finish_reason: "stop" (end of sequence or stop text), "length" or "cancelled". logprobs: None
    unless asked for."""

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    logprobs: list[TokenLogprobs] | None = None

    def to_dict(self) -> dict[str, Any]:
        """One JSON object."""
        return asdict(self) | {"stats": self.stats.to_dict()}


def collect(deltas: Iterable[Delta]) -> Output:
    """The whole answer of a stream that is read to its end."""
    text = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    for delta in deltas:
        text += delta.text
        token_ids += delta.token_ids
        if delta.logprobs is not None:
            logprobs = (logprobs or []) + delta.logprobs
    assert delta.finish_reason is not None and delta.stats is not None
    return Output(text, token_ids, delta.finish_reason, delta.stats, logprobs)


class Stopwatch:
    """Milliseconds between laps."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def lap(self) -> float:
        """Time since the last lap."""
        now = time.perf_counter()
        elapsed, self.last = now - self.last, now
        return 1000 * elapsed
