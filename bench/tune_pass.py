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
from typing import NamedTuple

import torch
from harness import capture, replay_ms, runs
from shapes import random_decoder, shape_config
from tune_attention import Heads, attentions
from tune_products import near_tiles, products

from pad_engine.device_round import DeviceForest, DeviceRequests
from pad_engine.kernels import tuning
from pad_engine.kernels.quantise import QUANTISED
from pad_engine.kernels.row_tiles import EARLY, LATE
from pad_engine.kernels.tuning import AttentionConfig, TileConfig
from pad_engine.models.fused import FusedPass
from pad_engine.models.quantise import AS_STORED
from pad_engine.tree import DraftTree

CONTEXTS = 300, 1900  # committed tokens: what is good at a short context alone may be bad at longer ones
CAPACITY, SCRATCH = 2048, 64
# the LM head takes so long that it is measured well alone; passes of quantised weights have the others' attention
PARTS = ("attention", "out", "down", "qkv", "gate_up", "release")
QUANTISED_PARTS = ("out", "down", "qkv", "gate_up", "lm_head")
GAIN = 0.998  # of the time that was best: less of a gain is taken for noise
REPLAYS = 15

Value = TileConfig | AttentionConfig | int


class Pass(NamedTuple):
    """A shape's pass of so many rows. weights: bf16, int8 or fp8."""

    shape: str
    rows: int
    weights: str = "bf16"

    @property
    def parts(self) -> tuple[str, ...]:
        """What is tuned of it."""
        return PARTS if self.weights == "bf16" else QUANTISED_PARTS

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return QUANTISED.get(self.weights, torch.bfloat16)

    @property
    def heads(self) -> Heads:
        """Its attention."""
        return attentions(self.shape, self.rows)


@dataclass(frozen=True)
class Trial:
    """A pass of which one part runs with other parameters. release: int, when its kernels let the next one start."""

    of: Pass
    part: str
    value: Value


def measured(of: Pass, device: torch.device) -> dict[str, Value]:
    """The parameters that a pass has now, by part."""
    heads, width = of.heads, shape_config(of.shape, CAPACITY).hidden_size
    found: dict[str, Value] = {
        one.op: tuning.tile_config(one.op, of.rows, one.m, one.k, device, of.dtype) for one in products(*of)
    }
    found["attention"] = tuning.attention_config(of.rows, heads.heads, heads.kv_heads, heads.head_dim, device)
    found["release"] = tuning.release_mode(of.rows, width, device)
    return {part: found[part] for part in of.parts}


def keys(of: Pass) -> dict[str, str]:
    """The names of a pass's parts in the table."""
    names = {one.op: tuning.key(one.op, of.rows, one.m, one.k, of.dtype) for one in products(*of)}
    names["attention"] = of.heads.key
    names["release"] = tuning.release_key(of.rows, shape_config(of.shape, CAPACITY).hidden_size)
    return names


def near(of: Pass, part: str, value: Value) -> Iterator[Value]:
    """Other parameters of a part, near those it has."""
    if isinstance(value, AttentionConfig):
        yield from near_attentions(of.heads, value)
    elif isinstance(value, TileConfig):
        yield from near_tiles(next(one for one in products(*of) if one.op == part), value)
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
        "own": (not config.own,) if heads.rows > 1 else (),
        "stages": {0, 2, 3} - {config.stages},
    }
    for field, values in changes.items():
        for value in values:
            one = replace(config, **{field: value})
            fits = 16 <= one.block_s <= min(one.chunk, 128) and 2 <= one.warps <= 8 and 16 <= one.block_m <= 64
            if fits and 4 <= one.splits <= 64 and heads.fill(one):
                yield one


def descend(
    start: Mapping[str, Value], neighbours: Mapping[str, Sequence[Value]], time: Callable[[Mapping[str, Value]], float]
) -> tuple[dict[str, Value], float]:
    """The best parameters that changes of one part after another lead to, each part once, and their time."""
    best, fastest = dict(start), time(start)
    for part, values in neighbours.items():
        times = [(time(best | {part: value}), value) for value in values]
        quickest, value = min(times, key=lambda timed: timed[0], default=(fastest, best[part]))
        if quickest < GAIN * fastest and (again := time(best | {part: value})) < GAIN * time(best):
            best[part], fastest = value, again
    return best, fastest


class PassCase:
    """A decoder of random weights, and a pass over a chain."""

    def __init__(
        self, shape: str, num_layers: int | None, device: torch.device, dtype: torch.dtype, weights: str = "bf16"
    ) -> None:
        kept = AS_STORED if weights == "bf16" else weights
        self.decoder = random_decoder(shape, device, dtype, CAPACITY, num_layers, kept)
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


Job = tuple[list[Trial], dict[Pass, dict[str, Value]]]  # trials, and what their passes have else


@lru_cache(1)
def small_case(shape: str, weights: str) -> PassCase:
    """A pass through one layer, which has every kernel of it."""
    return PassCase(shape, 1, torch.device("cuda"), torch.bfloat16, weights)


@torch.inference_mode()
def compile_trials(job: Job) -> list[Trial]:
    """Compile trials into the cache on disk; returns those that the card can run."""
    trials, states = job
    return [
        one
        for one in trials
        if runs(small_case(one.of.shape, one.of.weights).queue(one.of.rows, states[one.of] | {one.part: one.value}))
    ]


@torch.inference_mode()
def tune_passes(
    passes: Sequence[Pass],
    compile_all: Callable[[list[Job]], list[list[Trial]]],
    workers: int,
    rounds: int,
    report: Callable[[str], None],
) -> Iterator[dict[str, dict[str, int]]]:
    """The table's entries of every pass, after each round of the descent. compile_all: maps compile_trials over jobs. A
    pass that a round did not change is done."""
    states = {of: measured(of, torch.device("cuda")) for of in passes}
    going = list(passes)
    for _ in range(rounds):
        # in the order of models: a worker then makes one or two
        trials = [
            Trial(of, part, value)
            for of in sorted(going, key=lambda of: (of.shape, of.weights, of.rows))
            for part in of.parts
            for value in near(of, part, states[of][part])
        ]
        size = max(1, -(-len(trials) // workers))
        jobs = [(trials[first : first + size], states) for first in range(0, len(trials), size)]
        valid = [trial for part in compile_all(jobs) for trial in part]
        found: dict[Pass, dict[str, Value]] = {}
        for model in dict.fromkeys((of.shape, of.weights) for of in going):
            theirs = [of for of in going if (of.shape, of.weights) == model]
            found |= descend_model(*model, theirs, states, valid, report)
        going = [of for of in going if found[of] != states[of]]
        states |= found
        yield {keys(of)[part]: entry(value) for of, state in states.items() for part, value in state.items()}


def descend_model(
    shape: str,
    weights: str,
    passes: Sequence[Pass],
    states: Mapping[Pass, Mapping[str, Value]],
    valid: Sequence[Trial],
    report: Callable[[str], None],
) -> dict[Pass, dict[str, Value]]:
    """One round of the descent for all passes of a model."""
    case, found = PassCase(shape, None, torch.device("cuda"), torch.bfloat16, weights), {}
    for of in passes:
        mine = {part: [trial.value for trial in valid if (trial.of, trial.part) == (of, part)] for part in of.parts}
        first = case.time(of.rows, states[of])
        found[of], time = descend(states[of], mine, partial(case.time, of.rows))
        report(f"pass {shape} {of.rows} {weights}: {first:.4f} ms, then {time:.4f}")
        for part in of.parts:
            if found[of][part] != states[of][part]:
                report(f"  {part}: {states[of][part]} -> {found[of][part]}")
    del case
    gc.collect()
    torch.cuda.empty_cache()
    return found


def entry(value: Value) -> dict[str, int]:
    """Parameters as the table holds them."""
    return {"release": value} if isinstance(value, int) else asdict(value)
