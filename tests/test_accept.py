"""The accepted path: libpad, the torch reference and a walk from child to child agree on every forest; the borders."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Make, tiny_engine
from torch import Tensor

from pad_engine import native, native_accept
from pad_engine.accept import accept_paths, judged_paths
from pad_engine.config import SamplingParams
from pad_engine.kernels.accept_path import accept_bits_ref
from pad_engine.kv_cache import KVCache
from pad_engine.record import Record
from pad_engine.rules.greedy import GREEDY
from pad_engine.rules.rule import AcceptanceRule
from pad_engine.tree import DraftTree, Forest, column, make_forest, to_int64

needs_libpad = pytest.mark.skipif(not native.available(), reason=native.missing_reason())
SCORES = (math.nan, -math.inf, -1.0, 0.0, 0.5, 0.5, 2.0, math.inf)


@dataclass
class Case:
    forest: Forest
    row_pick: list[int]
    accept: list[bool]
    score: list[float]

    @property
    def record(self) -> Record:
        return Record(self.forest, *[torch.zeros(len(self.row_pick), 3)] * 2, column(self.row_pick), {})

    @property
    def judged(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.accept), torch.tensor(self.score)


@st.composite
def trees(draw: st.DrawFn, max_nodes: int) -> DraftTree:
    """Chains, stars and between; few tokens, so that siblings are often twins."""
    count = draw(st.integers(1, max_nodes))
    reach = draw(st.sampled_from((1, 2, 5, max_nodes)))
    from_root = draw(st.booleans())
    parents = [-1]
    for node in range(1, count):
        low, high = max(0, node - reach), node - 1
        parents.append(draw(st.integers(0, min(reach, node) - 1)) if from_root else draw(st.integers(low, high)))
    return DraftTree(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)), parents)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_trees = draw(st.integers(1, 4))
    forest = make_forest(
        [draw(trees(130 // num_trees)) for _ in range(num_trees)],
        draw(st.permutations(range(num_trees))),
    )
    n = len(forest.token)
    mostly = st.sampled_from((True, True, True, False)) if draw(st.booleans()) else st.booleans()
    return Case(
        forest,
        draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)),
        draw(st.lists(mostly, min_size=n, max_size=n)),
        draw(st.lists(st.sampled_from(SCORES), min_size=n, max_size=n)),
    )


def best_of(children: list[int], score: list[float]) -> int:
    """The best score, NaN below all others, then the lowest row."""
    return max(
        children, key=lambda row: (not math.isnan(score[row]), 0 if math.isnan(score[row]) else score[row], -row)
    )


def walk(forest: Forest, accept: list[bool], score: list[float]) -> list[list[int]]:
    """From each root to its best accepted child, and on."""
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(forest.parent.tolist()):
        if parent >= 0 and accept[row]:
            children.setdefault(parent, []).append(row)
    paths = []
    for root in forest.starts:
        path = [root]
        while path[-1] in children:
            path.append(best_of(children[path[-1]], score))
        paths.append(path)
    return paths


def match_walk(case: Case) -> list[list[int]]:
    token, parent = case.forest.token.tolist(), case.forest.parent.tolist()
    matches = [p >= 0 and token[row] == case.row_pick[p] for row, p in enumerate(parent)]
    return walk(case.forest, matches, [0.0] * len(token))


def bits_of(kept: Tensor) -> list[int]:
    """Bool `[N]` as signed words."""
    words = [kept[start : start + 64].tolist() for start in range(0, len(kept), 64)]
    return [to_int64(sum(bit << i for i, bit in enumerate(word))) for word in words]


@pytest.mark.parametrize("libpad", [pytest.param(True, marks=needs_libpad), False])
@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_paths_equal_a_walk(libpad: bool, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not libpad:
            patch.setattr(native, "available", lambda: False)
        assert judged_paths(case.forest, *case.judged) == walk(case.forest, case.accept, case.score)
        rule = AcceptanceRule("drawn", lambda record: case.judged, end="argmax")
        for paths, found in (
            (walk(case.forest, case.accept, case.score), accept_paths(case.record, rule)),
            (match_walk(case), accept_paths(case.record, GREEDY)),
        ):
            assert found == (paths, [case.row_pick[path[-1]] for path in paths])


@needs_libpad
@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_single_steps_equal_torch(case: Case) -> None:
    f, pick = case.forest, column(case.row_pick)
    judged, score = case.judged
    match = native_accept.accept_match(f.token, f.parent, pick)
    assert torch.equal(match, (f.parent < 0) | (f.token == case.record.judge_pick))
    # what NaN means to the torch form is left to judged_paths
    score = score.nan_to_num(nan=-2.0, posinf=math.inf, neginf=-math.inf)
    for accept in (judged, match):
        kept = native_accept.accept_bits(accept, score, f.parent)
        assert kept.tolist() == bits_of(accept_bits_ref(accept, score, f.parent))
        assert torch.equal(kept, native_accept.accept_bits(accept.to(torch.uint8) * 7, score, f.parent))
    kept = native_accept.accept_bits(match, torch.zeros(len(pick)), f.parent)
    paths = native_accept.accept_path(f.tree_mask_bits, kept, f.depth, f.seq, len(f.starts))
    args = (f.token, f.parent, pick, f.tree_mask_bits, f.depth, f.seq, len(f.starts))
    assert native_accept.match_path(*args) == (paths, [case.row_pick[path[-1]] for path in paths])


def test_any_number_beats_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    forest = make_forest([DraftTree([0, 1, 1, 1], [-1, 0, 0, 0])], [0])
    judged = torch.ones(4, dtype=torch.bool)
    nan, inf = math.nan, math.inf
    expected = {(nan, -inf, nan): 2, (nan, nan, nan): 1, (nan, -3.0, -2.0): 3, (inf, nan, inf): 1}
    for disable in (False, True):
        if disable:
            monkeypatch.setattr(native, "available", lambda: False)
        for scores, best in expected.items():
            assert judged_paths(forest, judged, torch.tensor((0.0, *scores))) == [[0, best]]


@needs_libpad
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_commit_list_is_that_of_the_cache(data: st.DataObject) -> None:
    scratch, window = data.draw(st.integers(1, 12)), data.draw(st.none() | st.integers(1, 10))
    capacity, length = 24, data.draw(st.integers(0, 12))
    rows = data.draw(st.lists(st.integers(0, scratch - 1), unique=True, max_size=12).map(sorted))
    cache = KVCache(
        [window], 1, 1, 1, capacity=capacity, scratch=scratch, dtype=torch.float32, device=torch.device("cpu")
    )
    buffer = cache.buffers[window]
    buffer.copy_(torch.arange(buffer.numel()).reshape(buffer.shape))
    expected = buffer.clone()
    ring = capacity if window is None else window
    source, target = native_accept.commit_list(rows, length, scratch, ring)
    assert len(source) == len(target) == min(len(rows), ring)
    for s, t in zip(source, target, strict=True):
        expected[..., t, :] = buffer[..., s, :]
    cache.lengths[0], cache.drafted[0] = length, list(range(scratch))
    cache.commit(0, rows)
    assert cache.tokens[0] == rows
    assert torch.equal(buffer, expected)


def arguments(**changed: object) -> dict[str, object]:
    f = make_forest([DraftTree.chain([1, 2, 3])], [0])
    named = dict(token=f.token, parent=f.parent, row_pick=column([2, 3, 4]), tree_mask_bits=f.tree_mask_bits)
    return named | dict(depth=f.depth, seq=f.seq, num_roots=1) | changed


@needs_libpad
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token", torch.zeros(3, dtype=torch.int64)),
        ("parent", torch.zeros(4, dtype=torch.int32)),
        ("row_pick", torch.zeros(3, 1, dtype=torch.int32)),
        ("row_pick", torch.zeros(6, dtype=torch.int32)[::2]),
        ("tree_mask_bits", torch.zeros(3, dtype=torch.int64)),
        ("tree_mask_bits", torch.zeros(3, 2, dtype=torch.int64)),
        ("depth", torch.zeros(3)),
        ("seq", torch.zeros(3, dtype=torch.int32, device="meta")),
        ("num_roots", -1),
        ("num_roots", 4),
    ],
)
def test_other_arguments_are_named(name: str, value: object) -> None:
    assert native_accept.match_path(**arguments()) == ([[0, 1, 2]], [4])
    with pytest.raises(ValueError, match=f"^{name} must be"):
        native_accept.match_path(**arguments(**{name: value}))


@needs_libpad
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("parent", column([-1, 1, 0]), "parent of row 1 must be an earlier row, or -1, got 1"),
        ("parent", column([-2, 0, 0]), "parent of row 0"),
        ("num_roots", 2, "num_roots is 2, but 1 rows have depth 0"),
        ("depth", column([0, 1, 1]), "row 2 fits no path"),
        ("seq", column([0, 0, 1]), "row 2 fits no path"),
    ],
)
def test_library_refuses_what_is_no_forest(name: str, value: object, message: str) -> None:
    with pytest.raises(native.NativeError, match=message) as caught:
        native_accept.match_path(**arguments(**{name: value}))
    assert caught.value.status == 1


@needs_libpad
def test_borders_of_the_single_steps() -> None:
    accept, score, parent = torch.ones(2, dtype=torch.bool), torch.zeros(2), column([-1, 0])
    assert native_accept.accept_bits(accept, score, parent).tolist() == [3]
    for bad in ((accept.int(), score, parent), (accept, score.double(), parent), (accept, score[:1], parent)):
        with pytest.raises(ValueError, match=r"^(accept|score) must be \[2\] torch\."):
            native_accept.accept_bits(*bad)
    for rows, length, scratch, ring in (([0], -1, 4, 4), ([0], 0, 2**31, 4), ([4], 0, 4, 4), ([-1], 0, 4, 4)):
        with pytest.raises(ValueError, match="must be in"):
            native_accept.commit_list(rows, length, scratch, ring)
    with pytest.raises(native.NativeError, match="ring must be at least 1"):
        native_accept.commit_list([0], 0, 4, 0)
    assert native_accept.commit_list([], 5, 4, 4) == ([], [])


def top_two(record: Record) -> tuple[Tensor, Tensor]:
    """A relaxed rule: the target's two most likely tokens, the likelier first."""
    return (record.token[:, None] == record.judge_stats.top_id[:, :2]).any(1), record.judge_p


@needs_libpad
@pytest.mark.parametrize("rule", ["auto", AcceptanceRule("top-two", top_two, end="argmax")])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_engine_gives_the_same_tokens_without_libpad(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, rule: str | AcceptanceRule, temperature: float
) -> None:
    drafter = dict(drafter="draft-model:depth=4", draft_model=make_model(noise=0.1), trees="best-first")
    engine = tiny_engine(make_model(), budget=12, rule=rule, **drafter)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, ignore_eos=True)
    first = engine.generate([5, 6, 7, 8], params)
    monkeypatch.setattr(native, "available", lambda: False)
    second = engine.generate([5, 6, 7, 8], params)
    assert first.token_ids == second.token_ids
    assert first.stats.accepted_tokens == second.stats.accepted_tokens > 0
