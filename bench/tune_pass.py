"""The last part of tune.py: what only a whole pass shows. When kernels let the next one start, and which of the
attentions that are good alone is good among the others."""

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from harness import graph_ms
from shapes import random_decoder

from pad_engine.device_round import DeviceForest, DeviceRequests
from pad_engine.kernels.row_tiles import EARLY, LATE
from pad_engine.kernels.tuning import AttentionConfig, TileConfig, next_power
from pad_engine.kernels.tuning import key as product_key
from pad_engine.models.fused import FusedPass
from pad_engine.tree import DraftTree

CONTEXT = 300  # committed tokens
CAPACITY, SCRATCH = 2048, 64
AHEAD = 4096


@dataclass(frozen=True)
class Variant:
    """One way to run a pass. ahead: columns that the products of the layers prefetch, or None for what is best alone:
    among other kernels, an attention above all, the memory has more time to spare. whole: no reduction is split, since
    the parts meet through memory, which the products behind wait for."""

    shape: str
    rows: int
    release: int
    attention: AttentionConfig
    ahead: int | None = None
    whole: bool = False


def variants(shape: str, rows: int, attentions: list[AttentionConfig]) -> list[Variant]:
    """The best attention with both kinds of release and two prefetches, and the others with the early one; at several
    rows also whole reductions."""
    best = attentions[0]
    others = [Variant(shape, rows, LATE, best), Variant(shape, rows, EARLY, best, AHEAD)]
    if rows > 1:
        others += [Variant(shape, rows, release, best, whole=True) for release in (EARLY, LATE)]
    return others + [Variant(shape, rows, EARLY, attention) for attention in attentions]


class PassCase:
    """A decoder of random weights, and a pass over a chain."""

    def __init__(self, shape: str, num_layers: int | None) -> None:
        cuda = torch.device("cuda")
        self.decoder = random_decoder(shape, cuda, torch.bfloat16, CAPACITY, num_layers)
        self.cache = self.decoder.new_cache(capacity=CAPACITY, scratch=SCRATCH)
        for buffer in self.cache.buffers.values():
            buffer.normal_()
        self.forest, self.requests = DeviceForest(1, cuda), DeviceRequests(1, CAPACITY, cuda)
        self.requests.fill(0, list(range(CONTEXT + 1)), CAPACITY, [], 0, 0.0)
        self.requests.upload()
        self.passes = FusedPass(self.decoder, self.cache, num_tokens=self.decoder.config.vocab_size)
        self.tiles = dict(self.passes.tiles)

    def queue(self, variant: Variant) -> Callable[[], None]:
        """What launches a variant."""
        self.forest.fill([DraftTree.chain(list(range(variant.rows)))])
        self.forest.upload()
        self.passes.tiles = self.tiles | self.changed(variant)
        self.passes.attention[variant.rows] = variant.attention
        self.passes.pdl[variant.rows] = variant.release
        self.passes.allocate()
        return partial(self.passes.launch, variant.rows, self.forest.token, self.forest, self.requests)

    def changed(self, variant: Variant) -> dict[tuple[str, int], TileConfig]:
        """The layers' products that the variant runs otherwise."""
        changed = {}
        for op in ("qkv", "out", "gate_up", "down"):
            tile, columns = self.tiles[op, variant.rows], self.passes.shapes[op][1]
            if variant.whole and tile.split_k > 1:
                tile = replace(tile, block=16, split_k=1)  # as many programs as may be
            if variant.ahead is not None:
                # every thread asks for 16 bytes at least
                least = 8 * 32 * tile.warps
                whole = max(least, next_power(columns) // tile.split_k)
                tile = replace(tile, prefetch=min(max(variant.ahead, least), whole))
            if tile != self.tiles[op, variant.rows]:
                changed[op, variant.rows] = tile
        return changed


@torch.inference_mode()
def compile_variant(variant: Variant) -> None:
    """Compile a variant's kernels into the cache on disk."""
    PassCase(variant.shape, 1).queue(variant)()
    torch.cuda.synchronize()


@torch.inference_mode()
def best_passes(wanted: list[Variant], report: Callable[[str], None]) -> dict[str, dict[str, int]]:
    """For each shape and number of rows the release and the attention of the fastest variant, by key."""
    best: dict[str, dict[str, int]] = {}
    for shape in dict.fromkeys(variant.shape for variant in wanted):
        case = PassCase(shape, None)
        config = case.decoder.config
        for rows in dict.fromkeys(variant.rows for variant in wanted if variant.shape == shape):
            mine = [variant for variant in wanted if (variant.shape, variant.rows) == (shape, rows)]
            times = [(graph_ms(case.queue(variant), 15), variant) for variant in mine]
            milliseconds, winner = min(times, key=lambda pair: pair[0])
            best[f"pass/{rows}/{config.hidden_size}"] = {"release": winner.release}
            key = f"attention/{rows}/{config.num_heads}x{config.num_kv_heads}x{config.head_dim}"
            best[key] = asdict(winner.attention)
            for (op, _), tile in case.changed(winner).items():
                best[product_key(op, rows, *case.passes.shapes[op], case.decoder.dtype)] = asdict(tile)
            for time, variant in times:
                tried = f"release {variant.release}, ahead {variant.ahead}, whole {variant.whole}, {variant.attention}"
                report(f"pass {shape} {rows}: {time:.4f} ms, {tried}")
            report(f"pass {shape} {rows}: best {milliseconds:.4f} ms")
        del case
        gc.collect()
        torch.cuda.empty_cache()
    return best
