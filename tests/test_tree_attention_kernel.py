"""The attention kernel equals attention written out key by key: trees, forests, windows, splits, and what it appends.

Every slot of the cache that may not be read holds NaN, and every slot that may not be written must keep its bits.
"""

import itertools
import random
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from launches import CUDA, DEVICE, DTYPES, EPS, MODES, bits, dots_by_element, ints, nans, normal, repeat
from torch import Tensor

from pad_engine.kernels.attention_tiles import AttentionWorkspace
from pad_engine.kernels.tree_attention import AttentionConfig, tree_attention
from pad_engine.tree import DraftTree, make_forest

# the interpreter computes what the kernel then masks
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# probabilities are rounded to the type before they meet the values
CLOSE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NEAR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Setting:
    """One layer of a cache, and how it is attended to. strict passes and passes to_prefix write by position."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    window: int | None = None
    capacity: int = 64
    scratch: int = 64
    softcap: float | None = None
    norms: bool = False
    dtype: torch.dtype = torch.float32
    to_prefix: bool = False
    strict: bool = False
    config: AttentionConfig = field(default_factory=lambda: AttentionConfig(4, 16, 16, 4))

    @property
    def ring(self) -> int:
        return self.capacity if self.window is None else min(self.window, self.capacity)

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def angles(self) -> tuple[Tensor, Tensor]:
        """cos and sin `[positions, head_dim]` as models/rope.py has them."""
        half = self.head_dim // 2
        turns = torch.arange(self.capacity + 64)[:, None] * 100 ** (-torch.arange(half) / half)
        cos, sin = turns.cos(), turns.sin()
        return torch.cat((cos, cos), 1).to(DEVICE, self.dtype), torch.cat((-sin, sin), 1).to(DEVICE, self.dtype)

    def norm_weights(self) -> tuple[Tensor | None, Tensor | None]:
        ramp = torch.linspace(0.5, 1.5, self.head_dim).to(DEVICE, self.dtype)
        return (ramp, ramp.flip(0).contiguous()) if self.norms else (None, None)

    def cache(self, lengths: list[int]) -> Tensor:
        """`[2, seqs, kv_heads, scratch + ring, head_dim]`, numbers where a prefix lies and NaN elsewhere."""
        layer = nans(2, len(lengths), self.kv_heads, self.scratch + self.ring, self.head_dim, dtype=self.dtype)
        for seq, length in enumerate(lengths):
            filled = layer[:, seq, :, self.scratch : self.scratch + min(length, self.ring)]
            filled.copy_(normal(*filled.shape, dtype=self.dtype))
        return layer

    def launch(self, qkv: Tensor, layer: Tensor, trees: list[DraftTree], lengths: list[int]) -> Tensor:
        """One pass over a forest, padded to the rows of qkv; returns the rows' outputs, without the padding's."""
        rows, forest = len(qkv), make_forest(trees, range(len(trees)))
        n, pad = len(forest.token), [0] * (rows - len(forest.token))
        mask = ints([*forest.tree_mask_bits[:, 0].tolist(), *pad], torch.int64)
        seq = ints([*forest.seq.tolist(), *pad])
        depth, start, length = ints([*forest.depth.tolist(), *pad]), ints([*forest.starts, n]), ints(lengths)
        out = nans(rows, self.heads * self.head_dim, dtype=self.dtype)
        workspace = AttentionWorkspace(rows, self.heads, self.head_dim, self.config.splits, DEVICE)
        workspace.parts.fill_(torch.nan)
        workspace.sums.fill_(torch.nan)
        arguments = (qkv, layer, out, workspace, depth, mask, seq, start, length, *self.angles(), *self.norm_weights())

        def launch() -> None:
            tree_attention(
                *arguments, eps=EPS, scale=0.3, softcap=self.softcap, scratch=self.scratch, capacity=self.capacity,
                window=self.window, heads=self.heads, config=self.config, to_prefix=self.to_prefix,
                strict=self.strict, pdl=MODES[rows // 32 % len(MODES)],
            )  # fmt: skip

        repeat(launch, layer, out)
        return out[:n]

    def new_rows(self, qkv: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys of some rows, normed, turned and rounded, and their values: fp32 `[n, ., head_dim]`."""
        x = qkv.float().view(len(qkv), -1, self.head_dim)
        parts = list(x.split([self.heads, self.kv_heads, self.kv_heads], dim=1))
        cos, sin = (table.float()[position][:, None] for table in self.angles())
        for i, weight in enumerate(self.norm_weights()):
            part = parts[i]
            if weight is not None:
                part = part * torch.rsqrt(part.square().mean(-1, keepdim=True) + EPS) * weight.float()
            parts[i] = (part * cos + part.roll(self.head_dim // 2, -1) * sin).to(self.dtype).float()
        return parts[0], parts[1], parts[2]

    def expected(self, qkv: Tensor, before: Tensor, tree: DraftTree, seq: int, length: int) -> Tensor:
        """Attention of one sequence's rows, row by row over the keys that it sees: fp32 `[n, heads * head_dim]`."""
        depth, mask = torch.tensor(tree.depth, device=DEVICE), tree.mask().to(DEVICE)
        q, k, v = self.new_rows(qkv, length + depth)
        old = torch.arange(max(0, length - self.ring), length, device=DEVICE)
        slots = self.scratch + old % self.ring
        out = []
        for row in range(len(tree)):
            position = torch.cat((old, length + depth[mask[row]]))
            keys = torch.cat((before[0, seq][:, slots].float().transpose(0, 1), k[mask[row]]))
            values = torch.cat((before[1, seq][:, slots].float().transpose(0, 1), v[mask[row]]))
            if self.window is not None:
                near = position > length + depth[row] - self.window
                keys, values = keys[near], values[near]
            group = self.heads // self.kv_heads
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            scores = (q[row] * keys).sum(-1) * 0.3
            if self.softcap is not None:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            out.append((scores.softmax(0)[:, :, None] * values).sum(0).flatten())
        return torch.stack(out)

    def check_cache(self, layer: Tensor, before: Tensor, qkv: Tensor, tree: DraftTree, seq: int, length: int) -> None:
        """The new rows are in their slots, whatever fits, and no other slot has changed."""
        position = length + torch.tensor(tree.depth, device=DEVICE)
        _, k, v = self.new_rows(qkv, position)
        kept = torch.ones(self.scratch + self.ring, dtype=torch.bool, device=DEVICE)
        for row in range(len(tree)):
            slot = self.scratch - 1 - row
            if self.to_prefix:
                if position[row] >= self.capacity:
                    continue
                slot = self.scratch + int(position[row]) % self.ring
            kept[slot] = False
            torch.testing.assert_close(layer[0, seq, :, slot].float(), k[row], atol=NEAR[self.dtype], rtol=0)
            assert torch.equal(layer[1, seq, :, slot].float(), v[row])
        assert torch.equal(bits(layer[:, seq][:, :, kept]), bits(before[:, seq][:, :, kept]))

    def check(self, rows: int, trees: list[DraftTree], lengths: list[int]) -> Tensor:
        """A pass of random rows does what is written above; returns its outputs."""
        qkv, layer = normal(rows, self.width, dtype=self.dtype), self.cache(lengths)
        before = layer.clone()
        out, first = self.launch(qkv, layer, trees, lengths), 0
        for seq, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
            own = slice(first, first + len(tree))
            expected = self.expected(qkv[own], before, tree, seq, length)
            error = (out[own].float() - expected).norm(dim=1) / expected.norm(dim=1)
            assert bool((error <= CLOSE[self.dtype]).all()), (seq, length, error.tolist())
            self.check_cache(layer, before, qkv[own], tree, seq, length)
            first += len(tree)
        return out


def chain(n: int) -> DraftTree:
    return DraftTree.chain([1] * n)


def star(n: int) -> DraftTree:
    return DraftTree([1] * n, [-1] + [0] * (n - 1))


def some_tree(n: int, seed: int = 0) -> DraftTree:
    rng = random.Random(seed)
    return DraftTree([1] * n, [-1] + [rng.randrange(node) for node in range(1, n)])


HEADS = [(2, 2, 16), (3, 1, 64), (4, 1, 12), (8, 2, 16)]
if CUDA:
    HEADS += [(9, 3, 64), (4, 2, 128), (4, 1, 256)]
# a GPU's are compiled one by one: not every size in every type
SIZES = [(h, d) for h in HEADS for d in DTYPES if not CUDA or d == torch.bfloat16 or h[2] in (64, 256)]


@pytest.mark.parametrize(("heads", "dtype"), SIZES, ids=str)
def test_trees(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    for seed, (tree, rows) in enumerate([(chain(16), 16), (star(11), 16), (some_tree(29), 32), (some_tree(64), 64)]):
        setting = Setting(*heads, dtype=dtype, norms=seed % 2 == 0)
        setting.check(rows, [tree], [[37, 0, 16, 61][seed]])
    Setting(*heads, dtype=dtype, norms=True, to_prefix=True).check(1, [chain(1)], [43])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forests(dtype: torch.dtype) -> None:
    setting = Setting(dtype=dtype, softcap=2.0)
    setting.check(64, [some_tree(13, 1), some_tree(20, 2), chain(31)], [5, 0, 47])
    setting.check(16, [chain(1), star(2), chain(1), some_tree(9)], [64, 1, 0, 33])
    # sequences without a prefix, and with splits of their own for the rows of each
    setting.config = replace(setting.config, own=True)
    setting.check(64, [some_tree(13, 1), some_tree(20, 2), chain(31)], [5, 0, 47])


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 32, 33, 47, 48, 49, 63])
def test_prefixes_about_the_edges_of_splits_and_steps(length: int) -> None:
    Setting(to_prefix=True).check(1, [chain(1)], [length])
    Setting().check(1, [chain(1)], [length])
    Setting(head_dim=12).check(16, [some_tree(7)], [length])


@pytest.mark.parametrize(("splits", "block_m", "own"), [(1, 64, False), (2, 64, True), (16, 64, False), (16, 16, True)])
def test_splits_of_a_long_prefix(splits: int, block_m: int, own: bool) -> None:
    """Sixteen meet by four, or by eight where a program has 16 queries, those of one row all at once, unless it is said
    by how many."""
    for length in (100, 240, 255):
        setting = Setting(capacity=256, config=AttentionConfig(splits, 16, 32, 4, block_m, own=own))
        setting.check(16, [some_tree(12)], [length])
        setting.to_prefix = True
        setting.check(1, [chain(1)], [length])


@pytest.mark.parametrize("block_m", [16, 32])
def test_queries_of_a_head_may_be_shared_out(block_m: int) -> None:
    """Rows of any place meet the keys of all, whichever program has them, and are appended once."""
    for rows, tree, heads in ((16, some_tree(16), (9, 3, 64)), (32, star(21), (4, 1, 12)), (64, chain(50), (8, 2, 16))):
        Setting(*heads, config=AttentionConfig(4, 16, 16, 4, block_m)).check(rows, [tree], [37])


@pytest.mark.parametrize("stages", [2, 3] if CUDA else [2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_tiles_by_bulk_copies(dtype: torch.dtype, stages: int) -> None:
    """Every number of keys behind the last whole tile, splits that have none, rings that their queries see in part, and
    forests: no slot beyond a prefix is let in, each of which holds NaN."""
    bulk = partial(Setting, head_dim=32, dtype=dtype, capacity=96)
    wide = AttentionConfig(2, 32, 16, 4, stages=stages)
    for length in range(60, 78):
        bulk(config=wide).check(16, [some_tree(7, length)], [length])
    for length in (0, 1, 32, 64, 91):
        bulk(config=AttentionConfig(4, 16, 16, 4, 16, stages=stages), to_prefix=True).check(1, [chain(1)], [length])
    for length in (31, 45, 61, 90):
        bulk(config=wide, window=45, softcap=5.0, norms=True).check(16, [chain(9)], [length])
    bulk(config=replace(wide, own=True)).check(64, [some_tree(13, 1), some_tree(20, 2), chain(31)], [5, 0, 79])


@pytest.mark.parametrize("setting", [Setting(head_dim=12), Setting(head_dim=16), Setting(8, 2, 96)], ids=str)
def test_heads_whose_halves_do_not_lie_side_by_side_come_through_registers(setting: Setting) -> None:
    setting.config = AttentionConfig(2, 16, 16, 4, stages=2)
    setting.check(16, [some_tree(7)], [61])


@pytest.mark.parametrize("window", [8, 40])
@pytest.mark.parametrize("length", [0, 3, 7, 8, 9, 39, 40, 41, 61])
def test_windows_and_rings(length: int, window: int) -> None:
    setting = Setting(heads=2, window=window, softcap=5.0, norms=True)
    setting.check(16, [chain(16)], [length])
    setting.check(16, [some_tree(9)], [length])
    setting.to_prefix = True
    setting.check(1, [chain(1)], [length])


def test_a_window_that_the_context_does_not_reach() -> None:
    Setting(window=100).check(16, [chain(12)], [50])
    Setting(window=64).check(16, [chain(12)], [64])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_rejected_branch_that_is_not_finite_stays_alone(value: float, dtype: torch.dtype) -> None:
    setting, tree, length = Setting(dtype=dtype), DraftTree([1] * 7, [-1, 0, 0, 1, 2, 2, 4]), 20
    qkv, layer = normal(16, setting.width, dtype=dtype), setting.cache([length])
    good = setting.launch(qkv, layer.clone(), [tree], [length])
    bad = qkv.clone()
    bad[2] = value
    out = setting.launch(bad, layer, [tree], [length])
    spoiled = [2, 4, 5, 6]  # the row and what descends from it
    for row in set(range(7)) - set(spoiled):
        assert torch.equal(out[row], good[row])
    # what lies in the scratch must not spoil a later pass that masks it: no key and no value of it is committed
    assert layer[1, 0, :, setting.scratch - 7 : setting.scratch].isfinite().all()


# a pass's own rows stand at their absolute places, whatever the launch parameters are
STRICT = dict(strict=True, to_prefix=True, capacity=96, config=AttentionConfig(4, 16, 16, 4, own=True))


ODD = {"head_dim": 12, "heads": 3, "kv_heads": 1, "window": 96}


# sums by element take an interpreter long
@pytest.mark.parametrize(
    "options, dtype",
    list(itertools.product([{}, ODD], DTYPES)) if CUDA else [({}, DTYPES[-1]), (ODD, DTYPES[0])],
    ids=str,
)
def test_strict_rows_do_not_depend_on_their_pass(
    options: dict, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text is read in chains of any length: each row has the same bits, and so has the cache."""
    dots_by_element(monkeypatch)
    setting = Setting(**STRICT, **options, dtype=dtype, norms=True)
    start, total = 11, 22
    text, layer = normal(total, setting.width, dtype=dtype), setting.cache([start])
    expected = setting.expected(text, layer, chain(total), 0, start)
    whole, cache = read_in_chains(setting, text, layer.clone(), start, [1])
    error = (whole.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert bool((error <= CLOSE[dtype]).all())
    for sizes in ([16], [5, 1, 9]):
        out, own = read_in_chains(setting, text, layer.clone(), start, sizes)
        assert torch.equal(bits(out), bits(whole)) and torch.equal(bits(own), bits(cache))


def read_in_chains(
    setting: Setting, text: Tensor, layer: Tensor, start: int, sizes: list[int]
) -> tuple[Tensor, Tensor]:
    """All rows' outputs, and the cache, when the passes have so many rows in turn; the padding is noise."""
    out, done = [], 0
    for size in itertools.cycle(sizes):
        rows = text[done : done + size]
        if not len(rows):
            return torch.cat(out), layer
        qkv = torch.cat([rows, normal(16 - len(rows), setting.width, dtype=setting.dtype)])
        out.append(setting.launch(qkv, layer, [chain(len(rows))], [start + done]))
        done += len(rows)
    raise AssertionError


def test_strict_rows_do_not_depend_on_rejected_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    dots_by_element(monkeypatch)
    setting = Setting(**STRICT)
    for length in (0, 30, 31, 32, 87):
        qkv, layer = normal(16, setting.width), setting.cache([length])
        before = layer.clone()
        whole = setting.launch(qkv, layer, [chain(9)], [length])
        setting.check_cache(layer, before, qkv[:9], chain(9), 0, length)
        # the rows that were rejected still lie behind the prefix
        qkv[3:] = normal(13, setting.width)
        assert torch.equal(bits(setting.launch(qkv, layer, [chain(3)], [length])), bits(whole[:3]))
