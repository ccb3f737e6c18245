"""What GPU benchmarks run on: a decoder of random weights, its cache full of random keys, and its captured rounds.

Speed does not depend on the weights, and a random model never ends an answer by itself. Nothing here needs a tokenizer.
"""

import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from shapes import random_decoder, shape_config, streamed_bytes

from pad_engine import Engine
from pad_engine.controller import Controller
from pad_engine.drafters.drafter import Drafter
from pad_engine.graphs import DeviceDraft, Rounds
from pad_engine.kernels.row_tiles import OFF
from pad_engine.kernels.tuning import release_mode
from pad_engine.kv_cache import PREFILL_SCRATCH, KVCache, prefill_chunk
from pad_engine.models.decoder import Decoder
from pad_engine.models.loader import weight_bytes
from pad_engine.models.quantise import AS_STORED
from pad_engine.tree import DraftTree
from pad_engine.verify import prefill

SEED = 7


def fill(cache: KVCache) -> None:
    """Random keys and values of ordinary size in every slot."""
    for buffer in cache.buffers.values():
        buffer.normal_()


def random_chain(nodes: int, vocab: int) -> DraftTree:
    """A chain of random tokens, none of which a model is likely to accept."""
    generator = random.Random(SEED)
    return DraftTree.chain([generator.randrange(vocab) for _ in range(nodes)])


def random_tree(nodes: int, vocab: int) -> DraftTree:
    """Random tokens, each below a random earlier one."""
    generator = random.Random(SEED)
    tokens = [generator.randrange(vocab) for _ in range(nodes)]
    return DraftTree(tokens, [-1, *(generator.randrange(node) for node in range(1, nodes))])


def random_ids(count: int, vocab: int) -> list[int]:
    """Ids of a prompt."""
    generator = random.Random(SEED)
    return [generator.randrange(vocab) for _ in range(count)]


def launch_mode(shape: str, rows: int, device: torch.device) -> int:
    """How a shape's pass of so many rows launches its kernels (row_tiles.py)."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return OFF
    return release_mode(rows, shape_config(shape, 4096).hidden_size, device)


class Letters:
    """In place of a tokenizer, which shapes have none of: every token is a letter."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """As many letters."""
        return "x" * len(ids)


def engine_on(decoder: Decoder, drafter: Drafter, depth: int, fused: bool = True) -> Engine:
    """An engine without a tokenizer that drafts `depth` tokens in every round, and whose answers only their length
    ends. fused: False for tests, which have no time for kernels without a GPU."""
    controller = Controller(depth + 1, depth, fixed=True)
    length, vocab = decoder.max_length, decoder.config.vocab_size
    return Engine(decoder, Letters(), drafter, controller, max_length=length, num_tokens=vocab, fused=fused)


class Rig:
    """One shape of shapes.py, ready to run. length: tokens that the cache takes. num_layers: of the decoder, if not all
    of the shape's. weights: as of load_model. decoder: instead of one of the shape."""

    def __init__(
        self,
        shape: str,
        *,
        length: int,
        device: torch.device,
        num_layers: int | None = None,
        weights: str = AS_STORED,
        decoder: Decoder | None = None,
    ) -> None:
        self.decoder = decoder or random_decoder(shape, device, torch.bfloat16, length, num_layers, weights)
        self.vocab = self.decoder.config.vocab_size
        self.cache = self.decoder.new_cache(capacity=length, scratch=PREFILL_SCRATCH)
        fill(self.cache)
        self.rounds = Rounds(self.decoder, self.cache, num_tokens=self.vocab, max_budget=64)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, tied ones once."""
        decoder = self.decoder
        return weight_bytes(decoder.config, decoder.device, decoder.dtype, decoder.quantised)

    def limit_ms(self, context: int, read_rate: float) -> float:
        """Milliseconds to read once what one step needs, at `read_rate` TB/s: the matrices, the LM head, and the keys
        and values of the context."""
        return (streamed_bytes(self.decoder, self.vocab) + kv_bytes(self.cache, context)) / read_rate / 1e9

    def begin(self, context: int, temperature: float = 0.0) -> None:
        """A request that has read `context` tokens, whose end is as far away as the cache allows."""
        ids = random_ids(context + 1, self.vocab)
        self.rounds.begin(0, ids, self.cache.capacity, [], SEED, temperature)

    def check_running(self) -> None:
        """RuntimeError when the request has ended, so that rounds were timed that did nothing."""
        status = int(self.rounds.requests.done[0])
        if status:
            raise RuntimeError(f"the request ended with status {status} while it was timed: give the cache more room")

    def run_ahead(self, kind: str | DeviceDraft, nodes: int, count: int) -> float:
        """Seconds of `count` rounds, each queued before the one before it is read, as captured.run_ahead does."""
        rounds, start = self.rounds, time.perf_counter()
        index = rounds.queue(kind, nodes)
        for i in range(count):
            following = rounds.queue(kind, nodes) if i + 1 < count else index
            rounds.wait(index)
            rounds.reports.read(index, 0)
            index = following
        return time.perf_counter() - start

    def one_by_one(self, tree: DraftTree, count: int) -> float:
        """Seconds of `count` rounds over a tree that the host uploads, each after the one before it was read."""
        rounds, start = self.rounds, time.perf_counter()
        for _ in range(count):
            index = rounds.queue_tree([tree])
            rounds.wait(index)
            rounds.reports.read(index, 0)
        return time.perf_counter() - start

    def first_token(self, ids: list[int]) -> float:
        """Seconds from a prompt's ids on the host to the first new one there."""
        start = time.perf_counter()
        self.cache.reset(0, len(ids))
        chunk = prefill_chunk(self.decoder.device)
        prefill(self.decoder, self.cache, 0, ids[:-1], chunk, rounds=self.rounds)  # as the engine does
        self.rounds.begin(0, ids, self.cache.capacity, [], SEED, 0.0)
        index = self.rounds.queue_plain()
        self.rounds.wait(index)
        self.rounds.reports.read(index, 0)
        return time.perf_counter() - start


def kv_bytes(cache: KVCache, context: int) -> int:
    """Bytes of the keys and values of so many tokens in all layers."""
    heads, width = next(iter(cache.buffers.values())).shape[3::2]
    return 2 * len(cache.layers) * heads * width * context * cache.dtype.itemsize
