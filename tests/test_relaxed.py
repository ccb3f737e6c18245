"""Relaxed rules against a walk in plain Python, node by node: what stays, what is cut, and what an override says."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from relaxing import LAYER, VOCAB, WIDTH, Node, random_record, rule_of
from tiny import random_classifier

from pad_engine import native
from pad_engine.accept import accept_each
from pad_engine.record import Record
from pad_engine.rules.classifier import LINEAR_JUDGE, PIVOT_MLP
from pad_engine.rules.override import judged_nodes
from pad_engine.tree import DraftTree


def difference(a: float, b: float) -> float:
    return -math.inf if a == -math.inf else a - b


# a rule's options, and what it says of a node; x: a number in (0, 1)
Says = Callable[[Node, float], bool]
RULES: dict[str, tuple[str, Says]] = {
    "margin": ("margin:theta={x}", lambda n, x: n.token == n.ranked[1] and n.z[0] > 0 and n.z[1] > x * n.z[0]),
    "ratio": (
        "margin:form=ratio,rho={x}",
        lambda n, x: n.token == n.ranked[1] and difference(n.z[1], n.z[0]) > math.log(x),
    ),
    "gap": ("margin:form=gap,m={x}", lambda n, x: n.token == n.ranked[1] and n.p(n.ranked[0]) - n.p(n.ranked[1]) < x),
    "typical": (
        "typical:eps={x},delta=0.4",
        lambda n, x: n.p(n.token) > x or n.p(n.token) > 0.4 * math.exp(-n.entropy()),
    ),
    "topk-2": ("topk:k=2", lambda n, x: n.token in n.ranked[:2]),
    "topk-3": ("topk:k=3", lambda n, x: n.token in n.ranked[:3]),
    "topk-5": ("topk:k=5", lambda n, x: n.token in n.ranked[:5]),
    "pivot": ("pivot:sigma={x},model={pivot}", lambda n, x: n.pivot <= x),
    "judge": ("judge:delta={x},model={judge}", lambda n, x: n.pivot <= 1 - x),
    "fly": ("fly:theta={x},lookahead=2", lambda n, x: n.entropy() >= x * math.log(VOCAB)),
    "fly-released": ("fly:form=released,theta={x},lookahead=3", lambda n, x: n.entropy(3) >= x),
}
LOOKAHEAD = {"fly": (2, 0), "fly-released": (2, 3)}
BOUNDS = [
    "", "floor=0.15", "floor=0.15,outer=1", "max-overrides=1", "max-overrides=2,window=7", "max-overrides=3,window=1",
]  # fmt: skip


def walk(
    record: Record, start: int, tree: DraftTree, says: Callable[[Node], bool], pivots: list[float], name: str,
    bounds: dict[str, float], history: int,
) -> tuple[list[int], int, list[int]]:  # fmt: skip
    """Path, end token and overridden nodes of one tree, as the contract words it."""
    picks = record.row_pick[start : start + len(tree)].tolist()
    rows = record.logits[start : start + len(tree)].tolist()
    accepted, overridden = {}, set()
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if picks[parent] < 0:
            continue
        seen = Node(tree.tokens[node], rows[parent], pivots[start + node])
        base, floor = tree.tokens[node] == picks[parent], seen.p(seen.token) >= bounds["floor"]
        chosen = says(seen)
        if (base or chosen) and floor if bounds.get("outer") else base or (chosen and floor):
            # in single precision two small pivot_probs are a tie
            score = float(np.float32(1) - np.float32(seen.pivot)) if name in ("pivot", "judge") else seen.p(seen.token)
            accepted[node] = 2.0 if base else score
            overridden |= set() if base else {node}
    path = [0]
    while children := [node for node in accepted if tree.parents[node] == path[-1]]:
        path.append(max(children, key=lambda node: (accepted[node], -node)))
    lookahead, reach = LOOKAHEAD.get(name, (0, 0))
    flags = [bool(history >> ago & 1) for ago in reversed(range(64))]
    for place, node in enumerate(path):
        flags += [node in overridden] * (place > 0)
        if node not in overridden:
            continue
        after = path[place + 1 : place + 1 + lookahead]
        family = [other for other in range(len(tree)) if tree.mask()[other, node]]
        deepest = max(tree.depth[other] for other in family)
        many = bounds.get("max-overrides") and sum(flags[-int(bounds.get("window", 64)) :]) > bounds["max-overrides"]
        if len(after) < lookahead or overridden & set(after) or (reach and place + reach > deepest) or many:
            path = path[:place]
            break
    return path, picks[path[-1]], [node for node in path if node in overridden]


@pytest.mark.parametrize("libpad", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_rules_equal_a_walk(name: str, libpad: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if libpad and not native.available():
        pytest.skip(native.missing_reason())
    if not libpad:
        monkeypatch.setattr(native, "available", lambda: False)
    rng = np.random.default_rng(len(name) + libpad)
    files = {
        "pivot": random_classifier(tmp_path, PIVOT_MLP, WIDTH, LAYER),
        "judge": random_classifier(tmp_path, LINEAR_JUDGE, WIDTH, LAYER),
    }
    met: set[str] = set()
    for _ in range(80):
        x, bound = float(rng.choice([0.02, 0.3, 0.9]) + 0.1 * rng.random()) / 1.01, str(rng.choice(BOUNDS))
        spec, says = RULES[name]
        spec = spec.format(x=x, **files)
        spec += f"{',' if ':' in spec else ':'}{bound}" if bound else ""
        rule = rule_of(spec)
        record, states, trees = random_record(rng)
        pivots = judged_nodes(record, rule.override).pivot_prob.tolist()
        bounds = {"floor": 1e-4 if name == "pivot" else 0.0}
        bounds |= {key: float(value) for key, value in (part.split("=") for part in bound.split(",") if part)}
        for kept, state, tree, start in zip(
            accept_each(record, [rule] * len(trees), states, trees), states, trees, record.forest.starts, strict=True
        ):
            expected = walk(
                record, start, tree, lambda node: says(node, x), pivots, name, bounds, state.history  # noqa: B023
            )  # fmt: skip
            assert (kept.path, kept.end_token, [one.node for one in kept.overridden]) == expected, (spec, tree)
            met |= {"override" if kept.overridden else "", "cut" if len(kept.path) < len(tree) else "whole"}
            for one in kept.overridden:
                seen = Node(tree.tokens[one.node], record.logits[start + tree.parents[one.node]].tolist(), 0.0)
                assert one.probability == pytest.approx(seen.p(seen.token), abs=1e-5)
                assert one.entropy == pytest.approx(seen.entropy(), abs=1e-4)
                assert one.margin == pytest.approx(seen.z[0] - seen.z[1], abs=1e-5)
                assert one.pivot_prob == pivots[start + one.node]
    assert met >= {"override", "cut", "whole"}
