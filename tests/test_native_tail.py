"""libpad's relaxed acceptance and rejection against torch formulas on random records: every rule, ties, infinities."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from random_forests import INF, VOCAB, parents_of, random_forest, random_judged, random_logits, random_rule
from torch import Tensor

from pad_engine import SamplingParams, native
from pad_engine import native_tail as tail
from pad_engine.kernels.row_stats import row_stats_ref
from pad_engine.native_tail import Judged, Kind, Rule, make_rule
from pad_engine.record import Record
from pad_engine.rules.rejection import walk_path
from pad_engine.state import State
from pad_engine.tree import DraftTree, Forest, make_forest

pytestmark = pytest.mark.skipif(not native.available(), reason=native.missing_reason())

TRIALS = 400


# the overrides of the papers: from the node's token, what its row says, and the thresholds, to bool [N]
Formula = Callable[[Tensor, Judged, Tensor], Tensor]


def probability(logit: Tensor, lse: Tensor) -> Tensor:
    """Rounded once, as pad.h says."""
    return (logit - lse).double().exp().float()


def second(token: Tensor, j: Judged) -> Tensor:
    return token == j.top_id[:, 1]


def top_entropy(j: Judged) -> Tensor:
    log_p = j.top_logit - j.lse[:, None]
    terms = torch.where(
        probability(j.top_logit, j.lse[:, None]) == 0, 0.0, -probability(j.top_logit, j.lse[:, None]) * log_p
    )
    return (terms[:, 0] + terms[:, 1]) + terms[:, 2]


FORMULAS: dict[Kind, Formula] = {
    Kind.BASE: lambda token, j, t: torch.zeros(len(token), dtype=torch.bool),
    Kind.MARGIN_PAPER: lambda token, j, t: (
        second(token, j) & (j.top_logit[:, 0] > 0) & (j.top_logit[:, 1] > t[0] * j.top_logit[:, 0])
    ),
    Kind.MARGIN_RATIO: lambda token, j, t: second(token, j) & (j.top_logit[:, 1] - j.top_logit[:, 0] > t[0]),
    Kind.MARGIN_GAP: lambda token, j, t: (
        second(token, j) & (probability(j.top_logit[:, 0], j.lse) - probability(j.top_logit[:, 1], j.lse) < t[0])
    ),
    Kind.PIVOT: lambda token, j, t: (t[0] > 0) & (j.pivot_prob <= t[0]),
    Kind.TYPICAL: lambda token, j, t: (j.token_logit - j.lse > t[0]) | (j.token_logit - j.lse + j.entropy > t[1]),
    Kind.TOPK: lambda token, j, t: (token[:, None] == j.top_id[:, : int(t[0])]).any(1),
    Kind.FLY_PAPER: lambda token, j, t: j.entropy >= t[0],
    Kind.FLY_RELEASED: lambda token, j, t: top_entropy(j) >= t[0],
}


def accept_nodes(rule: Rule, forest: Forest, judged: Judged, pick: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """accept and overridden bool `[N]`, score `[N]`."""
    parent_pick = pick[forest.parent.long().clamp(min=0)]
    base = (forest.token == parent_pick) & (parent_pick >= 0)
    log_p = judged.token_logit - judged.lse
    floor = log_p >= rule.log_floor
    override = FORMULAS[Kind(rule.kind)](forest.token, judged, torch.tensor(list(rule.threshold)))
    accept = (base | override) & floor if rule.outer_floor else base | (override & floor)
    accept &= (parent_pick >= 0) & (forest.parent >= 0)
    p = 1 - judged.pivot_prob if rule.kind == Kind.PIVOT else probability(judged.token_logit, judged.lse)
    return accept, accept & ~base, torch.where(base, 2.0, p)


def walk(forest: Forest, root: int, accept: list[bool], score: list[float]) -> list[int]:
    """From child to child: the best score, then the lowest row; a NaN below all."""
    path = [root]
    while True:
        children = [i for i, p in enumerate(forest.parent.tolist()) if p == path[-1] and accept[i]]
        if not children:
            return path
        path.append(
            max(children, key=lambda i: (not math.isnan(score[i]), 0 if math.isnan(score[i]) else score[i], -i))
        )


def descendants(parents: list[int], row: int) -> list[int]:
    found = [row]
    for i, p in enumerate(parents):
        if p in found:
            found.append(i)
    return found


def cut(rule: Rule, forest: Forest, path: list[int], overridden: list[bool], history: list[bool]) -> list[int]:
    """history: whether the tokens emitted before were overrides, the newest last."""
    depth, parents, flags = forest.depth.tolist(), forest.parent.tolist(), [overridden[row] for row in path[1:]]
    for i, flag in enumerate(flags):
        if not flag:
            continue
        following = flags[i + 1 : i + 1 + rule.lookahead]
        if len(following) < rule.lookahead or any(following):
            return path[: i + 1]
        deepest = max(depth[row] for row in descendants(parents, path[i + 1]))
        if rule.reach and i + 1 + rule.reach > deepest:
            return path[: i + 1]
        if rule.max_overrides and sum((history + flags[: i + 1])[-rule.window :]) > rule.max_overrides:
            return path[: i + 1]
    return path


@pytest.mark.parametrize("kind", Kind)
def test_paths_are_those_of_the_formulas(kind: Kind) -> None:
    rng = random.Random(int(kind))
    relaxed = 0
    for _ in range(TRIALS):
        forest, _ = random_forest(rng)
        judged, pick = random_judged(forest, rng)
        rule = random_rule(kind, rng)
        past = [[rng.random() < 0.2 for _ in range(64)] for _ in forest.starts]
        accept, overridden, score = accept_nodes(rule, forest, judged, pick)
        walks = [walk(forest, root, accept.tolist(), score.tolist()) for root in forest.starts]
        flags = overridden.tolist()
        expected = [cut(rule, forest, path, flags, tokens) for path, tokens in zip(walks, past, strict=True)]
        history = [sum(bit << b for b, bit in enumerate(reversed(tokens))) for tokens in past]
        got = tail.relaxed_path(
            rule, forest.token, forest.parent, pick, forest.tree_mask_bits, forest.depth, forest.seq, judged,
            len(forest.starts), history,
        )  # fmt: skip
        assert got.paths == expected
        assert got.ends == [int(pick[path[-1]]) for path in expected]
        on_path = {row for path in expected for row in path}
        assert got.overridden == [flag and row in on_path for row, flag in enumerate(flags)]
        assert all(got.kept >> row & 1 for path in walks for row in path)
        relaxed += sum(got.overridden)
    assert (relaxed > 0) == (kind != Kind.BASE)


@pytest.mark.parametrize("rule", [
    make_rule(Kind.PIVOT, 0.0), make_rule(Kind.MARGIN_PAPER, 1.0), make_rule(Kind.MARGIN_RATIO, 0.0),
    make_rule(Kind.MARGIN_GAP, 0.0), make_rule(Kind.FLY_PAPER, 0.0, lookahead=64),
    make_rule(Kind.FLY_RELEASED, 0.0, lookahead=63, reach=64),
])  # fmt: skip
def test_rules_that_are_switched_off_are_the_base(rule: Rule) -> None:
    rng = random.Random(7)
    for _ in range(TRIALS):
        n = rng.randint(1, 30)
        shape = rng.choice(["chain", "star", "tree"])
        forest = make_forest([DraftTree([rng.randrange(VOCAB) for _ in range(n)], parents_of(shape, n, rng))], [0])
        judged, pick = random_judged(forest, rng)
        columns = (forest.token, forest.parent, pick, forest.tree_mask_bits, forest.depth, forest.seq, judged, 1)
        base = make_rule(Kind.BASE)
        assert tail.relaxed_path(rule, *columns)[:3] == tail.relaxed_path(base, *columns)[:3]


@pytest.mark.parametrize("vocab", [3, 4, 97, 1000])
def test_row_stats_are_those_of_torch(vocab: int) -> None:
    for scale in (0.1, 1.0, 10.0, 300.0):
        logits = torch.randn(40, vocab) * scale
        logits[:10].round_()
        logits[10:20][torch.rand(10, vocab) < 0.5] = -INF
        logits[:, 1] = 0.5
        got, expected = tail.row_stats(logits), row_stats_ref(logits.double().float())
        assert torch.equal(got.top_id, expected.top_id)
        assert torch.equal(got.top_logit, expected.top_logit)
        assert torch.equal(got.margin, expected.margin)
        p = logits.double().softmax(-1)
        exact = -torch.where(p > 0, p * p.log(), 0.0).sum(-1).float()
        torch.testing.assert_close(got.lse, logits.double().logsumexp(-1).float(), rtol=3e-7, atol=1e-6)
        torch.testing.assert_close(got.entropy, exact, rtol=1e-5, atol=1e-6)


def test_row_stats_mark_rows_that_are_not_finite() -> None:
    logits = torch.randn(5, 2, 9)[:, 0]
    logits[1, 8], logits[2, 0], logits[3] = math.nan, INF, -INF
    stats = tail.row_stats(logits)
    assert stats.lse.isnan().tolist() == stats.entropy.isnan().tolist() == [False, True, True, True, False]
    assert stats.top_id[1:4].tolist() == [[-1] * 3] * 3


def test_judged_numbers_come_from_the_parent() -> None:
    rng = random.Random(3)
    for _ in range(50):
        forest, _ = random_forest(rng)
        logits = random_logits(len(forest.token), rng)
        stats = tail.row_stats(logits)
        record = Record(forest, logits, logits, stats.top_id[:, 0], {})
        judged = tail.gather_judged(stats, logits, forest.token, forest.parent)
        assert torch.equal(judged.top_id, stats.top_id[record.judges])
        assert torch.equal(judged.top_logit, stats.top_logit[record.judges])
        assert torch.equal(judged.lse, stats.lse[record.judges])
        assert torch.equal(judged.entropy, stats.entropy[record.judges])
        assert torch.equal(judged.token_logit, record.judge_token_logit)


@pytest.mark.parametrize("num_scalars", [0, 1, 2, 3])
@pytest.mark.parametrize("hidden_size", [1, 15, 16, 576])
def test_classifiers_are_those_of_torch(hidden_size: int, num_scalars: int) -> None:
    shapes = {"hidden": (64, hidden_size), "scalars": (16, num_scalars), "layer1": (128, 80), "layer2": (2, 128)}
    weights = {f"{name}.weight": torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items() if shape[1]}
    weights |= {f"{name}.bias": torch.randn(shape[0]) for name, shape in shapes.items()}
    weights.setdefault("scalars.weight", torch.empty(16, 0))
    hidden, scalars = torch.randn(30, hidden_size + 5)[:, :hidden_size], torch.rand(30, num_scalars)

    def linear(name: str, x: Tensor) -> Tensor:
        return x.double() @ weights[f"{name}.weight"].double().T + weights[f"{name}.bias"].double()

    joined = torch.cat([linear("hidden", hidden), linear("scalars", scalars)], 1)
    expected = linear("layer2", linear("layer1", joined).relu()).softmax(-1)[:, 1]
    got = tail.pivot_mlp(weights, hidden, scalars)
    torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-6)
    weight = torch.randn(hidden_size)
    exact = 1 - (hidden.double() @ weight.double() - 0.5).sigmoid()
    torch.testing.assert_close(tail.linear_judge(weight, -0.5, hidden), exact.float(), rtol=1e-4, atol=1e-6)


def rejection_case(rng: random.Random) -> tuple[DraftTree, Tensor, float]:
    n = rng.randint(1, 12)
    draft_vocab = rng.choice([VOCAB, VOCAB - 3, VOCAB + 4])
    tokens = [rng.randrange(VOCAB + 2) for _ in range(n)]
    parents = parents_of(rng.choice(["chain", "star", "tree"]), n, rng)
    logits = random_logits(n, rng)
    q = None
    if rng.random() < 0.6:
        q = torch.randn(n, draft_vocab).softmax(-1)
        if rng.random() < 0.3:
            # a drafter as good as the target: many tokens stay
            q = torch.nn.functional.pad(logits, (0, max(0, draft_vocab - VOCAB)), value=-INF).softmax(-1)
    return DraftTree(tokens, parents, q_rows=q), logits, rng.choice([0.0, 0.3, 1.0, 1.7])


def test_rejection_draws_what_the_rule_draws() -> None:
    rng, lengths = random.Random(11), set()
    for trial in range(1500):
        tree, logits, temperature = rejection_case(rng)
        if rng.random() < 0.1:
            logits[rng.randrange(len(logits)), 2] = math.nan
        params = SamplingParams(temperature=temperature)
        ids = [0] * rng.randint(1, 40)
        state = State(ids, 1, 1000, params, rng.randrange(2**64), frozenset(), round=trial)
        pick = torch.where(logits.isnan().any(1), -1, 0).int()
        forest = make_forest([tree], [0])
        found = walk_path(Record(forest, logits, logits, pick, {}), 0, state, tree)
        path, end = tail.rejection_path(
            logits, tree.q_rows, forest.token, forest.parent, temperature, state.seed, len(ids), trial
        )
        assert (path, end) == (found.path, found.end_token)
        lengths.add(len(path))
    assert len(lengths) > 4


def test_refusals_say_what_was_expected() -> None:
    rng = random.Random(0)
    forest, trees = random_forest(rng)
    while len(trees) != 2:
        forest, trees = random_forest(rng)
    judged, pick = random_judged(forest, rng)
    columns = (forest.token, forest.parent, pick, forest.tree_mask_bits, forest.depth, forest.seq, judged)
    with pytest.raises(native.NativeError, match="k of PAD_RULE_TOPK"):
        tail.relaxed_path(make_rule(Kind.TOPK, 4.0), *columns, 2)
    with pytest.raises(native.NativeError, match="window"):
        tail.relaxed_path(make_rule(Kind.BASE, max_overrides=1, window=65), *columns, 2)
    with pytest.raises(native.NativeError, match="num_roots is 1"):
        tail.relaxed_path(make_rule(Kind.BASE), *columns, 1)
    with pytest.raises(ValueError, match="history must have 2"):
        tail.relaxed_path(make_rule(Kind.BASE), *columns, 2, [1])
    with pytest.raises(native.NativeError, match="vocab must be in"):
        tail.row_stats(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="unit stride"):
        tail.row_stats(torch.zeros(4, 4).T[:, ::2])
    with pytest.raises(ValueError, match="q must have 1 rows"):
        one = torch.zeros(1, dtype=torch.int32)
        tail.rejection_path(torch.zeros(1, 4), torch.zeros(2, 4), one, one - 1, 1.0, 0, 0, 0)
