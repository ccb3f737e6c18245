"""Draft trees, their masks and forests, and the walk from judgements to the accepted path."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pad_engine.kernels.accept_path import accept_bits_ref, accept_path_ref
from pad_engine.tree import DraftTree, make_forest, mask_bits, to_int64


@st.composite
def parent_lists(draw: st.DrawFn, max_size: int = 130) -> list[int]:
    size = draw(st.integers(1, max_size))
    # near parents make deep trees, far ones bushy trees
    reach = draw(st.integers(1, max_size))
    return [-1] + [draw(st.integers(max(0, node - reach), node - 1)) for node in range(1, size)]


def ancestors(parents: list[int], node: int) -> set[int]:
    """The node and all above it, by pointers."""
    found = set()
    while node >= 0:
        found.add(node)
        node = parents[node]
    return found


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([], []),
        ([1], [0]),
        ([1, 2], [-1]),
        ([1, 2], [-1, 1]),
        ([1, 2], [-1, -1]),
        ([1, 2, 3], [-1, 2, 0]),
        ([1, 2], [-1, 5]),
    ],
    ids=str,
)
def test_malformed_trees_are_refused(tokens: list[int], parents: list[int]) -> None:
    with pytest.raises(ValueError, match="got"):
        DraftTree(tokens, parents)


def test_chain() -> None:
    tree = DraftTree.chain([7, 8, 9], evidence=3)
    assert (tree.tokens, tree.parents, tree.depth, tree.evidence) == ([7, 8, 9], [-1, 0, 1], [0, 1, 2], 3)
    assert tree.mask().tolist() == [[True, False, False], [True, True, False], [True, True, True]]


@given(parent_lists())
@settings(max_examples=60, deadline=None)
def test_mask_mask_bits_and_depth_say_the_same_as_pointers(parents: list[int]) -> None:
    tree = DraftTree(list(range(len(parents))), parents)
    mask, words = tree.mask(), mask_bits(parents)
    assert words.shape == (len(parents), -(-len(parents) // 64))
    for node in range(len(parents)):
        expected = ancestors(parents, node)
        assert set(mask[node].nonzero().flatten().tolist()) == expected
        bits = sum((int(word) & 2**64 - 1) << 64 * i for i, word in enumerate(words[node].tolist()))
        assert {bit for bit in range(64 * words.shape[1]) if bits >> bit & 1} == expected
        assert tree.depth[node] == len(expected) - 1


@pytest.mark.parametrize("bits", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_to_int64_keeps_the_bits(bits: int) -> None:
    assert to_int64(bits) % 2**64 == bits
    assert -(2**63) <= to_int64(bits) < 2**63


@given(parent_lists(40), st.integers(0, 12), st.integers(1, 45))
@settings(max_examples=80, deadline=None)
def test_clip_keeps_the_first_nodes_that_are_shallow_enough(parents: list[int], max_depth: int, max_nodes: int) -> None:
    tree = DraftTree([100 + node for node in range(len(parents))], parents, evidence=2)
    clipped = tree.clip(max_depth, max_nodes)
    shallow = [node for node in range(len(parents)) if tree.depth[node] <= max_depth]
    assert [token - 100 for token in clipped.tokens] == shallow[:max_nodes]
    assert clipped.evidence == 2
    # the paths are those of the whole tree
    for node, token in enumerate(clipped.tokens):
        path = {clipped.tokens[i] - 100 for i in ancestors(clipped.parents, node)}
        assert path == ancestors(parents, token - 100)


@given(st.lists(parent_lists(50), min_size=1, max_size=8), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_a_forest_is_its_trees_side_by_side(many: list[list[int]], random: object) -> None:
    trees = [DraftTree([1000 * t + node for node in range(len(parents))], parents) for t, parents in enumerate(many)]
    seqs = list(range(len(trees)))
    random.shuffle(seqs)  # type: ignore[attr-defined]
    forest = make_forest(trees, seqs)
    row = 0
    for start, seq, tree in zip(forest.starts, seqs, trees, strict=True):
        assert start == row
        rows = slice(start, start + len(tree))
        assert forest.token[rows].tolist() == tree.tokens
        assert forest.seq[rows].tolist() == [seq] * len(tree)
        assert forest.depth[rows].tolist() == tree.depth
        assert forest.parent[rows].tolist() == [start + p if p >= 0 else -1 for p in tree.parents]
        row += len(tree)
    assert torch.equal(forest.tree_mask_bits, mask_bits(forest.parent.tolist()))


@pytest.mark.parametrize("seqs", [[0], [0, 0], [0, 1, 2]], ids=str)
def test_trees_need_a_sequence_each(seqs: list[int]) -> None:
    with pytest.raises(ValueError, match="sequence of its own"):
        make_forest([DraftTree.chain([1]), DraftTree.chain([2])], seqs)


def walk(tree: DraftTree, accept: list[bool], score: list[float]) -> list[int]:
    """From the root to the best accepted child, as long as there is one."""
    path = [0]
    while True:
        children = [n for n in range(len(tree)) if tree.parents[n] == path[-1] and accept[n]]
        if not children:
            return path
        path.append(min(children, key=lambda n: (-score[n], n)))


@given(st.lists(parent_lists(100), min_size=1, max_size=4), st.data())
@settings(max_examples=80, deadline=None)
def test_accepted_paths_equal_a_pointer_walk(many: list[list[int]], data: st.DataObject) -> None:
    trees = [DraftTree([0] * len(parents), parents) for parents in many]
    count = sum(map(len, trees))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    share = data.draw(st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]))
    accept = torch.rand(count, generator=random) < share
    # few distinct scores, so that there are ties among siblings; roots may be judged badly and are kept all the same
    score = torch.randint(-2, 3, (count,), generator=random).float()
    seqs = data.draw(st.permutations(range(len(trees))))
    forest = make_forest(trees, seqs)
    kept = accept_bits_ref(accept, score, forest.parent)
    paths = accept_path_ref(kept, forest.depth, forest.seq, forest.tree_mask_bits)
    assert kept[forest.parent < 0].all()
    expected = []
    for start, tree in zip(forest.starts, trees, strict=True):
        rows = slice(start, start + len(tree))
        expected.append([start + node for node in walk(tree, accept[rows].tolist(), score[rows].tolist())])
    assert paths == expected


def test_an_accepted_node_under_a_rejected_one_is_not_on_the_path() -> None:
    forest = make_forest([DraftTree([0] * 4, [-1, 0, 1, 2])], [0])
    kept = accept_bits_ref(torch.tensor([False, True, False, True]), torch.zeros(4), forest.parent)
    assert accept_path_ref(kept, forest.depth, forest.seq, forest.tree_mask_bits) == [[0, 1]]


def test_the_best_sibling_wins_even_if_another_leads_deeper() -> None:
    forest = make_forest([DraftTree([0] * 4, [-1, 0, 0, 1])], [0])
    accept, score = torch.ones(4, dtype=torch.bool), torch.tensor([0.0, 1.0, 2.0, 1.0])
    kept = accept_bits_ref(accept, score, forest.parent)
    assert accept_path_ref(kept, forest.depth, forest.seq, forest.tree_mask_bits) == [[0, 2]]
