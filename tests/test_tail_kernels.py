"""The kernels of a round's tail equal their references: noise, acceptance, commit and prompt lookup.

They run on a GPU where there is one, and in Triton's interpreter elsewhere. Run this file by itself to compile all of
them for sm_90, which needs no GPU: it prints the PTX of each.
"""

import os
import random
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from pad_engine.config import SamplingParams
from pad_engine.controller import RoundPlan
from pad_engine.drafters.ngram import NGram
from pad_engine.kernels import accept, kv_commit, ngram_lookup
from pad_engine.kernels.accept import accept_bits_ref, accept_forest, accept_path_ref
from pad_engine.kernels.gumbel import (
    gumbel_noise,
    gumbel_of_word,
    gumbel_of_word_ref,
    gumbel_pick_ref,
    gumbel_ref,
    gumbel_score,
)
from pad_engine.kernels.kv_commit import kv_commit_ref
from pad_engine.kernels.ngram_lookup import ngram_lookup_ref, ngram_match_ref
from pad_engine.state import State
from pad_engine.tree import DraftTree, Forest, column, make_forest
from pad_engine.trees.chain import Chain

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PDL = DEVICE.type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
STATUS = {None: accept.RUNNING, "stop": accept.STOP, "length": accept.LENGTH}


@triton.jit
def noise_kernel(
    noise_ptr,
    score_ptr,
    seed_ptr,
    position_ptr,
    temperature_ptr,
    logits_ptr,
    first,
    V,
    purpose,
    round_index,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows, place = tl.arange(0, ROWS), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seed_ptr + rows)[None, :]
    token = (first + place)[:, None]
    noise = gumbel_noise(seed, seed >> 32, tl.load(position_ptr + rows)[None, :], token, purpose, round_index)
    offsets, mask = rows[None, :] * V + place[:, None], (place < V)[:, None]
    tl.store(noise_ptr + offsets, noise, mask=mask)
    logits = tl.load(logits_ptr + offsets, mask=mask)
    tl.store(score_ptr + offsets, gumbel_score(logits, tl.load(temperature_ptr), noise), mask=mask)


@triton.jit
def word_kernel(noise_ptr, word_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(word_ptr + i, mask=i < N, other=0).to(tl.uint32)
    tl.store(noise_ptr + i, gumbel_of_word(word), mask=i < N)


@triton.jit
def judge_parity(token, pick):
    """A relaxed rule with scores of every kind: 0 has NaN and 1 -inf."""
    score = tl.where(token == 0, float("nan"), tl.where(token == 1, float("-inf"), (token // 2).to(tl.float32)))
    return (token + pick) % 2 == 0, score


def bits(x: Tensor) -> Tensor:
    return x.cpu().view(torch.int32)


def on_device(values, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.as_tensor(values, dtype=dtype).to(DEVICE)


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-40, 0.7, 1e30])
@pytest.mark.parametrize(
    ("purpose", "round_index", "first", "count"), [(0, 0, 0, 4097), (3, 2**32 - 1, 2**32 - 5, 5), (2, 7, 262_000, 145)]
)
def test_noise_and_scores_have_the_bits_of_torch(
    temperature: float, purpose: int, round_index: int, first: int, count: int
) -> None:
    seeds = [0, 1, -1, 2**32, 2**63 - 1, -(2**63), 0x1E3779B97F4A7C15, 77]
    positions = torch.cat([torch.tensor([0, 1, 2**31, 2**32 - 1]), torch.randint(0, 2**32, (4,))])
    logits = (torch.randn(8, count) * 4).mul(2).round().div(2)
    noise, scores = torch.empty(2, 8, count, device=DEVICE)
    noise_kernel[(triton.cdiv(count, 1024),)](
        noise,
        scores,
        on_device(seeds, torch.int64),
        on_device(positions, torch.int64),
        on_device([temperature], torch.float32),
        logits.to(DEVICE),
        first,
        count,
        purpose,
        round_index,
        ROWS=8,
        BLOCK=1024,
    )
    rows = zip(seeds, positions, strict=True)
    expected = torch.cat([gumbel_ref(s, p[None], count, purpose, round_index, first_token=first) for s, p in rows])
    assert torch.equal(bits(noise), bits(expected))
    assert torch.equal(bits(scores), bits(logits + expected * temperature))


def test_noise_of_extreme_words_has_the_bits_of_torch() -> None:
    ends = torch.arange(2000)
    branch = 0x4AFB0D40 + torch.arange(-1000, 1000)  # the last word of the first form
    words = torch.cat([ends, 2**32 - 1 - ends, branch, torch.randint(0, 2**32, (100_000,))])
    noise = torch.empty(len(words), device=DEVICE)
    word_kernel[(triton.cdiv(len(words), 8192),)](noise, words.to(DEVICE), len(words), BLOCK=8192)
    assert torch.equal(bits(noise), bits(gumbel_of_word_ref(words)))


@dataclass
class Round:
    """The buffers of accept_forest by name, all of one size of round."""

    tensors: dict[str, Tensor]

    @classmethod
    def make(cls, num_seqs: int, block_rows: int, parts: int, num_ends: int, ring: int = 3) -> "Round":
        capacity, s = 40 + block_rows, (num_seqs,)
        shapes = dict(
            token=(block_rows,),
            parent=(block_rows,),
            depth=(block_rows,),
            seq_start=(num_seqs + 1,),
            limit=s,
            end_ids=(num_ends,),
            ids=(num_seqs, capacity),
            cache_len=s,
            done=s,
            root=s,
            pick=(block_rows,),
            path=(num_seqs, block_rows),
            old_len=s,
            n_commit=s,
            part_id=(parts, block_rows),
        )
        tensors = {name: torch.full(shape, -77, dtype=torch.int32, device=DEVICE) for name, shape in shapes.items()}
        tensors["part_score"] = torch.zeros(parts, block_rows, device=DEVICE)
        tensors["mask_bits"] = torch.zeros(block_rows, dtype=torch.int64, device=DEVICE)
        tensors["round_index"] = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        tensors["ticket"] = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        pinned = DEVICE.type == "cuda"
        tensors["report"] = torch.full((ring, num_seqs, accept.REPORT_WIDTH), -77, dtype=torch.int32)
        tensors["counter"] = torch.zeros(1, dtype=torch.int32)
        for name in ("report", "counter"):
            tensors[name] = tensors[name].pin_memory() if pinned else tensors[name]
        return cls(tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def set(self, name: str, values) -> None:
        self[name][: len(values)] = torch.as_tensor(values, dtype=self[name].dtype)

    def copy(self) -> dict[str, Tensor]:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return {name: tensor.cpu().clone() for name, tensor in self.tensors.items()}


def some_tree(rng: random.Random, size: int) -> DraftTree:
    """A chain, a star, or between; tokens come later."""
    reach = rng.choice([1, 1, 2, 4, size])
    from_root = rng.random() < 0.3
    parents = [-1]
    for node in range(1, size):
        parents.append(rng.randrange(min(reach, node)) if from_root else rng.randint(max(0, node - reach), node - 1))
    return DraftTree([0] * size, parents)


def picks_of(score: Tensor, ids: Tensor) -> list[int]:
    """For each row the id with the best score of all parts, the lowest at ties; -1 where that is not finite."""
    best = score.amax(0)
    lowest = torch.where(score == best, ids, 2**31 - 1).amin(0)
    return torch.where(best.isfinite(), lowest, -1).tolist()


def fill_forest(r: Round, trees: list[DraftTree]) -> Forest:
    forest = make_forest(trees, range(len(trees)))
    for name in ("token", "parent", "depth"):
        r.set(name, getattr(forest, name))
    r.set("mask_bits", forest.tree_mask_bits[:, 0])
    r.set("seq_start", [*forest.starts, len(forest.token)])
    return forest


def some_round(r: Round, rng: random.Random, vocab: int) -> tuple[list[DraftTree], Forest]:
    """Fill the buffers with a round: random trees that often follow the picks, statuses, limits, and ends."""
    num_seqs, block_rows = len(r["limit"]), len(r["token"])
    gen = torch.Generator().manual_seed(rng.getrandbits(60))
    levels = torch.tensor([-1.5, -1.0, -0.0, 0.0, 1.0, 2.5])
    score = levels[torch.randint(6, r["part_score"].shape, generator=gen)]
    ids = torch.randint(vocab, score.shape, generator=gen, dtype=torch.int32)
    odd = torch.rand(block_rows, generator=gen)
    score[:, odd < 0.02] = -torch.inf
    score[rng.randrange(len(score)), odd > 0.98] = torch.inf
    score[rng.randrange(len(score)), (odd > 0.3) & (odd < 0.4)] = -torch.inf
    r.set("part_score", score)
    r.set("part_id", ids)
    room = block_rows
    trees = []
    for seq in range(num_seqs):
        size = rng.randint(1, min(room - (num_seqs - 1 - seq), rng.choice([2, 8, block_rows])))
        room -= size
        trees.append(some_tree(rng, size))
    start, picks = 0, picks_of(score, ids)
    for seq, tree in enumerate(trees):
        follow = rng.choice([0.0, 0.5, 0.9, 1.0])
        tokens = [rng.randrange(vocab)]
        for parent in tree.parents[1:]:
            pick = picks[start + parent]
            tokens.append(pick if rng.random() < follow and pick >= 0 else rng.randrange(vocab))
        trees[seq] = DraftTree(tokens, tree.parents)
        start += len(tree)
    forest = fill_forest(r, trees)
    lengths = [rng.randint(0, 30) for _ in trees]
    r.set("cache_len", lengths)
    r.set("limit", [min(n + 1 + rng.choice([0, 1, 2, 4, 100, 100]), r["ids"].shape[1]) for n in lengths])
    r.set("done", [rng.choice([0] * 9 + [rng.randint(1, 3)]) for _ in trees])
    r.set("end_ids", [rng.choice([-1, -1, -1, rng.randrange(vocab)]) for _ in r["end_ids"]])
    for seq, tree in enumerate(trees):
        r["ids"][seq, : lengths[seq]] = torch.randint(vocab, (lengths[seq],), generator=gen).int()
        r["ids"][seq, lengths[seq]] = tree.tokens[0]
        r["root"][seq] = tree.tokens[0]
    return trees, forest


def judge_parity_ref(forest: Forest, picks: list[int]) -> tuple[Tensor, Tensor]:
    judge = torch.tensor(picks)[forest.parent.clamp(min=0).long()]
    score = torch.where(forest.token > 1, forest.token // 2, -torch.inf)
    # as C has it: a remainder has the sign of its dividend
    return torch.fmod(forest.token + judge, 2) == 0, torch.where(forest.token == 0, torch.nan, score)


def judge_pick_ref(forest: Forest, picks: list[int]) -> tuple[Tensor, Tensor]:
    accepted = forest.token == torch.tensor(picks)[forest.parent.clamp(min=0).long()]
    return accepted, torch.zeros(len(picks))


def expected_round(before: dict[str, Tensor], trees: list[DraftTree], forest: Forest, judge) -> dict[str, Tensor]:
    """What accept_forest leaves, by the references and State.commit."""
    t = {name: tensor.clone() for name, tensor in before.items()}
    picks = picks_of(t["part_score"], t["part_id"])[: len(forest.token)]
    accepted, score = judge(forest, picks)
    # behind a row without a pick there is nothing to accept
    accepted &= torch.tensor(picks)[forest.parent.clamp(min=0).long()] >= 0
    kept = accept_bits_ref(accepted, score, forest.parent)
    paths = accept_path_ref(kept, forest.depth, forest.seq, forest.tree_mask_bits)
    slot = t["report"][int(t["round_index"]) % len(t["report"])]
    for seq, (tree, path, start) in enumerate(zip(trees, paths, forest.starts, strict=True)):
        length = int(t["cache_len"][seq])
        t["old_len"][seq], tokens, accepted = length, [], 0
        if t["done"][seq] == accept.RUNNING:
            t["pick"][start : start + len(tree)] = column(picks[start : start + len(tree)])
            t["path"][seq, : len(path)] = column(path)
            if picks[path[-1]] < 0:
                t["done"][seq] = accept.NOT_FINITE
            else:
                ends = frozenset(end for end in t["end_ids"].tolist() if end >= 0)
                held = t["ids"][seq, : length + 1].tolist()
                state = State(held, 0, int(t["limit"][seq]), SamplingParams(max_tokens=1000), 0, ends)
                commit = state.commit(tree, [row - start for row in path], picks[path[-1]])
                tokens, accepted = commit.tokens, commit.accepted
                assert len(commit.path) == len(tokens)
                t["done"][seq] = STATUS[state.finish_reason]
                t["ids"][seq, : len(state.ids)] = column(state.ids)
                t["root"][seq] = state.root
        t["cache_len"][seq] = length + len(tokens)
        t["n_commit"][seq] = len(tokens)
        header = [len(tokens), accepted, int(t["done"][seq]), len(tree)]
        slot[seq, : 4 + len(tokens)] = column(header + tokens)
    t["round_index"] += 1
    t["counter"].copy_(t["round_index"])
    return t


def check_rounds(
    r: Round, rounds: int, seed: int, vocab: int, judge=accept.judge_pick, judge_ref=judge_pick_ref
) -> set:
    """Rounds on the same buffers, every element of them compared; returns the kinds of outcome that were met."""
    rng, met = random.Random(seed), set()
    for _ in range(rounds):
        trees, forest = some_round(r, rng, vocab)
        before = r.copy()
        expected = expected_round(before, trees, forest, judge_ref)
        accept_forest(**r.tensors, judge=judge, pdl=PDL)
        after = r.copy()
        for name, tensor in expected.items():
            assert torch.equal(bits(after[name]), bits(tensor)), name
        met |= {("status", status) for status in after["done"][before["done"] == 0].tolist()}
        met |= {("done", bool(done)) for done in before["done"].tolist()}
        met |= {("accepted", min(n, 4)) for n in after["report"][before["round_index"] % 3][..., 1].flatten().tolist()}
    return met


ALL_KINDS = (
    {("status", s) for s in range(4)} | {("done", d) for d in (True, False)} | {("accepted", n) for n in range(5)}
)


@pytest.mark.parametrize(
    ("num_seqs", "block_rows", "parts", "rounds"),
    [(1, 16, 132, 150), (1, 32, 5, 100), (1, 64, 40, 100), (3, 16, 3, 90), (4, 64, 2, 60), (5, 32, 64, 50)],
)
def test_rounds_equal_the_references(num_seqs: int, block_rows: int, parts: int, rounds: int) -> None:
    r = Round.make(num_seqs, block_rows, parts, num_ends=3)
    assert check_rounds(r, rounds, seed=num_seqs * block_rows, vocab=5) >= ALL_KINDS


def test_plain_decoding_has_one_row() -> None:
    check_rounds(Round.make(1, 1, 264, num_ends=1), 100, seed=3, vocab=4)


def test_scores_choose_among_siblings() -> None:
    r = Round.make(2, 32, 2, num_ends=1)
    met = check_rounds(r, 90, seed=4, vocab=9, judge=judge_parity, judge_ref=judge_parity_ref)
    assert met >= {("accepted", n) for n in range(5)}


def test_rounds_are_counted_beyond_32_bits() -> None:
    r = Round.make(2, 16, 2, num_ends=1)
    r["round_index"].fill_(2**32 - 2)
    r.tensors["counter"] = r["counter"].to(DEVICE, torch.int64)
    check_rounds(r, 4, seed=5, vocab=4)
    assert int(r["counter"]) == 2**32 + 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_picks_of_parts_equal_picks_of_rows(temperature: float) -> None:
    n, vocab, parts = 16, 1000, 7
    logits = (torch.randn(n, vocab) * 4).mul(8).round().div(8)
    logits[2], logits[3, 9] = -torch.inf, torch.inf
    positions = torch.randint(0, 1000, (n,))
    scores = logits + gumbel_ref(5, positions, vocab) * temperature
    # every part takes each seventh block of 16 ids
    part_of = torch.arange(vocab) // 16 % parts
    r = Round.make(1, n, parts, num_ends=1)
    fill_forest(r, [DraftTree.chain([0] * n)])
    for name, value in (("cache_len", 3), ("limit", 30), ("done", 0)):
        r[name].fill_(value)
    for part in range(parts):
        rows = scores.masked_fill(part_of != part, -torch.inf)
        best = rows.amax(1)
        r["part_score"][part], r["part_id"][part] = best, (rows == best[:, None]).int().argmax(1).int()
    accept_forest(**r.tensors, pdl=PDL)
    assert r["pick"].tolist() == gumbel_pick_ref(logits, positions, 5, temperature).tolist()


@pytest.mark.parametrize(
    ("layers", "heads", "head_dim", "scratch", "ring", "block_rows"),
    [(2, 3, 64, 16, 40, 16), (1, 1, 8, 5, 7, 4), (3, 2, 72, 64, 9, 64), (1, 2, 128, 32, 100, 32), (2, 1, 24, 1, 3, 1)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_commit_equals_the_reference(
    layers: int, heads: int, head_dim: int, scratch: int, ring: int, block_rows: int, dtype: torch.dtype
) -> None:
    rng, num_seqs = random.Random(ring), 3
    starts = [0, scratch, 2 * scratch, 3 * scratch]
    shape = (layers, 2, num_seqs, heads, scratch + ring, head_dim)
    for _ in range(4):
        buffer = torch.randn(shape, device=DEVICE).to(dtype)
        expected = buffer.cpu().clone()
        rows = [sorted(rng.sample(range(scratch), rng.randint(0, min(scratch, block_rows)))) for _ in range(num_seqs)]
        old_len = [rng.randint(0, 3 * ring) for _ in rows]
        path = torch.full((num_seqs, block_rows), 10**6, dtype=torch.int32)
        for seq, (kept, length) in enumerate(zip(rows, old_len, strict=True)):
            path[seq, : len(kept)] = column(kept) + starts[seq]
            moved = kept[-ring:]
            first = length + len(kept) - len(moved)
            targets = [scratch + (first + i) % ring for i in range(len(moved))]
            kv_commit_ref(expected[:, :, seq], [scratch - 1 - row for row in moved], targets)
        counts = on_device([len(kept) for kept in rows])
        kv_commit.kv_commit(buffer, path.to(DEVICE), on_device(starts), on_device(old_len), counts, scratch, pdl=PDL)
        assert torch.equal(buffer.cpu(), expected)


def lookup(
    ids: list[int], capacity: int, limit: int, max_depth: int, rows: int, min_match: int, done: int = 0
) -> tuple:
    """(tokens of the chain, all outputs) of one launch."""
    held = torch.full((1, capacity), ids[-1], dtype=torch.int32)
    held[0, : len(ids)] = column(ids)
    out = {name: torch.full((rows,), -77, dtype=torch.int32, device=DEVICE) for name in ("token", "parent", "depth")}
    out["mask_bits"] = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    out["seq_start"] = on_device([-77, -77])
    best, ticket = on_device([0], torch.int64), on_device([0])
    scalars = dict(cache_len=len(ids) - 1, limit=limit, max_depth=max_depth, done=done)
    ngram_lookup.ngram_lookup(
        ids=held.to(DEVICE),
        **{name: on_device([value]) for name, value in scalars.items()},
        **out,
        best=best,
        ticket=ticket,
        min_match=min_match,
        pdl=PDL,
    )
    assert (int(best), int(ticket)) == (0, 0)
    first, count = out["seq_start"].tolist()
    assert first == 0
    return out["token"][:count].tolist(), out


def some_text(rng: random.Random, length: int) -> list[int]:
    """Few tokens, with copies of earlier parts, some of them long."""
    ids = [rng.randrange(4) for _ in range(min(length, 3))]
    while len(ids) < length:
        start = rng.randrange(len(ids))
        copied = ids[start : start + rng.choice([1, 5, 50])] if rng.random() < 0.7 else [rng.randrange(30)]
        ids += copied
    return ids[:length]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 33, 256, 257, 700, 1500])
@pytest.mark.parametrize("min_match", [1, 2, 3])
def test_lookup_equals_the_reference(length: int, min_match: int) -> None:
    rng = random.Random(length * min_match)
    for rows, max_depth, room, done in [
        (16, 15, 100, 0),
        (16, 40, 100, 0),
        (64, 63, 9, 0),
        (4, 2, 100, 0),
        (7, 6, 0, 0),
    ]:
        ids = some_text(rng, length)
        limit = length + room
        tokens, out = lookup(ids, max(length, 1600), limit, max_depth, rows, min_match, done)
        count = max(0, min(max_depth, limit - length - 1, rows - 1))
        assert tokens == ngram_lookup_ref(torch.tensor(ids), min_match, count).tolist()
        expected = make_forest([DraftTree.chain([*tokens, *[ids[-1]] * (rows - len(tokens))])], [0])
        for name in ("token", "parent", "depth"):
            assert torch.equal(out[name].cpu(), getattr(expected, name)), name
        assert torch.equal(out["mask_bits"].cpu(), expected.tree_mask_bits[:, 0])


@pytest.mark.parametrize("min_match", [1, 2, 3])
def test_lookup_proposes_what_the_drafter_does(min_match: int) -> None:
    rng, compared = random.Random(min_match), 0
    for _ in range(30):
        ids = some_text(rng, rng.randint(1, 300))
        drafter = NGram(Chain(), min_match)
        drafter.begin(ids)
        depth = rng.randint(0, 12)
        state = State(ids, 0, 10**6, SamplingParams(), 0, frozenset(), plan=RoundPlan(budget=16, depth=depth))
        # the drafter looks at the latest 16 places only
        latest = drafter.matches()[:1]
        if latest == [ngram_match_ref(torch.tensor(ids), min_match)] or not latest:
            compared += 1
            assert lookup(ids, 320, 10**6, depth, 16, min_match)[0] == drafter.propose(state).tokens
    assert compared >= 10


def test_lookup_prefers_the_longest_then_the_latest() -> None:
    #      0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16
    ids = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3, 7, 2, 3, 6, 1, 2, 3]
    assert lookup(ids, 300, 100, 3, 8, 2)[0] == [3, 7, 2, 3]
    assert lookup([5, 5, 5, 5], 300, 100, 4, 8, 1)[0] == [5, 5, 5, 5, 5]
    assert lookup([4, 6, 4, 6, 4], 300, 100, 5, 8, 2)[0] == [4, 6, 4, 6, 4, 6]
    assert lookup([5, 5, 5, 5], 300, 100, 4, 8, 1, done=2)[0] == [5]
    # beyond MAX_MATCH no length counts, so the latest of two long matches wins
    run = list(range(100, 150))
    assert lookup([0, *run, 1, *run[-32:], 2, *run], 300, 1000, 1, 8, 2)[0] == [149, 2]


def compile_all() -> None:
    """Compile every kernel for sm_90, print its PTX behind its name."""
    rows = {"mask_bits_ptr": "*i64", "round_ptr": "*i64", "counter_ptr": "*i64", "part_score_ptr": "*fp32"}
    tail = dict(JUDGE=accept.judge_pick, NUM_ROWS=16, NUM_PARTS=132, NUM_ENDS=4, RING=8, BLOCK_P=64, BLOCK_R=16)
    commit = dict(NUM_SEQS=1, NUM_HEADS=8, SLOTS=4160, SCRATCH=64, HEAD_DIM=128, BLOCK_R=16, BLOCK_D=128)
    chain = dict(MIN_MATCH=2, NUM_ROWS=16, NUM_PROGRAMS=32, BLOCK=256)
    noise = dict.fromkeys(("noise_ptr", "score_ptr", "temperature_ptr", "logits_ptr"), "*fp32")
    noise |= {"seed_ptr": "*i64", "position_ptr": "*i64"}
    for kernel, types, values in [
        (noise_kernel, noise, dict(ROWS=16, BLOCK=128)),
        *[(accept.accept_kernel, rows, tail | dict(NUM_SEQS=s, PDL=pdl)) for s, pdl in ((1, True), (4, False))],
        (kv_commit.kv_commit_kernel, {"buffer_ptr": "*bf16"}, commit | dict(PDL=True)),
        (ngram_lookup.ngram_lookup_kernel, {"mask_bits_ptr": "*i64", "best_ptr": "*i64"}, chain | dict(PDL=True)),
    ]:
        pointer = {name: types.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in kernel.arg_names}
        signature = {name: "constexpr" if name in values else kind for name, kind in pointer.items()}
        source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=values, attrs={})
        target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
        print(f"== {kernel.__name__} PDL={values.get('PDL')}")
        print(triton.compile(source, target=target, options=dict(num_warps=4)).asm["ptx"])


def test_kernels_compile_for_sm_90_and_never_fuse(tmp_path) -> None:
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    out = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    kernels = dict(part.split("\n", 1) for part in out.stdout.split("== ")[1:])
    assert len(kernels) == 5
    for name, ptx in kernels.items():
        assert ("griddepcontrol.wait" in ptx) == ("PDL=True" in name), name
        assert "fma" not in ptx, name
    assert "mul.rn.f32" in kernels["noise_kernel PDL=None"] and ".ftz" not in kernels["noise_kernel PDL=None"]


if __name__ == "__main__":
    compile_all()
