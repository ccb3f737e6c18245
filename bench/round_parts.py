"""The parts of a round, each timed by itself, and whole requests beside them; bench_round.py says of which models.

Rounds start at CONTEXT tokens, with a request that nothing but its length ends.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import harness
from bench_step import CONTEXT, write_logits
from harness import busy_ms
from rig import SEED, Rig, engine_on, random_chain, random_ids

from pad_engine import Engine, SamplingParams
from pad_engine.controller import RoundPlan
from pad_engine.device_round import DeviceForest, DeviceRequests
from pad_engine.drafters.draft_model_device import DeviceDraftModel
from pad_engine.drafters.draft_recipes import Chain
from pad_engine.drafters.none import NoDrafter
from pad_engine.graphs import LOGITS, TREE
from pad_engine.kv_cache import prefill_chunk
from pad_engine.models.decoder import Decoder
from pad_engine.trees import chain

TURNS = 3  # of what takes a few rounds; the median counts


@dataclass(frozen=True)
class Size:
    """How often things are timed: replays of a part, rounds of a host's share, tokens of a request."""

    replays: int
    rounds: int
    tokens: int


@dataclass(frozen=True)
class Undrafted:
    """A draft on the device that leaves the forest as it is: a captured round less its draft."""

    nodes: int

    def queue_draft(self, requests: DeviceRequests, forest: DeviceForest, rows: int) -> None:
        """Nothing."""


def fresh_ms(
    rig: Rig, queue: Callable[[], object], count: int, temperature: float = 0.0, warm: int = 3, beyond: int = 0
) -> float:
    """Milliseconds of one of `count` rounds of a fresh request, back to back. beyond: tokens of it after CONTEXT."""
    found = []
    for _ in range(TURNS if warm else 1):
        rig.begin(CONTEXT + beyond, temperature)
        found.append(busy_ms(queue, count, warm))
        rig.check_running()
    return median(found)


def budget_row(rig: Rig, nodes: int, temperature: float, size: Size) -> dict[str, Any]:
    """A chain of so many nodes that the host made, none of which is kept. verify_ms: the pass alone, whose LM head only
    writes bf16 logits. round_ms: all of the round. tail_us: what lies between. host_share: 1 - busy / wall of rounds
    that are queued ahead, and of those whose trees the host uploads."""
    tree, ahead = random_chain(nodes, rig.vocab), Undrafted(nodes)
    rig.rounds.queue_tree([tree])
    if rig.rounds.logits is None:  # captured passes write where it lies
        write_logits(rig.rounds)
    alone = partial(rig.rounds.replay, LOGITS, rig.rounds.rows_for(nodes))
    whole, captured = partial(rig.rounds.queue, TREE, nodes), partial(rig.rounds.queue, ahead, nodes)
    for queue in (alone, captured):
        queue()  # captured here, and not while the clock runs
    uploaded, queued = partial(rig.one_by_one, tree, size.rounds), partial(rig.run_ahead, ahead, nodes, size.rounds)
    # the pass commits nothing, so its context is put where the rounds' is on average
    rig.begin(CONTEXT + size.replays // 2, temperature)
    verify = median(busy_ms(alone, size.replays) for _ in range(TURNS))
    milliseconds = fresh_ms(rig, whole, size.replays, temperature)
    return {
        "nodes": nodes,
        "temperature": temperature,
        "verify_ms": round(verify, 5),
        "round_ms": round(milliseconds, 5),
        "tail_us": round(1000 * (milliseconds - verify), 2),
        "host_share_ahead": host_share(rig, captured, queued, temperature, size),
        "host_share_uploaded": host_share(rig, whole, uploaded, temperature, size),
    }


def host_share(
    rig: Rig, queue: Callable[[], object], run: Callable[[], float], temperature: float, size: Size
) -> float:
    """1 - busy / wall of size.rounds rounds, as bench_step.host_share has them."""
    busy = size.rounds * fresh_ms(rig, queue, size.rounds, temperature, warm=0)
    rig.begin(CONTEXT, temperature)
    harness.synchronise()
    wall = 1000 * run()
    rig.check_running()
    return round(1 - busy / wall, 5)


def drafter_of(decoder: Decoder, depth: int) -> DeviceDraftModel:
    """A draft model whose steps are part of the captured round."""
    return DeviceDraftModel(
        decoder,
        depth=depth,
        num_tokens=decoder.config.vocab_size,
        builder=chain.Chain(),
        capacity=decoder.max_length,
        budget=depth + 1,
        chunk=prefill_chunk(decoder.device),
    )


def prompt(vocab: int, beyond: int = 0) -> list[int]:
    """CONTEXT + beyond random ids, and id 0, with which a segment of forced.py starts."""
    return [*random_ids(CONTEXT + beyond, vocab), 0]


def draft_ms(rig: Rig, draft: Decoder, depth: int, size: Size, beyond: int = 0) -> float:
    """Milliseconds of drafting so many tokens behind CONTEXT + beyond, by themselves in a graph."""
    drafter, rounds, ids = drafter_of(draft, depth), rig.rounds, prompt(rig.vocab, beyond)
    drafter.begin(ids)
    rounds.begin(0, ids, rig.cache.capacity, [], SEED, 0.0)
    rows = rounds.rows_for(depth + 1)
    replay = harness.replayed(partial(Chain(drafter, depth).queue_draft, rounds.requests, rounds.forest, rows))
    return median(busy_ms(replay, size.replays) for _ in range(TURNS))


def draft_steps(rig: Rig, draft: Decoder, depths: list[int], size: Size) -> dict[str, Any]:
    """Milliseconds of drafting by the number of tokens, and of one more token in the loop."""
    found = {depth: draft_ms(rig, draft, depth, size) for depth in sorted({1, 2, *depths})}
    first, *_, last = found
    return {
        "ms_by_depth": {str(depth): round(ms, 5) for depth, ms in found.items()},
        "step_ms": round((found[last] - found[first]) / (last - first), 5),
    }


def draft_loop(rig: Rig, small: Rig, depths: list[int], size: Size) -> dict[str, Any]:
    """draft_steps, beside the draft model's plain step. small: the draft model's."""
    plain = fresh_ms(small, small.rounds.queue_plain, size.replays)
    steps = draft_steps(rig, small.decoder, depths, size)
    return steps | {"plain_ms": round(plain, 5), "step_over_plain": round(steps["step_ms"] / plain, 4)}


def few_tokens(rig: Rig, draft: Decoder, count: int, depths: list[int], size: Size) -> dict[str, Any]:
    """draft_steps with an LM head of `count` tokens, spread over the vocabulary as the most frequent ones of a text
    are, and bytes of that head and of the whole one."""
    vocab = draft.config.vocab_size
    few = draft.with_head([place * vocab // count - 1 for place in range(1, count + 1)])
    heads = {"head_bytes": few.lm_head.weight.nbytes, "whole_head_bytes": draft.lm_head.weight.nbytes}
    return {"tokens": count} | heads | draft_steps(rig, few, depths, size)


def request(engine: Engine, lengths: list[int], tokens: int, temperature: float) -> dict[str, Any]:
    """A request of about so many tokens, whole periods of rounds, by the engine's own clock.

    AssertionError when the answer is not the known one, or its rounds are not those of `lengths` but for the last.
    """
    count, ids = max(1, tokens // sum(lengths)) * sum(lengths), prompt(engine.num_tokens)
    params = SamplingParams(count, temperature=temperature, seed=SEED, ignore_eos=True)
    engine.generate(ids, replace(params, max_tokens=sum(lengths)))  # captures the rounds
    out = engine.generate(ids, params)
    assert out.token_ids == [*range(1, count + 1)], "the answer is not the known one"
    stats, seconds = out.stats, out.stats.decode_seconds
    asked = sum(lengths) / len(lengths)
    assert abs(stats.tokens_per_round / asked - 1) < 0.02, f"{stats.tokens_per_round} tokens a round, asked {asked}"
    return {
        "temperature": temperature,
        "tokens": count,
        "rounds": stats.rounds,
        "tokens_per_round": round(stats.tokens_per_round, 4),
        "tokens_per_second": round(count / seconds, 2),
        "ms_per_token": round(1000 * seconds / count, 5),
    }


def plain_request(rig: Rig, temperature: float, size: Size) -> dict[str, Any]:
    """The same without drafting."""
    return request(engine_on(rig.decoder, NoDrafter(), 0), [1], size.tokens // 4, temperature)


def drafted(rig: Rig, draft: Decoder, depth: int, lengths: list[int], temperature: float, size: Size) -> dict[str, Any]:
    """Drafting and verifying together. parts: milliseconds of the draft alone, and of the round less its draft, in the
    middle of the request. over_parts: tokens per second of the request, over tokens a round by the sum of the parts.
    busy_ms: of a round of the request, queued back to back with nobody reading any. host_share: 1 - that / the
    request's own time a round."""
    engine = engine_on(rig.decoder, drafter_of(draft, depth), depth)
    found = request(engine, lengths, size.tokens, temperature)
    rest, middle = Undrafted(depth + 1), found["tokens"] // 2
    rig.rounds.queue_tree([random_chain(rest.nodes, rig.vocab)])
    parts = {
        "draft": draft_ms(rig, draft, depth, size, middle),
        "rest": fresh_ms(rig, partial(rig.rounds.queue, rest, rest.nodes), size.replays, temperature, beyond=middle),
    }
    busy = busy_round_ms(engine, depth, found, temperature)
    possible = 1000 * found["tokens_per_round"] / sum(parts.values())
    return {
        "depth": depth,
        **found,
        "parts_ms": {name: round(ms, 5) for name, ms in parts.items()},
        "over_parts": round(found["tokens_per_second"] / possible, 4),
        "busy_ms": round(busy, 5),
        "host_share": round(1 - busy * found["rounds"] / (found["tokens"] * found["ms_per_token"]), 5),
    }


def busy_round_ms(engine: Engine, depth: int, found: dict[str, Any], temperature: float) -> float:
    """Milliseconds of one of the drafted rounds of a request, back to back. found: of `request`."""
    rounds, drafter, ids = engine.rounds, engine.drafter, prompt(engine.num_tokens)
    assert rounds is not None and isinstance(drafter, DeviceDraftModel)
    queue = partial(drafter.queue, rounds, RoundPlan(depth + 1, depth))
    drafter.begin(ids)
    # by ids alone: the keys of the prompt lie in the cache from the request before
    rounds.begin(0, ids, engine.max_length, [], SEED, temperature)
    harness.synchronise()
    return busy_ms(queue, found["rounds"], warm=0)
