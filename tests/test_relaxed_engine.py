"""Relaxed rules in whole answers: limits give the base's tokens, budgets hold, sampling has its bases."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Make, random_classifier, some_ids, tiny_engine

from pad_engine import Engine, SamplingParams
from pad_engine.captured import Played
from pad_engine.errors import RequestError
from pad_engine.record import Record
from pad_engine.rules import rejection
from pad_engine.rules.classifier import LINEAR_JUDGE, PIVOT_MLP, Classifier
from pad_engine.rules.greedy import GREEDY
from pad_engine.rules.match import MATCH
from pad_engine.rules.override import Relaxed, judged_nodes, relax
from pad_engine.rules.rejection import REJECTION
from pad_engine.rules.rule import Accepted
from pad_engine.rules.select import RelaxedRule, make_rule
from pad_engine.state import Overridden, State
from pad_engine.tree import DraftTree, make_forest

PROMPT = some_ids(9)
HIDDEN, LAYER = 48, 1  # of tiny models


def engine_of(make: Make, rule: Any, trees: str = "best-first", budget: int = 10) -> Engine:
    draft = dict(draft_model=make("llama", noise=0.1))
    return tiny_engine(make("llama"), "draft-model:depth=6", trees=trees, budget=budget, rule=rule, **draft)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "spec",
    [
        "margin:theta=1", "margin:form=ratio,rho=1", "margin:form=gap,m=0", "fly:theta=0,lookahead=20",
        "fly:form=released,theta=0,lookahead=20", "pivot:sigma=0,model={pivot}", "judge:delta=1,model={judge}",
    ],
)  # fmt: skip
def test_limits_give_the_tokens_of_the_base(
    spec: str, temperature: float, make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Classifier, "pivot_prob", lambda self, hidden, features: torch.zeros(len(hidden)))
    files = {
        "pivot": random_classifier(tmp_path, PIVOT_MLP, HIDDEN, LAYER),
        "judge": random_classifier(tmp_path, LINEAR_JUDGE, HIDDEN, LAYER),
    }
    params = SamplingParams(30, temperature, 5, ignore_eos=True)
    for base in ("match", "rejection") if temperature and "fly" not in spec else ("match",):
        plain = engine_of(make_model, "rejection" if base == "rejection" else "auto").generate(PROMPT, params)
        out = engine_of(make_model, f"{spec.format(**files)},base={base}").generate(PROMPT, params)
        assert out.token_ids == plain.token_ids
        assert (out.stats.accepted_tokens, out.stats.overrides) == (plain.stats.accepted_tokens, 0)


@pytest.mark.parametrize(
    ("spec", "temperature"), [("topk:k=3", 0.0), ("typical:eps=0", 0.7), ("topk:k=3,base=rejection", 1.0)]
)
@pytest.mark.parametrize(("most", "window"), [(1, 64), (1, 3), (2, 9), (3, 5)])
def test_the_budget_holds_over_every_window(
    spec: str, temperature: float, most: int, window: int, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted from the rounds alone; the state's history says the same at each of them."""
    flags: list[bool] = []
    commit = State.commit

    def counted(state: State, tree: DraftTree, path: list[int], *rest: Any) -> Any:
        done = commit(state, tree, path, *rest)
        nodes = {one.node for one in done.overridden}
        drafted = path[1 : 1 + done.accepted]
        flags.extend([node in nodes for node in drafted] + [False] * (len(done.tokens) - done.accepted))
        assert state.history == sum(flag << ago for ago, flag in enumerate(reversed(flags[-64:])))
        return done

    monkeypatch.setattr(State, "commit", counted)
    rounds: list[Played] = []
    engine = engine_of(make_model, f"{spec},max-overrides={most},window={window}")
    params = SamplingParams(80, temperature, 3, ignore_eos=True)
    out = engine.generate(PROMPT, params, on_round=rounds.append)
    assert len(flags) == 80 and sum(flags) == out.stats.overrides == sum(len(r.commit.overridden) for r in rounds)
    counts = [sum(flags[max(0, end - window) : end]) for end in range(1, 81)]
    assert max(counts) <= most and sum(flags) >= most
    if window == 64:
        del flags[:]
        assert engine_of(make_model, spec).generate(PROMPT, params).stats.overrides > out.stats.overrides


def test_no_override_brings_back_what_a_request_excludes(make_model: Make) -> None:
    """Bans, filters and biases hold for overrides as well."""
    engine, prompt = engine_of(make_model, "topk:k=3"), some_ids(8)
    free = engine.generate(prompt, SamplingParams(30, ignore_eos=True))
    assert free.stats.overrides > 0
    banned = sorted(set(free.token_ids))
    for temperature in (0.0, 0.9):
        bias = dict.fromkeys(banned, -100.0)
        out = engine.generate(prompt, SamplingParams(30, temperature, 3, logit_bias=bias, ignore_eos=True))
        assert not set(banned) & set(out.token_ids)
    # of a row's one possible token no override is left
    assert engine.generate(prompt, SamplingParams(30, 0.9, 3, top_k=1, ignore_eos=True)).stats.overrides == 0


def test_an_override_counts_where_the_answer_ends_with_it() -> None:
    """The last emitted token's row is not kept, since the target has not read it; the override still happened."""
    last = Overridden(2, 0.1, 1.0, 0.4, 1.0)
    state = State([4], 1, 99, SamplingParams(2), 0, frozenset())
    commit = state.commit(DraftTree.chain([4, 5, 6]), [0, 1, 2], 7, (last,))
    assert (commit.tokens, commit.path, commit.overridden, state.history) == ([5, 6], [0, 1], (last,), 1)
    assert state.cut(commit, 2).overridden == (last,)
    assert state.cut(commit, 1).overridden == ()


def test_on_round_has_the_rounds_as_they_were_committed(make_model: Make) -> None:
    engine, rounds = engine_of(make_model, "topk:k=2"), []
    text = engine.generate(PROMPT, SamplingParams(40)).text
    out = engine.generate(PROMPT, SamplingParams(40, stop=text[11:13]), on_round=rounds.append)
    assert out.finish_reason == "stop"
    assert [token for played in rounds for token in played.commit.tokens] == out.token_ids
    assert len(rounds) == out.stats.rounds and all(played.verify_ms > 0 for played in rounds)


def rejection_case(rows: list[list[float]], tree: DraftTree, spec: str, **fields: Any) -> Accepted:
    """One walk over raw logits at temperature 1."""
    logits, params = torch.tensor(rows), SamplingParams(temperature=1.0)
    rule = make_rule(spec, len(rows[0]))
    assert isinstance(rule, RelaxedRule)
    override = rule.on(params).override
    assert override is not None and rule.on(params).walk_path is rejection.walk_path
    record = Record(make_forest([tree], [0]), logits, logits, torch.zeros(len(rows), dtype=torch.int32), {})
    judged = judged_nodes(record, override)
    verdict = relax(torch.zeros(len(rows), dtype=torch.bool), judged, override)
    state = State([3, 0], 1, 1000, params, 0, frozenset())
    for name, value in fields.items():
        setattr(state, name, value)
    return rejection.walk_path(record, 0, state, tree, Relaxed(record, override, judged, verdict))


ROW = [1.0, 3.0, 2.9, -2.0]


def test_an_override_rescues_what_rejection_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draw rejects; of the children the likeliest that the override takes stays, and the budget holds."""
    monkeypatch.setattr(rejection, "uniform", lambda *counter: 1 - 2.0**-32)
    tree = DraftTree([0, 3, 0, 2, 2], [-1, 0, 0, 0, 3])
    kept = rejection_case([ROW] * 5, tree, "topk:k=3,base=rejection")
    assert kept.path == [0, 3, 4] and [one.node for one in kept.overridden] == [3, 4]
    once = rejection_case([ROW] * 5, tree, "topk:k=3,base=rejection,max-overrides=1")
    assert once.path == [0, 3] and once.end_token >= 0
    for history, window, path in ((1, 64, [0]), (1, 1, [0, 3, 4]), (2, 2, [0, 3]), (2, 3, [0])):
        spec = f"topk:k=3,base=rejection,max-overrides=1,window={window}"
        assert rejection_case([ROW] * 5, tree, spec, history=history).path == path
    floor = rejection_case([ROW] * 2, DraftTree([0, 0], [-1, 0]), "topk:k=3,base=rejection,floor=0.2")
    assert floor.path == [0]


def test_the_released_margin_takes_either_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the candidates, whatever the draws say; where the target does not hesitate, rejection decides."""
    monkeypatch.setattr(rejection, "uniform", lambda *counter: 1 - 2.0**-32)
    monkeypatch.setattr(rejection, "draw", lambda p, state, position: p)
    spec, sure = "margin:form=released,theta=0.9", [1.0, 3.0, 0.5, -2.0]
    tree = DraftTree([0, 3, 2, 1, 0], [-1, 0, 0, 0, 2])
    kept = rejection_case([ROW] * 5, tree, spec)
    assert kept.path == [0, 2] and [one.node for one in kept.overridden] == [2]
    # nothing of the pair was drafted: the token is drawn from p itself
    torch.testing.assert_close(kept.end_token, torch.tensor(ROW).double().softmax(-1))
    assert rejection_case([sure] * 5, tree, spec).path == [0]
    first = rejection_case([ROW] * 2, DraftTree([0, 1], [-1, 0]), spec)
    assert first.path == [0, 1] and not first.overridden
    for bounds in ("floor=0.6", "max-overrides=1"):
        kept = rejection_case([ROW] * 5, tree, f"{spec},{bounds}", history=1)
        assert kept.path == [0, 3] and not kept.overridden
    # below 0 a ratio says nothing, and a filter's -inf would have the largest
    low = [-3.0, -2.0, -torch.inf, -torch.inf]
    assert rejection_case([low] * 5, DraftTree([0, 2, 3, 2, 2], [-1, 0, 0, 0, 0]), spec).path == [0]


def test_the_base_of_a_relaxed_rule() -> None:
    greedy, warm = SamplingParams(), SamplingParams(temperature=0.5)
    for spec, base in (("typical", MATCH), ("topk:base=rejection", REJECTION)):
        rule = make_rule(spec, 300)
        assert isinstance(rule, RelaxedRule)
        cold, hot = rule.on(greedy), rule.on(warm)
        assert (cold.judge, cold.walk_path, cold.end) == (GREEDY.judge, None, "argmax")
        assert (hot.walk_path, hot.end, hot.name) == (base.walk_path, base.end, rule.name)
        assert cold.override is hot.override is rule.override and not cold.lossless and not hot.lossless
    for theta in (0.9, 1):
        rule = make_rule(f"margin:form=released,theta={theta}", 300)
        assert isinstance(rule, RelaxedRule) and rule.on(warm).walk_path is rejection.walk_path
        assert rule.on(greedy).walk_path is None


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("lucky", "rule must be one of auto, greedy, match, rejection, margin, pivot"),
        ("", "rule must be one of"),
        ("greedy:theta=1", "unknown option 'theta'"),
        ("margin:sigma=1", "unknown option 'sigma'"),
        ("margin:form=ratio,theta=0.5", "unknown option 'theta'"),
        ("margin:form=best", "form must be one of paper, ratio, gap, released"),
        ("margin:theta=1.5", r"theta must be in \[0, 1\]"),
        ("margin:theta=nan", "theta must be in"),
        ("margin:theta=wide", "theta must be a number"),
        ("margin:theta", "expected name:key=value"),
        ("margin:form=released,base=match", "base must be rejection"),
        ("margin:form=released,theta=1,base=match", "base must be rejection"),
        ("typical:eps=-1", "eps must be in"),
        ("topk:k=0", "k must be in"),
        ("topk:k=2.5", "k must be a whole number"),
        ("topk:floor=2", "floor must be in"),
        ("topk:outer=2", "outer must be in"),
        ("topk:window=65", r"window must be in \[1, 64\]"),
        ("topk:max-overrides=-1", "max-overrides must be in"),
        ("topk:max-overrides=0", r"max-overrides must be in \[1, 64\]"),
        ("topk:window=8", "window=8 bounds nothing without max-overrides"),
        ("topk:base=greedy", "base must be one of match, rejection"),
        ("topk:base=rejection,outer=1", "base=rejection decides node by node"),
        ("fly:base=rejection", "base=rejection decides node by node"),
        ("fly:form=released,lookahead=1,base=rejection", "base=rejection decides node by node"),
        ("fly:lookahead=0", "lookahead must be in"),
        ("fly:form=ratio", "form must be one of paper, released"),
        ("pivot", "rule pivot needs model="),
        ("judge:delta=0.5", "rule judge needs model="),
    ],
)
def test_bad_rules_are_refused(spec: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        make_rule(spec, 300)


@pytest.mark.parametrize(
    ("name", "own"),
    [("margin", ["form", "theta", "rho", "m"]), ("fly", ["form", "theta", "lookahead"]), ("typical", ["eps", "delta"]),
     ("topk", ["k"])],
)  # fmt: skip
def test_the_hint_names_a_rules_own_options(name: str, own: list[str]) -> None:
    """And each of them is one: asked for a word, it says what else it must be."""
    with pytest.raises(RequestError, match="unknown option 'colour'") as caught:
        make_rule(f"{name}:colour=1", 300)
    assert caught.value.hint == f"known: {', '.join(own)}, floor, outer, max-overrides, window, base"
    for option in own:
        forms = {"rho": "form=ratio,", "m": "form=gap,"}
        with pytest.raises(RequestError, match=f"{option} must be"):
            make_rule(f"{name}:{forms.get(option, '')}{option}=word", 300)
