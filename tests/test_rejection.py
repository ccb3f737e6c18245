"""Rejection sampling is exact: every draft and every accept/reject branch is enumerated with its probability.

`Uniform` stands in for the random number, so the rule's own comparison is integrated over it: its code, no sampling.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pad_engine import SamplingParams
from pad_engine.record import Record
from pad_engine.rules import rejection
from pad_engine.rules.rule import Accepted
from pad_engine.state import State
from pad_engine.transforms import transform
from pad_engine.tree import DraftTree, make_forest

# C08
TARGET, DRAFT = (0.40, 0.25, 0.15, 0.10, 0.07, 0.03), (0.10, 0.30, 0.05, 0.35, 0.15, 0.05)
Model = Callable[[Sequence[int]], Tensor]
Tokens = tuple[int, ...]


def constant(p: Sequence[float]) -> Model:
    return lambda context: torch.tensor(p).log()


def table(vocab: int, seed: int, spread: float = 1.5) -> Model:
    """Another row of logits for each context."""
    rows: dict[Tokens, Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    whole = spread * torch.randn(200, vocab, generator=generator)

    def logits(context: Sequence[int]) -> Tensor:
        return rows.setdefault(tuple(context), whole[sum((i + 3) * (t + 1) for i, t in enumerate(context)) % 200])

    return logits


class Branches:
    """Runs a function once for each sequence of accepts and rejects, and knows how likely the present one is."""

    def __init__(self) -> None:
        self.choices: list[bool] = []
        self.used, self.weight = 0, 1.0

    def uniform(self, *counter: int) -> "Branches":
        return self

    def __mul__(self, chance: float) -> "Branches":
        self.chance = chance
        return self

    def __lt__(self, p: float) -> bool:
        """Whether u * chance < p for u uniform in [0, 1): both ways, with their shares."""
        share = float(p > 0) if self.chance == 0 else min(1.0, p / self.chance)
        if self.used == len(self.choices):
            self.choices.append(share > 0)
        accept = self.choices[self.used]
        self.used += 1
        self.weight *= share if accept else 1 - share
        return accept

    def all(self, run: Callable[[], Any]) -> Iterator[tuple[float, Any]]:
        while True:
            self.used, self.weight = 0, 1.0
            out = run()
            if self.weight > 0:
                yield self.weight, out
            while self.choices and not self.choices[-1]:
                self.choices.pop()
            if not self.choices:
                return
            self.choices[-1] = False


def q_row(draft: Model, state: State, path: Sequence[int]) -> Tensor:
    """As drafters/draft_model.py draws."""
    logits = transform(draft([*state.ids, *path])[None], state, [path])
    return (logits / state.params.temperature).softmax(-1)[0]


def drafts(shape: Sequence[int], draw: Callable[[Sequence[int]], Tensor]) -> Iterator[tuple[float, DraftTree]]:
    """Every tree of a shape (the parents), its siblings drawn in order without replacement, with its probability."""

    def grow(tokens: list[int], q_rows: list[Tensor], weight: float) -> Iterator[tuple[float, DraftTree]]:
        node = len(tokens)
        if node == len(shape):
            yield weight, DraftTree(tokens, list(shape), q_rows=torch.stack(q_rows))
            return
        left = q_rows[shape[node]].double().clone()
        left /= left.sum()
        for sibling in range(1, node):
            if shape[sibling] == shape[node]:
                left[tokens[sibling]] = 0.0
        if not left.sum():
            # nothing else can be drawn: a drafter would stop here; a token without weight does no harm
            left = torch.ones_like(left)
        left /= left.sum()
        for token in left.nonzero().flatten().tolist():
            tree = DraftTree([*tokens, token], list(shape[: node + 1]))
            yield from grow(tree.tokens, [*q_rows, draw(tree.paths[node])], weight * float(left[token]))

    yield from grow([0], [draw([])], 1.0)


def law(
    monkeypatch: pytest.MonkeyPatch,
    state: State,
    target: Model,
    proposals: Iterator[tuple[float, DraftTree]],
    length: int,
) -> dict[Tokens, float]:
    """Probability of each sequence of `length` tokens after one round and, where it emitted fewer, plain sampling."""
    branches, out = Branches(), defaultdict[Tokens, float](float)
    monkeypatch.setattr(rejection, "uniform", branches.uniform)
    monkeypatch.setattr(rejection, "draw", lambda p, state, position: p)

    def finish(tokens: Tokens, weight: float) -> None:
        if len(tokens) == length:
            out[tokens] += weight
            return
        for token, p in enumerate(rejection.target_probs(processed(target, state, tokens), state).tolist()):
            if p > 0:
                finish((*tokens, token), weight * p)

    for weight, tree in proposals:
        rows = torch.stack([processed(target, state, path) for path in tree.paths])
        record = Record(make_forest([tree], [0]), rows, rows, torch.zeros(len(tree), dtype=torch.int32), {})
        for share, walked in branches.all(lambda: rejection.walk_path(record, 0, state, tree)):  # noqa: B023
            kept = tuple(tree.tokens[node] for node in walked.path[1:])
            for token, p in enumerate(walked.end_token.tolist()):
                if p > 0:
                    finish((*kept, token)[:length], weight * share * p)
    assert sum(out.values()) == pytest.approx(1, abs=1e-6)
    return out


def processed(target: Model, state: State, path: Sequence[int]) -> Tensor:
    return transform(target([*state.ids, *path])[None], state, [path])[0]


def plain(state: State, target: Model, length: int) -> dict[Tokens, float]:
    out = {(): 1.0}
    for _ in range(length):
        rows = {path: rejection.target_probs(processed(target, state, path), state).tolist() for path in out}
        out = {(*path, t): w * p for path, w in out.items() for t, p in enumerate(rows[path]) if p > 0}
    return out


def variation(a: dict[Tokens, float], b: dict[Tokens, float]) -> float:
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2


def state_of(**fields: Any) -> State:
    return State([3, 0], 1, 1000, SamplingParams(temperature=fields.pop("temperature", 1.0), **fields), 0, frozenset())


CHAINS = {f"chain-{k}": list(range(-1, k)) for k in (1, 2, 3)}
TREES = {"two": [-1, 0, 0], "three": [-1, 0, 0, 0], "two-then-two": [-1, 0, 0, 1, 1], "forked-late": [-1, 0, 1, 1, 0]}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.3},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "all": {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "frequency_penalty": 0.9, "repetition_penalty": 1.4},
}
MODELS = {
    "c08": (constant(TARGET), constant(DRAFT)),
    "tables": (table(5, 1), table(5, 2)),
}


@pytest.mark.parametrize("shape", (CHAINS | TREES).values(), ids=(CHAINS | TREES).keys())
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("models", ["c08", "tables"])
def test_the_law_is_the_targets(monkeypatch: pytest.MonkeyPatch, models: str, setting: str, shape: list[int]) -> None:
    (target, draft), state = MODELS[models], state_of(**SETTINGS[setting])
    length = 1 + max(DraftTree([0] * len(shape), shape).depth)
    proposals = drafts(shape, lambda path: q_row(draft, state, path))
    got, expected = law(monkeypatch, state, target, proposals, length), plain(state, target, length)
    assert variation(got, expected) < 1e-6
    # what the filters cut off never appears, however unlikely
    assert got.keys() <= expected.keys()


@pytest.mark.parametrize("setting", ["top_k", "top_p", "cold", "hot"])
def test_a_q_that_was_not_drawn_from_is_caught(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """C08: the same enumeration refuses a rule that weighs the raw q, or lets the raw p into the residual."""
    (target, draft), state, shape = MODELS["c08"], state_of(**SETTINGS[setting]), CHAINS["chain-2"]
    right = lambda: drafts(shape, lambda path: q_row(draft, state, path))  # noqa: E731
    raw = torch.tensor(DRAFT).expand(len(shape), -1)
    wrong = ((w, DraftTree(t.tokens, t.parents, q_rows=raw)) for w, t in right())
    assert variation(law(monkeypatch, state, target, wrong, 3), plain(state, target, 3)) > 1e-3

    def residual(p: Tensor, token: int, q: Tensor) -> Tensor:
        left = (torch.tensor(TARGET).double() - q).clamp(min=1e-9)
        return left / left.sum()

    monkeypatch.setattr(rejection, "residual", residual)
    assert variation(law(monkeypatch, state, target, right(), 3), plain(state, target, 3)) > 1e-3


@pytest.mark.parametrize("shape", [CHAINS["chain-3"], TREES["two-then-two"]], ids=["chain", "tree"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_drafts_that_nobody_drew(monkeypatch: pytest.MonkeyPatch, setting: str, shape: list[int]) -> None:
    """n-gram and greedy drafters: any fixed tree, twins and tokens outside the filters among them; q is one-hot."""
    target, state = MODELS["tables"][0], state_of(**SETTINGS[setting])
    length = 1 + max(DraftTree([0] * len(shape), shape).depth)
    expected = plain(state, target, length)
    for tokens in itertools.product(*([0, 2, 4],) * (len(shape) - 1)):
        got = law(monkeypatch, state, target, iter([(1.0, DraftTree([0, *tokens], shape))]), length)
        assert variation(got, expected) < 1e-6


@pytest.mark.parametrize("draft_vocab", [3, 4, 8])
@pytest.mark.parametrize("shape", [CHAINS["chain-2"], TREES["three"]], ids=["chain", "tree"])
@pytest.mark.parametrize("setting", ["plain", "top_k", "all"])
def test_vocabularies_of_other_lengths(
    monkeypatch: pytest.MonkeyPatch, setting: str, shape: list[int], draft_vocab: int
) -> None:
    """C16: a missing q is 0, and an id that the target does not have is impossible."""
    target, draft, state = table(5, 1), table(draft_vocab, 2), state_of(**SETTINGS[setting])
    length = 1 + max(DraftTree([0] * len(shape), shape).depth)
    reads = lambda context: target([min(token, 4) for token in context])  # noqa: E731
    got = law(monkeypatch, state, reads, drafts(shape, lambda path: q_row(draft, state, path)), length)
    assert variation(got, plain(state, reads, length)) < 1e-6
    assert all(token < 5 for tokens in got for token in tokens)
    beyond = law(monkeypatch, state, reads, iter([(1.0, DraftTree([0, 7, 6, 1], [-1, 0, 0, 0]))]), 2)
    assert variation(beyond, plain(state, reads, 2)) < 1e-6


def test_temperature_0_takes_the_first_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One-hot rows; a draft of anything else is refused with certainty."""
    state, target = state_of(temperature=0.0), constant((0.1, 0.3, 0.3, 0.3))
    for tokens in itertools.product(range(4), repeat=2):
        assert law(monkeypatch, state, target, iter([(1.0, DraftTree.chain([0, *tokens]))]), 3) == {(1, 1, 1): 1.0}


def walk(p: Sequence[float], tree: DraftTree) -> tuple[list[int], int]:
    rows = torch.tensor(p).log().expand(len(tree), -1)
    record = Record(make_forest([tree], [0]), rows, rows, torch.zeros(len(tree), dtype=torch.int32), {})
    accepted = rejection.walk_path(record, 0, state_of(), tree)
    return accepted.path, accepted.end_token


@pytest.mark.parametrize("u", [0.0, 2.0**-32, 1 - 2.0**-32])
@pytest.mark.parametrize("q", [None, (0.5, 0.5, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0), (0.25, 0.25, 0.25, 0.25)])
def test_impossible_tokens_at_extreme_draws(
    monkeypatch: pytest.MonkeyPatch, u: float, q: Sequence[float] | None
) -> None:
    monkeypatch.setattr(rejection, "uniform", lambda *counter: u)
    p = (0.0, 0.6, 0.4, 0.0)
    for tokens in itertools.product(range(5), repeat=3):
        q_rows = None if q is None else torch.tensor(q).expand(4, -1)
        for parents in ([-1, 0, 1, 2], [-1, 0, 0, 0], [-1, 0, 0, 1]):
            tree = DraftTree([1, *tokens], parents, q_rows=q_rows)
            path, end = walk(p, tree)
            assert {*(tree.tokens[node] for node in path[1:]), end} <= {1, 2}


@pytest.mark.parametrize("p", [(0.25, 0.25, 0.5), (1 / 3, 1 / 3, 1 / 3), (1.0, 0.0, 0.0), (0.1, 0.2, 0.7)])
def test_equal_p_and_q_are_always_accepted(monkeypatch: pytest.MonkeyPatch, p: Sequence[float]) -> None:
    """A rejection would leave an empty residual; just below 1 the rounding of both must not make one."""
    monkeypatch.setattr(rejection, "uniform", lambda *counter: 1 - 2.0**-32)
    state = state_of()
    q = rejection.target_probs(torch.tensor(p).log(), state)
    for token in (t for t in range(3) if p[t] > 0):
        path, end = walk(p, DraftTree([0, token, token], [-1, 0, 1], q_rows=q.expand(3, -1)))
        assert path == [0, 1, 2]
        assert p[end] > 0


def test_empty_residuals_and_q_rows_that_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is drawn comes from the target's support, and no division by zero makes a NaN of it."""
    monkeypatch.setattr(rejection, "uniform", lambda *counter: 1 - 2.0**-32)
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    assert rejection.residual(p, 0, p.clone()).tolist() == p.tolist()
    one_hot = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    assert rejection.residual(one_hot, 1, None).tolist() == one_hot.tolist()
    for q in ((1.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 1.0), (math.nan,) * 3):
        tree = DraftTree([0, 2, 0, 1, 1], [-1, 0, 0, 0, 0], q_rows=torch.tensor(q).expand(5, -1))
        path, end = walk((0.7, 0.3, 0.0), tree)
        assert {*(tree.tokens[node] for node in path[1:]), end} <= {0, 1}


def test_a_row_that_is_not_finite_ends_the_walk_only_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "uniform", lambda *counter: 0.5)
    tree = DraftTree([0, 1, 2], [-1, 0, 0])
    for bad, expected in (
        ([-1, 0, 0], Accepted([0], -1)), ([0, -1, 0], Accepted([0, 1], -1)), ([0, 0, -1], Accepted([0, 1], 1))
    ):  # fmt: skip
        rows = torch.tensor([0.0, 1.0, 0.0]).log().expand(3, -1)
        record = Record(make_forest([tree], [0]), rows, rows, torch.tensor(bad, dtype=torch.int32), {})
        assert rejection.walk_path(record, 0, state_of(), tree) == expected
