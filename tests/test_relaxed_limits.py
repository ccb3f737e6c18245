"""Limits of relaxed rules: FLy's window over every mask, thresholds that widen, and those that leave the base."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from relaxing import LAYER, VOCAB, WIDTH, Node, random_record, rule_of
from tiny import random_classifier

from pad_engine import SamplingParams
from pad_engine.accept import accept_each
from pad_engine.record import Record
from pad_engine.rules import fly
from pad_engine.rules.classifier import LINEAR_JUDGE, PIVOT_MLP, Classifier
from pad_engine.rules.greedy import GREEDY
from pad_engine.rules.override import Override, judged_nodes, kept_length, relax
from pad_engine.state import State
from pad_engine.tree import DraftTree, make_forest

KINDS = {"pivot": PIVOT_MLP, "judge": LINEAR_JUDGE}


def released(match: list[bool], unsure: list[bool], window: int) -> int:
    """R = A | [F, T * (W - 1)] in windows; the last W are strict; sure mismatches stay rejected; the leading run."""
    count = len(match)
    kept = list(match)
    for place in range(count - window + 1):
        if match[place : place + window] == [False] + [True] * (window - 1):
            kept[place] = True
    for place in range(max(0, count - window), count):
        kept[place] = match[place]
    kept = [ok and (unsure[place] or match[place]) for place, ok in enumerate(kept)]
    return ([*kept, False]).index(False)


def paper(match: list[bool], unsure: list[bool], window: int) -> int:
    """A mismatch stays if the target is unsure and the next W tokens exist and all match."""
    for place, ok in enumerate(match):
        rest = match[place + 1 : place + 1 + window]
        if not ok and not (unsure[place] and len(rest) == window and all(rest)):
            return place
    return len(match)


FORMS = {"paper": paper, "released": released}


@pytest.mark.parametrize("window", [1, 2, 3, 6, 12, 13])
@pytest.mark.parametrize("form", fly.FORMS)
def test_fly_equals_a_loop_over_all_masks(form: str, window: int) -> None:
    override = rule_of(f"fly:form={form},lookahead={window}").override
    for count in range(1, 13):
        forest = make_forest([DraftTree.chain([0] * (count + 1))], [0])
        for match in itertools.product((True, False), repeat=count):
            kept = kept_length(range(count + 1), [False, *(not ok for ok in match)], forest, override, 0)
            assert kept - 1 == FORMS[form](list(match), [True] * count, window), match


@pytest.mark.parametrize("window", [1, 2, 3, 4])
@pytest.mark.parametrize("form", fly.FORMS)
def test_fly_gates_by_entropy(form: str, window: int) -> None:
    """All chains of five of a match, an unsure mismatch and a sure one, as one forest."""
    kinds = list(itertools.product(("match", "unsure", "sure"), repeat=5))
    forest = make_forest([DraftTree.chain([0, *(int(kind != "match") for kind in kind_of)]) for kind_of in kinds],
                         list(range(len(kinds))))  # fmt: skip
    flat, sharp = [0.1] + [0.0] * (VOCAB - 1), [9.0] + [0.0] * (VOCAB - 1)
    rows = torch.tensor([sharp if kind == "sure" else flat for kind_of in kinds for kind in (*kind_of, "sure")])
    record = Record(forest, rows, rows, torch.zeros(len(rows), dtype=torch.int32), {})
    trees = [DraftTree.chain([0, *(int(kind != "match") for kind in kind_of)]) for kind_of in kinds]
    states = [State([0], 1, 99, SamplingParams(), 0, frozenset(), seq) for seq in range(len(kinds))]
    rule = rule_of(f"fly:form={form},lookahead={window}")
    for kept, kind_of in zip(accept_each(record, [rule] * len(trees), states, trees), kinds, strict=True):
        match, unsure = [kind == "match" for kind in kind_of], [kind != "sure" for kind in kind_of]
        assert len(kept.path) - 1 == FORMS[form](match, unsure, window), kind_of


WIDENING = {  # options in an order in which more is accepted each time
    "margin": [f"theta={t}" for t in (1, 0.9, 0.5, 0)],
    "margin:form=ratio": [f"rho={r}" for r in (1, 0.9, 0.3, 0)],
    "margin:form=gap": [f"m={m}" for m in (0, 0.1, 0.5, 1)],
    "typical": [f"eps={e},delta=1" for e in (1, 0.5, 0.09, 0)] + ["eps=0,delta=0"],
    "typical:eps=1": [f"delta={d}" for d in (1, 0.6, 0.3, 0)],
    "topk": [f"k={k}" for k in (1, 2, 3, 4, VOCAB)],
    "fly": [f"theta={t}" for t in (1.1, 0.9, 0.3, 0.1)],
    "fly:form=released": [f"theta={t}" for t in (1.2, 0.9, 0.3, 0.1)],
    "pivot:floor=0,model={pivot}": [f"sigma={s}" for s in (0, 0.3, 0.5, 1)],
    "judge:model={judge}": [f"delta={d}" for d in (1, 0.7, 0.5, 0)],
}


@pytest.mark.parametrize("name", WIDENING)
def test_rules_are_monotone(name: str, tmp_path: Path) -> None:
    files = {kind: random_classifier(tmp_path, name, WIDTH, LAYER) for kind, name in KINDS.items()}
    spec = name.format(**files)
    overrides: list[Override] = [
        rule_of(f"{spec}{',' if ':' in spec else ':'}{one}").override for one in WIDENING[name]
    ]
    rng, sizes = np.random.default_rng(1), np.zeros(len(overrides))
    for _ in range(40):
        record, states, trees = random_record(rng, chains=True)
        base, before, lengths = record.token == record.judge_pick, None, None
        for place, override in enumerate(overrides):
            now = relax(base, judged_nodes(record, override), override).accept
            sizes[place] += int(now.sum())
            assert before is None or bool((now | ~before).all())
            rule = replace(rule_of("topk"), override=replace(override, lookahead=0, reach=0))
            paths = [len(kept.path) for kept in accept_each(record, [rule] * len(trees), states, trees)]
            assert lengths is None or all(a >= b for a, b in zip(paths, lengths, strict=True))
            before, lengths = now, paths
    assert sizes[-1] > sizes[0]


@pytest.mark.parametrize("floor", [0.0, 0.01, 0.3])
def test_sigma_1_accepts_all_above_the_floor(floor: float, tmp_path: Path) -> None:
    path, rng = random_classifier(tmp_path, PIVOT_MLP, WIDTH, LAYER), np.random.default_rng(2)
    rule = rule_of(f"pivot:sigma=1,floor={floor},model={path}")
    for _ in range(60):
        record, states, trees = random_record(rng, chains=True)
        # a margin of infinity makes a NaN of the classifier, which accepts nothing
        rows = record.logits.clamp_min(-20.0)
        record = replace(record, logits=rows, processed=rows)
        for kept, tree, start in zip(
            accept_each(record, [rule] * len(trees), states, trees), trees, record.forest.starts, strict=True
        ):
            own, picks = rows[start:].tolist(), record.row_pick[start:].tolist()
            count = 0
            while count + 1 < len(tree) and picks[count] >= 0:
                seen = Node(tree.tokens[count + 1], own[count], 0.0)
                if seen.token != picks[count] and seen.p(seen.token) < floor:
                    break
                count += 1
            assert kept.path == list(range(count + 1))


BASE_LIMITS = [
    "margin:theta=1", "margin:form=ratio,rho=1", "margin:form=gap,m=0", "fly:theta=0,lookahead=25",
    "fly:form=released,theta=0,lookahead=25", "topk:k=3,floor=1", "pivot:sigma=0,floor=0,model={pivot}",
    "judge:delta=1,model={judge}",
]  # fmt: skip


@pytest.mark.parametrize("spec", BASE_LIMITS)
def test_limits_are_the_base(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the classifier is sure that no token matters."""
    monkeypatch.setattr(Classifier, "pivot_prob", lambda self, hidden, features: torch.zeros(len(hidden)))
    files = {kind: random_classifier(tmp_path, name, WIDTH, LAYER) for kind, name in KINDS.items()}
    rule, rng = rule_of(spec.format(**files)), np.random.default_rng(3)
    for _ in range(60):
        record, states, trees = random_record(rng)
        found = accept_each(record, [rule] * len(trees), states, trees)
        assert found == accept_each(record, [GREEDY] * len(trees), states, trees)
