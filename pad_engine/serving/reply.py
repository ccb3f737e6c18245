"""One request on a terminal: its text as it comes, Ctrl-C, and the line of figures after it."""

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

from pad_engine.config import SamplingParams

if TYPE_CHECKING:
    from pad_engine.engine import Engine, OnRound, Prefix
    from pad_engine.output import Output, Stats, TokenLogprobs


def show(text: str) -> None:
    """Print a piece of the answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def answer(
    engine: "Engine",
    ids: list[int],
    params: SamplingParams,
    show: Callable[[str], None] | None,
    prefix: "Prefix | None" = None,
    on_round: "OnRound | None" = None,
) -> tuple["Output", bool]:
    """Run a request; returns its output and whether Ctrl-C has ended it. on_round: as of Engine.stream.

    The first Ctrl-C ends it after the round at work, so that text and figures are whole. While the prompt is read, or
    at the second Ctrl-C, it ends on the spot, with the text so far.
    """
    from pad_engine.output import Output, Stats

    text, reason = "", "cancelled"
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
    stats = Stats(seed=params.seed or 0, prompt_tokens=len(ids))
    signals = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals > 1 or not token_ids:
            raise KeyboardInterrupt
        engine.cancel()

    deltas = engine.stream(ids, params, prefix=prefix, on_round=on_round)
    before = signal.signal(signal.SIGINT, stop)
    try:
        with suppress(KeyboardInterrupt):
            for delta in deltas:
                text += delta.text
                token_ids += delta.token_ids
                if logprobs is not None:
                    logprobs += delta.logprobs or []
                stats.completion_tokens = len(token_ids)
                if show:
                    show(delta.text)
                if delta.finish_reason is not None and delta.stats is not None:
                    reason, stats = delta.finish_reason, delta.stats
    finally:
        signal.signal(signal.SIGINT, before)
    return Output(text, token_ids, reason, stats, logprobs), signals > 0


def figures(stats: "Stats") -> str:
    """A request in one line."""
    return (
        f"{stats.completion_tokens} tokens in {stats.decode_seconds:.2f} s: {stats.tokens_per_second:.1f} tokens/s, "
        f"{stats.rounds} rounds, mean accept length {stats.mean_accept_length:.2f}, "
        f"{stats.tokens_per_round:.2f} tokens per round"
    )
