"""The attention's part of tune.py: launch parameters at a short context and at a long one together."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from harness import graph_ms
from shapes import shape_config

from pad_engine.kernels.attention_tiles import AttentionWorkspace
from pad_engine.kernels.tree_attention import tree_attention
from pad_engine.kernels.tuning import AttentionConfig, attention_key

SHORT, LONG = 256, 32_000  # committed tokens
SCRATCH = 64
SPLITS = 8, 16, 32, 64


@dataclass(frozen=True)
class Heads:
    """The attention of a pass of `rows` rows."""

    rows: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def key(self) -> str:
        """Its name in the table."""
        return attention_key(self.rows, self.heads, self.kv_heads, self.head_dim)

    @property
    def long_key(self) -> str:
        """The same in a cache for long contexts."""
        return attention_key(self.rows, self.heads, self.kv_heads, self.head_dim, long=True)

    def fill(self, config: AttentionConfig) -> bool:
        """Whether a long context keeps most of a card's multiprocessors at work."""
        blocks = -(-self.rows * self.heads // (self.kv_heads * config.block_m))
        return config.splits * self.kv_heads * blocks >= 96


def attentions(shape: str, rows: int) -> Heads:
    """The attention of a shape."""
    c = shape_config(shape, 4096)
    return Heads(rows, c.num_heads, c.num_kv_heads, c.head_dim)


def candidates(heads: Heads) -> Iterator[AttentionConfig]:
    """Parameters that may be good."""
    owns = (False, True) if heads.rows > 1 else (False,)
    for block_s, warps, chunk, splits, own in itertools.product((32, 64, 128), (4, 8), (64, 128, 256), SPLITS, owns):
        config = AttentionConfig(splits, chunk, block_s, warps, own=own)
        if chunk >= block_s and heads.fill(config):
            yield config
    # whole tiles by bulk copies
    for (block_s, stages), splits in itertools.product(((32, 4), (64, 2), (64, 3), (64, 4), (128, 2)), SPLITS):
        config = AttentionConfig(splits, 128, block_s, stages=stages)
        if heads.fill(config):
            yield config


class AttentionCase:
    """The buffers of an attention over a few layers, enough to overflow the cache at a long context."""

    def __init__(self, heads: Heads, layers: int, pdl: bool) -> None:
        cuda = torch.device("cuda")
        self.heads, self.pdl = heads, pdl
        capacity = LONG + SCRATCH
        shape = (layers, 2, 1, heads.kv_heads, SCRATCH + capacity, heads.head_dim)
        self.cache = torch.empty(shape, dtype=torch.bfloat16, device=cuda).normal_()
        width = (heads.heads + 2 * heads.kv_heads) * heads.head_dim
        self.qkv = torch.randn(heads.rows, width, dtype=torch.bfloat16, device=cuda)
        self.out = torch.empty(heads.rows, heads.heads * heads.head_dim, dtype=torch.bfloat16, device=cuda)
        self.workspace = AttentionWorkspace(heads.rows, heads.heads, heads.head_dim, max(SPLITS), cuda)
        self.depth = torch.arange(heads.rows, dtype=torch.int32, device=cuda)
        self.seq = torch.zeros_like(self.depth)
        self.bits = (2 << self.depth.long()) - 1
        self.start = torch.tensor([0, heads.rows], dtype=torch.int32, device=cuda)
        self.length = torch.tensor([SHORT], dtype=torch.int32, device=cuda)
        self.cos, self.sin = torch.randn(2, capacity, heads.head_dim, device=cuda).to(torch.bfloat16)

    def queue(self, config: AttentionConfig, repeats: int = 1) -> None:
        """Queue the attention of every layer, `repeats` times."""
        for layer in [*self.cache] * repeats:
            tree_attention(
                self.qkv, layer, self.out, self.workspace, self.depth, self.bits, self.seq, self.start, self.length,
                self.cos, self.sin, None, None, eps=1e-5, scale=self.heads.head_dim**-0.5, softcap=None,
                scratch=SCRATCH, capacity=LONG, window=None, heads=self.heads.heads, config=config, to_prefix=False,
                strict=False, pdl=self.pdl,
            )  # fmt: skip


def time_attention(
    heads: Heads, configs: list[AttentionConfig], pdl: bool
) -> list[tuple[float, float, AttentionConfig]]:
    """Microseconds a layer at the short and at the long context, best first by the sum of both over their best."""
    case = AttentionCase(heads, max(2, 100_000_000 // (4 * heads.kv_heads * heads.head_dim * LONG)), pdl)
    times = []
    for config in configs:
        layers = len(case.cache)
        case.length.fill_(SHORT)
        short = graph_ms(lambda c=config: case.queue(c, 8)) / (8 * layers)  # type: ignore[misc]
        case.length.fill_(LONG)
        times.append((short * 1000, graph_ms(lambda c=config: case.queue(c)) / layers * 1000, config))  # type: ignore[misc]
    best = min(short for short, _, _ in times), min(long for _, long, _ in times)
    return sorted(times, key=lambda t: 2 * t[0] / best[0] + t[1] / best[1])
