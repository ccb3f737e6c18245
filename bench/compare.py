"""Two engines on the same prompts, in turns: what drafting makes of tokens per second, and of the answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pad_engine import Engine, SamplingParams


@dataclass(frozen=True)
class Comparison:
    """Sums over prompts; of each prompt the median seconds of some turns, and the counts of the last."""

    prompts: int
    equal: int
    tokens: int
    plain_seconds: float
    seconds: float
    rounds: int
    draft_tokens: int
    accepted: int

    @property
    def over_plain(self) -> float:
        """How many times as fast as plain decoding."""
        return self.plain_seconds / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """As it stands in result files."""
        return {
            "over plain": round(self.over_plain, 3),
            "plain tokens_per_second": round(self.tokens / self.plain_seconds, 2),
            "tokens_per_second": round(self.tokens / self.seconds, 2),
            "mean_accept_length": round(self.accepted / self.rounds, 3),
            "tokens_per_round": round(self.tokens / self.rounds, 3),
            "drafted_per_round": round(self.draft_tokens / self.rounds, 3),
            "equal answers": f"{self.equal} of {self.prompts}",
        }


def compare(
    plain: Engine, fast: Engine, prompts: Sequence[list[int]], params: SamplingParams, turns: int = 1
) -> Comparison:
    """Answer every prompt by both, decoding only, the prompt's own time left out.

    In half precision answers may part at a near-tie, and then be of other lengths unless params.ignore_eos is set.
    """
    seconds, plain_seconds = 0.0, 0.0
    equal = tokens = rounds = drafted = accepted = 0
    for ids in prompts:
        pairs = [(plain.generate(ids, params), fast.generate(ids, params)) for _ in range(turns)]
        plain_seconds += median(before.stats.decode_seconds for before, _ in pairs)
        seconds += median(after.stats.decode_seconds for _, after in pairs)
        before, after = pairs[-1]
        equal += before.token_ids == after.token_ids
        stats = after.stats
        tokens, rounds = tokens + stats.completion_tokens, rounds + stats.rounds
        drafted, accepted = drafted + stats.draft_tokens, accepted + stats.accepted_tokens
    return Comparison(len(prompts), equal, tokens, plain_seconds, seconds, rounds, drafted, accepted)
