"""Relaxed rules decided by the kernels: the same answers, overrides and numbers as the host's own decision."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launches import CUDA, DEVICE
from tiny import Make, some_ids

from pad_engine import Engine, SamplingParams
from pad_engine.drafters.scripted import Scripted
from pad_engine.loader import load_engine
from pad_engine.rules.classifier import LINEAR_JUDGE, PIVOT_MLP, Classifier, expected_shapes
from pad_engine.tree import DraftTree

# the interpreter computes what the kernel then masks
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SEEDS, TOKENS = ((0, 1, 2), 40) if CUDA else ((0,), 9)
RULES = [
    "margin:theta=0.5",
    "margin:form=ratio,rho=0.01",
    "margin:form=gap,m=0.9",
    "typical:eps=0.002,delta=0.3,max-overrides=2,window=5",
    "topk:k=2,floor=0.001",
    "topk:k=3,outer=1,floor=0.003",
    "fly:theta=0.1,lookahead=1",
    "fly:form=released,theta=0.01,lookahead=2",
    "pivot:sigma=0.5,floor=0.001",
    "judge:delta=0.5",
]


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernels are interpreted they read weights as they are, not as the CPU's library packs them."""
    if not CUDA:
        monkeypatch.setattr("pad_engine.kernels.linear.can_pack", lambda weight: False)


def classifier(folder: Path, kind: str, scalars: tuple[str, ...] = ("probability", "margin")) -> Path:
    """One of random weights, for the tiny models, whose answers lie on both sides of one half."""
    scalars = scalars if kind == PIVOT_MLP else ()
    generator = torch.Generator().manual_seed(3)
    shapes = expected_shapes(kind, 48, len(scalars))
    weights = {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}
    path = folder / f"{kind}.safetensors"
    Classifier(kind, 1, 48, scalars, weights, "tiny").save(path)
    return path


def likely_and_not(make: Make, seed: int) -> Any:
    """A script that drafts what the target says itself, its runner-up now and then, and branches."""
    plain = load_engine(make("llama"), drafter="none", device="cpu", dtype="float32", fused=False)

    def script(ids: list[int]) -> DraftTree:
        if len(ids) not in found:
            found[len(ids)] = plain.generate(ids, SamplingParams(4, logprobs=3, ignore_eos=True))
        out = found[len(ids)]
        assert out.logprobs is not None
        tops = [[token for token, _ in place.top] for place in out.logprobs]
        if len(ids) % 3 == 1:  # the runner-up, and what the target itself says behind it
            after = plain.generate([*ids, tops[0][1]], SamplingParams(2, ignore_eos=True)).token_ids
            return DraftTree.chain([ids[-1], tops[0][1], *after])
        other = 1 + (len(ids) + seed) % 2
        if len(ids) % 5 == 2:  # nothing, so that a plain round is among the others
            return DraftTree([ids[-1]], [-1])
        if len(ids) % 3 == 0:  # siblings: a wrong one, the runner-up, the target's own
            return DraftTree([ids[-1], 7, tops[0][1], tops[0][2], tops[1][0], tops[2][0]], [-1, 0, 0, 0, 2, 4])
        return DraftTree.chain([ids[-1], tops[0][0], tops[1][other], tops[2][0], tops[3][0]])

    found: dict[int, Any] = {}
    return script


def engine(folder: Path, rule: str, script: Any, fused: bool) -> Engine:
    return load_engine(
        folder, drafter=Scripted(script), device=DEVICE, dtype="float32", fused=fused, fixed_budget=True, budget=8,
        trees="best-first", rule=rule, max_length=96,
    )  # fmt: skip


CASES = [(rule, 0.8 * (i % 2 and not rule.startswith("fly"))) for i, rule in enumerate(RULES)]


# interpreted, a rule of each kind of bound will do: test_relaxed_records.py has every rule
@pytest.mark.parametrize(("rule", "temperature"), CASES if CUDA else [CASES[i] for i in (3, 8)])
def test_kernels_decide_as_the_host_does(rule: str, temperature: float, make_model: Make, tmp_path: Path) -> None:
    if rule.startswith(("pivot", "judge")):
        kind = PIVOT_MLP if rule.startswith("pivot") else LINEAR_JUDGE
        rule += f",model={classifier(tmp_path, kind)}"
    folder, overrides = make_model("llama"), 0
    for seed in SEEDS:
        params = SamplingParams(TOKENS, temperature, 5, ignore_eos=True)
        seen: dict[bool, list[Any]] = {True: [], False: []}
        answers = []
        for fused in (False, True):
            made = engine(folder, rule, likely_and_not(make_model, seed), fused)
            made.drafter.observe = seen[fused].append  # type: ignore[method-assign]
            out = made.generate(some_ids(9), params)
            answers.append((out.token_ids, out.finish_reason, out.stats.overrides, out.stats.accepted_tokens))
            if fused:
                assert made.rounds is not None
                assert {kind for kind, _ in made.rounds.replays} <= {"read", "tree", "plain"}
        assert answers[0] == answers[1]
        overrides += answers[0][2]
        for host, device in zip(seen[False], seen[True], strict=True):
            assert host.path == device.path and len(host.overridden) == len(device.overridden)
            for a, b in zip(host.overridden, device.overridden, strict=True):
                assert a.node == b.node and a[1:] == pytest.approx(b[1:], rel=1e-4, abs=1e-4)
    assert overrides > 0, "nothing was relaxed, so nothing was compared"
