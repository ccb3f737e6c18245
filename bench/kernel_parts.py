"""The kernels of a round that multiply nothing, each with its buffers, its check and the same work by torch.

accept: from the LM head's partial results to the emitted tokens. commit: the kept rows' keys and values, over all
layers. lookup: prompt lookup over 2,048 ids. bench_kernels.py times them.
"""

from typing import Protocol

import torch
from rig import SEED, fill, random_ids
from shapes import shape_config

from pad_engine.device_round import MAX_ROWS, DeviceForest, DeviceRequests, Reports
from pad_engine.kernels.accept import accept_forest
from pad_engine.kernels.kv_commit import kv_commit
from pad_engine.kernels.lm_head import lm_head_programs
from pad_engine.kernels.ngram_lookup import MAX_MATCH, ngram_lookup, ngram_lookup_ref
from pad_engine.kernels.tuning import tile_config
from pad_engine.kv_cache import PREFILL_SCRATCH, KVCache
from pad_engine.models.fused import row_pad
from pad_engine.tree import DraftTree

CONTEXT, CAPACITY = 256, 4096
LOOKUP_IDS = 2048


class Part(Protocol):
    """name: in the table. chain: launches in a graph. only_trees: a plain step has no such kernel."""

    name: str
    chain: int
    only_trees: bool

    def __init__(self, shape: str, tree: DraftTree, device: torch.device) -> None:
        """Buffers for a round over this tree."""

    def check(self) -> None:
        """AssertionError when the kernel does not do what torch does."""

    def queue(self) -> None:
        """Launch the kernel."""

    def by_torch(self) -> object:
        """Queue the same work as torch's operators."""


def uses_pdl(device: torch.device) -> bool:
    """Whether launches overlap as they do in a round."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class Accept:
    """Every draft of the tree is wrong, so each launch commits one token."""

    name, chain, only_trees = "accept", 10, False

    def __init__(self, shape: str, tree: DraftTree, device: torch.device) -> None:
        self.rows, self.tree, self.pdl = row_pad(len(tree)), tree, uses_pdl(device)
        config = shape_config(shape, CAPACITY)
        self.vocab = config.vocab_size
        cores = torch.cuda.get_device_properties(device).multi_processor_count
        tile = tile_config("lm_head", self.rows, self.vocab, config.hidden_size, device, torch.bfloat16)
        programs = lm_head_programs(self.vocab, tile, cores)
        generator = torch.Generator(device).manual_seed(SEED)
        self.scores = torch.randn(programs, self.rows, device=device, generator=generator)
        self.ids = torch.randint(
            self.vocab, (programs, self.rows), dtype=torch.int32, device=device, generator=generator
        )
        self.forest, self.requests = DeviceForest(1, device), DeviceRequests(1, CAPACITY, device)
        self.forest.fill([tree])
        self.forest.upload()
        self.reports = Reports(1, device)
        self.pick = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        self.path = torch.zeros(1, self.rows, dtype=torch.int32, device=device)
        self.old_len, self.n_commit, self.ticket = torch.zeros(3, 1, dtype=torch.int32, device=device)
        self.begin()
        self.ancestors = tree.mask().to(device)

    def begin(self) -> None:
        """A request whose end is far away."""
        self.requests.fill(0, random_ids(CONTEXT + 1, self.vocab), CAPACITY, [], SEED, 0.0)
        self.requests.upload()

    def queue(self) -> None:
        forest, requests, rows = self.forest, self.requests, self.rows
        accept_forest(
            self.scores, self.ids, forest.token, forest.parent[:rows], forest.depth[:rows], forest.mask_bits[:rows],
            forest.start, requests.limit, requests.end_ids, requests.ids, requests.cache_len, requests.done,
            requests.root, self.pick, self.path, self.old_len, self.n_commit, self.reports.ring, self.reports.round,
            self.reports.counter, self.ticket, pdl=self.pdl,
        )  # fmt: skip

    def by_torch(self) -> torch.Tensor:
        """The token behind the longest path of accepted nodes, int32 `[1]`."""
        nodes = len(self.tree)
        pick = self.ids.gather(0, self.scores.argmax(0, keepdim=True))[0, :nodes]
        token, parent = self.forest.token[:nodes], self.forest.parent[:nodes].long()
        kept = token == pick[parent.clamp(min=0)]
        kept |= parent < 0
        on_path = (kept | ~self.ancestors).all(1)
        last = torch.where(on_path, self.forest.depth[:nodes], -1).argmax(0, keepdim=True)
        return pick.gather(0, last)

    def check(self) -> None:
        want = int(self.by_torch()[0])
        self.queue()
        held = int(self.requests.cache_len[0])
        assert held == CONTEXT + 1 and int(self.requests.ids[0, held]) == want, "accept differs from torch"
        self.begin()


class Commit:
    """All rows of the tree's longest path are kept."""

    name, chain, only_trees = "commit", 10, True

    def __init__(self, shape: str, tree: DraftTree, device: torch.device) -> None:
        config = shape_config(shape, CAPACITY)
        group = config.num_heads // config.num_kv_heads
        self.cache = KVCache(
            config.windows, config.num_kv_heads, group, config.head_dim,
            capacity=CAPACITY, scratch=PREFILL_SCRATCH, dtype=torch.bfloat16, device=device,
        )  # fmt: skip
        fill(self.cache)
        (self.buffer,) = self.cache.buffers.values()
        self.pdl, self.count = uses_pdl(device), len(tree)
        rows = torch.arange(row_pad(len(tree)), dtype=torch.int32, device=device)
        self.path = rows[None]
        self.start = torch.tensor([0, len(tree)], dtype=torch.int32, device=device)
        self.old_len = torch.tensor([CONTEXT], dtype=torch.int32, device=device)
        self.n_commit = torch.tensor([len(tree)], dtype=torch.int32, device=device)
        self.source = (PREFILL_SCRATCH - 1 - rows[: len(tree)]).long()
        self.target = (PREFILL_SCRATCH + CONTEXT + rows[: len(tree)]).long()

    def queue(self) -> None:
        kv_commit(self.buffer, self.path, self.start, self.old_len, self.n_commit, PREFILL_SCRATCH, pdl=self.pdl)

    def by_torch(self) -> object:
        return self.buffer.index_copy_(4, self.target, self.buffer.index_select(4, self.source))

    def check(self) -> None:
        self.queue()
        moved = self.buffer.index_select(4, self.target)
        assert torch.equal(moved, self.buffer.index_select(4, self.source)), "commit differs from torch"


class Lookup:
    """A text that repeats itself, so that there is a match of the greatest length."""

    name, chain, only_trees = "ngram lookup", 10, True

    def __init__(self, shape: str, tree: DraftTree, device: torch.device) -> None:
        vocab = shape_config(shape, CAPACITY).vocab_size
        half = random_ids(LOOKUP_IDS // 2, vocab)
        self.count, self.rows = len(tree) - 1, row_pad(len(tree))
        self.forest, self.requests = DeviceForest(1, device), DeviceRequests(1, CAPACITY, device)
        self.requests.fill(0, half + half, CAPACITY, [], SEED, 0.0)
        self.requests.upload()
        self.depth = torch.tensor([self.count], dtype=torch.int32, device=device)
        self.best = torch.zeros(1, dtype=torch.int64, device=device)
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device)

    def queue(self) -> None:
        # as in a round: an ordinary launch, that later kernels need not wait for by themselves
        forest, requests, rows = self.forest, self.requests, self.rows
        ngram_lookup(
            requests.ids, requests.cache_len, requests.limit, self.depth, requests.done, forest.token[:rows],
            forest.parent[:rows], forest.depth[:rows], forest.mask_bits[:rows], forest.start, self.best, self.ticket,
        )  # fmt: skip

    def by_torch(self) -> torch.Tensor:
        """What followed the longest and then latest match of the sequence's end."""
        ids = self.requests.ids[0, :LOOKUP_IDS]
        windows, end = ids[:-1].unfold(0, MAX_MATCH, 1).flip(1), ids[-MAX_MATCH:].flip(0)
        lengths = (windows == end).int().cumprod(1).sum(1)
        places = torch.arange(len(lengths), device=ids.device)
        best = (lengths * LOOKUP_IDS + places).argmax(0) + MAX_MATCH
        return ids.gather(0, (best + torch.arange(self.count, device=ids.device)).clamp(max=LOOKUP_IDS - 1))

    def check(self) -> None:
        want = ngram_lookup_ref(self.requests.ids[0, :LOOKUP_IDS].cpu(), 2, self.count)
        self.queue()
        assert self.forest.token[: self.count + 1].cpu().tolist() == want.tolist(), "lookup differs from its reference"
        assert self.by_torch().cpu().tolist() == want[1:].tolist(), "torch's lookup differs from its reference"


PARTS: tuple[type[Part], ...] = (Accept, Commit, Lookup)
