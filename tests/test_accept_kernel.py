"""The accept kernel equals what the host makes of a round, on a GPU or in Triton's interpreter."""

import random
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from launches import DEVICE, host_bits
from torch import Tensor

from pad_engine.config import SamplingParams
from pad_engine.kernels import accept, accept_path
from pad_engine.kernels.accept import accept_forest
from pad_engine.kernels.accept_path import accept_bits_ref, accept_path_ref
from pad_engine.kernels.gumbel import gumbel_pick_ref, gumbel_ref
from pad_engine.state import State
from pad_engine.tree import DraftTree, Forest, column, make_forest

PDL = DEVICE.type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
STATUS = {None: accept_path.RUNNING, "stop": accept_path.STOP, "length": accept_path.LENGTH}


@triton.jit
def judge_parity(token, pick):
    """A relaxed rule with scores of every kind: 0 has NaN and 1 -inf."""
    score = tl.where(token == 0, float("nan"), tl.where(token == 1, float("-inf"), (token // 2).to(tl.float32)))
    return (token + pick) % 2 == 0, score


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
        if t["done"][seq] == accept_path.RUNNING:
            t["pick"][start : start + len(tree)] = column(picks[start : start + len(tree)])
            t["path"][seq, : len(path)] = column(path)
            if picks[path[-1]] < 0:
                t["done"][seq] = accept_path.NOT_FINITE
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
        if PDL:
            torch.cuda.synchronize()  # what the pass does not write is read before the wait
        accept_forest(**r.tensors, judge=judge, pdl=PDL)
        after = r.copy()
        for name, tensor in expected.items():
            assert torch.equal(host_bits(after[name]), host_bits(tensor)), name
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
    if PDL:
        torch.cuda.synchronize()
    accept_forest(**r.tensors, pdl=PDL)
    assert r["pick"].tolist() == gumbel_pick_ref(logits, positions, 5, temperature).tolist()
