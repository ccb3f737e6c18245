"""The last part of tune.py: launch parameters judged by whole passes. Which attention or product is good among the
others, and when kernels should let the next one start, no kernel shows alone.

A descent by coordinates: of one part after the other its neighbours are tried in the captured pass, and the fastest
stays. Neighbours of all passes are compiled side by side before they are timed.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from statistics import mean, median

import torch
from harness import capture, replay_ms, runs
from shapes import random_decoder, shape_config
from tune_attention import Heads, attentions
from tune_products import near_tiles, products

from pad_engine.device_round import DeviceForest, DeviceRequests
from pad_engine.kernels import tuning
from pad_engine.kernels.row_tiles import EARLY, LATE
from pad_engine.kernels.tuning import AttentionConfig, TileConfig
from pad_engine.models.fused import FusedPass
from pad_engine.tree import DraftTree

CONTEXTS = 300, 1900  # committed tokens: what is good at a short context alone may be bad at longer ones
CAPACITY, SCRATCH = 2048, 64
# the LM head takes so long that it is measured well alone
PARTS = ("attention", "out", "down", "qkv", "gate_up", "release")
GAIN = 0.998  # of the time that was best: less of a gain is taken for noise
REPLAYS = 15

Value = TileConfig | AttentionConfig | int
Pair = tuple[str, int]  # a shape and its rows


@dataclass(frozen=True)
class Trial:
    """A pass of which one part runs with other parameters. release: int, when its kernels let the next one start."""

    pair: Pair
    part: str
    value: Value


def measured(pair: Pair, device: torch.device) -> dict[str, Value]:
    """The parameters that a pass has now, by part."""
    shape, rows = pair
    config, heads = shape_config(shape, CAPACITY), attentions(*pair)
    found: dict[str, Value] = {
        one.op: tuning.tile_config(one.op, rows, one.m, one.k, device, torch.bfloat16)
        for one in products(*pair)
        if one.op in PARTS
    }
    found["attention"] = tuning.attention_config(rows, heads.heads, heads.kv_heads, heads.head_dim, device)
    found["release"] = tuning.release_mode(rows, config.hidden_size, device)
    return found


def keys(pair: Pair) -> dict[str, str]:
    """The names of a pass's parts in the table."""
    shape, rows = pair
    names = {one.op: tuning.key(one.op, rows, one.m, one.k, torch.bfloat16) for one in products(*pair)}
    return names | {
        "attention": attentions(*pair).key,
        "release": tuning.release_key(rows, shape_config(shape, CAPACITY).hidden_size),
    }


def near(pair: Pair, part: str, value: Value) -> Iterator[Value]:
    """Other parameters of a part, near those it has."""
    if isinstance(value, AttentionConfig):
        yield from near_attentions(attentions(*pair), value)
    elif isinstance(value, TileConfig):
        product = next(one for one in products(*pair) if one.op == part)
        yield from near_tiles(product, value)
    else:
        yield from {EARLY, LATE} - {value}


def near_attentions(heads: Heads, config: AttentionConfig) -> Iterator[AttentionConfig]:
    """Those with one other parameter; keys of a split, and of a step."""
    changes = {
        "splits": (config.splits // 2, config.splits * 2),
        "chunk": (config.chunk // 2, config.chunk * 2, config.chunk * 4),
        "block_s": (config.block_s // 2, config.block_s * 2),
        "warps": (config.warps // 2, config.warps * 2),
        "block_m": (config.block_m // 2, config.block_m * 2) if heads.rows > 1 else (),
    }
    for field, values in changes.items():
        for value in values:
            one = replace(config, **{field: value})
            fits = 16 <= one.block_s <= min(one.chunk, 128) and 2 <= one.warps <= 8 and 16 <= one.block_m <= 64
            if fits and 4 <= one.splits <= 64 and one.splits * heads.kv_heads >= 96:
                yield one


def descend(
    start: Mapping[str, Value], neighbours: Mapping[str, Sequence[Value]], time: Callable[[Mapping[str, Value]], float]
) -> tuple[dict[str, Value], float]:
    """The best parameters that changes of one part after another lead to, each part once, and their time."""
    best, fastest = dict(start), time(start)
    for part in [part for part in PARTS if neighbours.get(part)]:
        times = [(time(best | {part: value}), value) for value in neighbours[part]]
        quickest, value = min(times, key=lambda pair: pair[0])
        if quickest < GAIN * fastest and (again := time(best | {part: value})) < GAIN * time(best):
            best[part], fastest = value, again
    return best, fastest


class PassCase:
    """A decoder of random weights, and a pass over a chain."""

    def __init__(self, shape: str, num_layers: int | None, device: torch.device, dtype: torch.dtype) -> None:
        self.decoder = random_decoder(shape, device, dtype, CAPACITY, num_layers)
        self.cache = self.decoder.new_cache(capacity=CAPACITY, scratch=SCRATCH)
        for buffer in self.cache.buffers.values():
            buffer.normal_()
        self.forest, self.requests = DeviceForest(1, device), DeviceRequests(1, CAPACITY, device)
        self.begin(CONTEXTS[0])
        self.passes = FusedPass(self.decoder, self.cache, num_tokens=self.decoder.config.vocab_size)

    def begin(self, context: int) -> None:
        """A request that has read so many tokens."""
        self.requests.fill(0, list(range(context + 1)), CAPACITY, [], 0, 0.0)
        self.requests.upload()

    def queue(self, rows: int, parameters: Mapping[str, Value]) -> Callable[[], None]:
        """What launches a pass with these parameters."""
        self.forest.fill([DraftTree.chain(list(range(rows)))])
        self.forest.upload()
        for part, value in parameters.items():
            if isinstance(value, AttentionConfig):
                self.passes.attention[rows] = value
            elif isinstance(value, TileConfig):
                self.passes.tiles[part, rows] = value
            else:
                self.passes.pdl[rows] = value
        self.passes.allocate()
        passes, forest = self.passes, self.forest
        return partial(passes.launch, rows, forest.token, forest, self.requests, passes.to_prefix(rows))

    def time(self, rows: int, parameters: Mapping[str, Value]) -> float:
        """Milliseconds of a pass, the mean over contexts: of each the median of many replays."""
        graph, times = capture(self.queue(rows, parameters)), []
        for context in CONTEXTS:
            self.begin(context)
            graph.replay()
            times.append(median(replay_ms(graph) for _ in range(REPLAYS)))
        return mean(times)


Job = tuple[list[Trial], dict[Pair, dict[str, Value]]]  # trials, and what their passes have else


@lru_cache(1)
def small_case(shape: str) -> PassCase:
    """A pass through one layer, which has every kernel of it."""
    return PassCase(shape, 1, torch.device("cuda"), torch.bfloat16)


@torch.inference_mode()
def compile_trials(job: Job) -> list[Trial]:
    """Compile trials into the cache on disk; returns those that the card can run."""
    trials, states = job
    return [
        one
        for one in trials
        if runs(small_case(one.pair[0]).queue(one.pair[1], states[one.pair] | {one.part: one.value}))
    ]


@torch.inference_mode()
def tune_passes(
    pairs: Sequence[Pair],
    compile_all: Callable[[list[Job]], list[list[Trial]]],
    workers: int,
    rounds: int,
    report: Callable[[str], None],
) -> Iterator[dict[str, dict[str, int]]]:
    """The table's entries of every pass, after each round of the descent. compile_all: maps compile_trials over jobs. A
    pass that a round did not change is done."""
    states = {pair: measured(pair, torch.device("cuda")) for pair in pairs}
    going = list(pairs)
    for _ in range(rounds):
        # in the order of shapes: a worker then makes one or two
        trials = [
            Trial(pair, part, value)
            for pair in sorted(going)
            for part in PARTS
            for value in near(pair, part, states[pair][part])
        ]
        size = max(1, -(-len(trials) // workers))
        jobs = [(trials[first : first + size], states) for first in range(0, len(trials), size)]
        valid = [trial for part in compile_all(jobs) for trial in part]
        found: dict[Pair, dict[str, Value]] = {}
        for shape in dict.fromkeys(shape for shape, _ in going):
            found |= descend_shape(shape, [pair for pair in going if pair[0] == shape], states, valid, report)
        going = [pair for pair in going if found[pair] != states[pair]]
        states |= found
        yield {keys(pair)[part]: entry(value) for pair, state in states.items() for part, value in state.items()}


def descend_shape(
    shape: str,
    pairs: Sequence[Pair],
    states: Mapping[Pair, Mapping[str, Value]],
    valid: Sequence[Trial],
    report: Callable[[str], None],
) -> dict[Pair, dict[str, Value]]:
    """One round of the descent for all passes of a shape."""
    case, found = PassCase(shape, None, torch.device("cuda"), torch.bfloat16), {}
    for pair in pairs:
        mine = {part: [trial.value for trial in valid if (trial.pair, trial.part) == (pair, part)] for part in PARTS}
        first = case.time(pair[1], states[pair])
        found[pair], time = descend(states[pair], mine, partial(case.time, pair[1]))
        report(f"pass {shape} {pair[1]}: {first:.4f} ms, then {time:.4f}")
        for part in PARTS:
            if found[pair][part] != states[pair][part]:
                report(f"  {part}: {states[pair][part]} -> {found[pair][part]}")
    del case
    gc.collect()
    torch.cuda.empty_cache()
    return found


def entry(value: Value) -> dict[str, int]:
    """Parameters as the table holds them."""
    return {"release": value} if isinstance(value, int) else asdict(value)
