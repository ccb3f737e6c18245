"""Verifying a tree equals decoding each of its paths one token at a time: full, sliding and wrapped layers, forests."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Make, read, sequential, some_ids, tiny_decoder

from pad_engine.kernels.tree_attention import tree_attention_ref
from pad_engine.kv_cache import KVCache, RowGroup
from pad_engine.models.decoder import Decoder
from pad_engine.tree import DraftTree

TOLERANCE = 1e-4
# mistral slides in all layers, gemma in two of three, qwen3 in none
FAMILIES = ["llama", "mistral", "gemma3_text"]


def some_tree(rng: random.Random, size: int, root: int) -> DraftTree:
    reach = rng.choice([1, 2, 4, size])
    parents = [-1] + [rng.randint(max(0, node - reach), node - 1) for node in range(1, size)]
    return DraftTree([root] + [rng.randrange(250) for _ in range(size - 1)], parents)


def group(seq: int, tree: DraftTree) -> RowGroup:
    return RowGroup(seq, tree.tokens, tree.depth, tree.mask())


@torch.inference_mode()
def run(decoder: Decoder, cache: KVCache, groups: Sequence[RowGroup]) -> torch.Tensor:
    return decoder.logits(decoder.forward(cache.place(groups), cache)[0])


def path_to(tree: DraftTree, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = tree.parents[node]
    return path


def check_rows(decoder: Decoder, ids: list[int], tree: DraftTree, logits: torch.Tensor) -> None:
    """ids: committed before the root. Every leaf's path equals plain decoding of it, row by row."""
    leaves = set(range(len(tree))) - set(tree.parents)
    for leaf in leaves:
        path = path_to(tree, leaf)
        expected = sequential(decoder, ids + [tree.tokens[node] for node in path])[len(ids) :]
        torch.testing.assert_close(logits[path], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("length", [0, 1, 5, 8, 30])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_path_equals_sequential_decoding(make_model: Make, family: str, length: int) -> None:
    decoder = tiny_decoder(make_model(family))
    rng = random.Random(length)
    for size in (1, 2, 9, 20):
        cache = decoder.new_cache(capacity=60, scratch=32)
        ids = some_ids(length)
        read(decoder, cache, ids)
        tree = some_tree(rng, size, 7)
        check_rows(decoder, ids, tree, run(decoder, cache, [group(0, tree)]))


@pytest.mark.parametrize("prompt", [5, 30])
@pytest.mark.parametrize("family", FAMILIES)
@given(seed=st.integers(0, 2**31))
@settings(max_examples=4, deadline=None)
def test_rounds_of_arbitrary_accepted_paths(make_model: Make, family: str, prompt: int, seed: int) -> None:
    decoder, rng = tiny_decoder(make_model(family)), random.Random(seed)
    cache = decoder.new_cache(capacity=90, scratch=32)
    ids = some_ids(prompt, seed)
    read(decoder, cache, ids, chunk=32)
    for _ in range(5):
        tree = some_tree(rng, rng.randint(1, 12), rng.randrange(250))
        check_rows(decoder, ids, tree, run(decoder, cache, [group(0, tree)]))
        # some path to somewhere in the tree, or nothing at all
        path = path_to(tree, rng.randrange(len(tree)))
        if rng.random() < 0.2:
            cache.discard(0)
        else:
            cache.commit(0, path)
            ids += [tree.tokens[node] for node in path]
        assert cache.lengths[0] == len(ids)


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_in_one_forest_do_not_see_each_other(make_model: Make, family: str, count: int) -> None:
    decoder, rng = tiny_decoder(make_model(family)), random.Random(count)
    cache = decoder.new_cache(num_seqs=count, capacity=60, scratch=32)
    ids = [some_ids(rng.choice([0, 1, 7, 8, 9, 25]), seq) for seq in range(count)]
    for seq in range(count):
        read(decoder, cache, ids[seq], seq=seq)
    for _ in range(3):
        seqs = rng.sample(range(count), rng.randint(1, count))
        trees = [some_tree(rng, rng.randint(1, 8), rng.randrange(250)) for _ in seqs]
        logits = run(decoder, cache, [group(seq, tree) for seq, tree in zip(seqs, trees, strict=True)])
        for seq, tree, rows in zip(seqs, trees, logits.split([len(tree) for tree in trees]), strict=True):
            check_rows(decoder, ids[seq], tree, rows)
            path = path_to(tree, rng.randrange(len(tree)))
            cache.commit(seq, path)
            ids[seq] += [tree.tokens[node] for node in path]


@pytest.mark.parametrize("length", [3, 20])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_can_be_read_level_by_level(make_model: Make, family: str, length: int) -> None:
    """As a draft model does: rows join the scratch in several passes, each with a mask over all before it."""
    decoder = tiny_decoder(make_model(family))
    ids, tree = some_ids(length), DraftTree([9, 1, 2, 3, 4, 5, 6], [-1, 0, 0, 1, 1, 2, 3])
    cache = decoder.new_cache(capacity=40, scratch=32)
    read(decoder, cache, ids)
    parts, depth, mask = [], tree.depth, tree.mask()
    for rows in (slice(0, 1), slice(1, 3), slice(3, 6), slice(6, 7)):
        part = RowGroup(0, tree.tokens[rows], depth[rows], mask[rows, : rows.stop])
        parts.append(run(decoder, cache, [part]))
    check_rows(decoder, ids, tree, torch.cat(parts))
    cache.commit(0, [0, 1, 3, 6])
    ids += [9, 1, 3, 6]
    check_rows(decoder, ids, DraftTree.chain([8]), run(decoder, cache, [group(0, DraftTree.chain([8]))]))


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)], ids=str)
def test_attention_equals_a_loop_over_rows_and_heads(heads: int, kv_heads: int, softcap: float | None) -> None:
    n, m, width, scale = 5, 11, 8, 0.3
    q, k, v = torch.randn(n, heads, width), torch.randn(kv_heads, m, width), torch.randn(kv_heads, m, width)
    seen = torch.rand(n, m) < 0.5
    seen[:, 3] = True
    mask = torch.zeros(n, m).masked_fill(~seen, -torch.inf).repeat(heads // kv_heads, 1)
    out = tree_attention_ref(q, k, v, mask, scale, softcap).view(n, heads, width)
    for row in range(n):
        for head in range(heads):
            keys, values = k[head * kv_heads // heads][seen[row]], v[head * kv_heads // heads][seen[row]]
            scores = keys @ q[row, head] * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            torch.testing.assert_close(out[row, head], scores.softmax(0) @ values, atol=1e-5, rtol=0)
    everything = tree_attention_ref(q, k, v, None, scale, softcap)
    torch.testing.assert_close(everything, tree_attention_ref(q, k, v, torch.zeros_like(mask), scale, softcap))
