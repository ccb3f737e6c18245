"""What is generated does not depend on how it was drafted: greedy equals transformers, sampling plain sampling."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Make, Oracle, edit_config, some_ids, tiny_decoder, tiny_engine

from pad_engine import Engine, SamplingParams
from pad_engine.drafters.scripted import Scripted
from pad_engine.round import decode_round
from pad_engine.rules.match import MATCH
from pad_engine.state import State
from pad_engine.tree import DraftTree
from pad_engine.verify import prefill

PROMPT = some_ids(6) * 3
TOKENS = 40
BUDGETS = [1, 2, 4, 8, 16]


def script(full: list[int], wrong: Callable[[int], bool] = lambda position: False) -> Scripted:
    """Drafts what `full`, prompt and answer, says; another token at the positions that are `wrong`."""

    def draft(ids: list[int]) -> list[int]:
        places = range(len(ids), min(len(ids) + 20, len(full)))
        return [(full[p] + 1) % 250 if wrong(p) else full[p] for p in places]

    return Scripted(draft)


def bushy(full: list[int]) -> Scripted:
    """A tree whose right path is the second of three siblings at each level."""

    def draft(ids: list[int]) -> DraftTree:
        tokens, parents, node = [ids[-1]], [-1], 0
        for token in full[len(ids) : len(ids) + 6]:
            tokens += [(token + 1) % 250, token, (token + 2) % 250]
            parents += [node] * 3
            node = len(tokens) - 2
        return DraftTree(tokens, parents)

    return Scripted(draft)


def options_for(name: str, make_model: Make, family: str, full: list[int]) -> dict[str, Any]:
    near = {"drafter": "draft-model", "draft_model": make_model(family, noise=0.05)}
    return {
        "none": {"drafter": "none"},
        "ngram": {"drafter": "ngram"},
        "ngram-tree": {"drafter": "ngram:min=1", "trees": "best-first"},
        "draft-model": near,
        "draft-model-tree": near | {"trees": "best-first"},
        "self-drop": {"drafter": "draft-model", "draft_model": "self:drop=1"},
        "self-layers-tree": {"drafter": "draft-model", "draft_model": "self:layers=0,2", "trees": "best-first"},
        "all-right": {"drafter": script(full)},
        "all-wrong": {"drafter": script(full, lambda p: True)},
        "wrong-at-thirds": {"drafter": script(full, lambda p: p % 3 == 0)},
        "first-wrong": {"drafter": script(full, lambda p: random.Random(p).random() < 0.5)},
        "bushy": {"drafter": bushy(full)},
    }[name]


NAMES = [
    "none",
    "ngram",
    "ngram-tree",
    "draft-model",
    "draft-model-tree",
    "self-drop",
    "self-layers-tree",
    "all-right",
    "all-wrong",
    "wrong-at-thirds",
    "first-wrong",
    "bushy",
]


@pytest.fixture(scope="module")
def greedy(make_model: Make) -> dict[str, list[int]]:
    return {family: Oracle(make_model(family)).greedy(PROMPT, TOKENS) for family in ("llama", "mistral")}


@pytest.fixture(scope="module")
def sampled(make_model: Make) -> dict[float, list[int]]:
    plain = tiny_engine(make_model("mistral"))
    return {t: plain.generate(PROMPT, SamplingParams(TOKENS, t, 11, True)).token_ids for t in (0.3, 0.7, 1.0)}


@pytest.mark.parametrize("controller", [False, True], ids=["fixed", "controller"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_transformers(
    make_model: Make, greedy: dict[str, list[int]], name: str, budget: int, controller: bool
) -> None:
    family = "mistral" if budget in (4, 16) else "llama"
    expected = greedy[family]
    assert len(set(expected)) > 10
    options = options_for(name, make_model, family, PROMPT + expected)
    engine = tiny_engine(make_model(family), budget=budget, controller=controller, **options)
    out = engine.generate(PROMPT, SamplingParams(TOKENS, ignore_eos=True))
    assert out.token_ids == expected
    check_stats(out.stats, budget)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("budget", [2, 8, 16])
@pytest.mark.parametrize("name", NAMES[1:])
def test_match_equals_plain_sampling(
    make_model: Make, sampled: dict[float, list[int]], name: str, budget: int, temperature: float
) -> None:
    expected = sampled[temperature]
    options = options_for(name, make_model, "mistral", PROMPT + expected)
    engine = tiny_engine(make_model("mistral"), budget=budget, controller=budget == 8, **options)
    out = engine.generate(PROMPT, SamplingParams(TOKENS, temperature, 11, True))
    assert out.token_ids == expected
    check_stats(out.stats, budget)


def check_stats(stats: Any, budget: int) -> None:
    assert stats.completion_tokens == TOKENS
    assert 0 <= stats.accepted_tokens <= stats.draft_tokens <= stats.rounds * (budget - 1)
    # each round emits the token after its path, but for a last one that the limit cuts
    assert TOKENS - stats.rounds <= stats.accepted_tokens <= TOKENS - stats.rounds + 1
    assert all(0 <= share <= 1 for share in stats.acceptance_by_position)
    assert stats.tokens_per_round == pytest.approx(TOKENS / stats.rounds)
    assert stats.overrides == 0
    assert stats.prompt_tokens == len(PROMPT)


def test_drafts_are_accepted_as_the_script_says(make_model: Make, greedy: dict[str, list[int]]) -> None:
    """The matrix above would pass if nothing was ever drafted."""
    full, folder = PROMPT + greedy["llama"], make_model("llama")
    params = SamplingParams(TOKENS, ignore_eos=True)
    runs = {}
    for name in NAMES:
        engine = tiny_engine(folder, budget=8, **options_for(name, make_model, "llama", full))
        runs[name] = engine.generate(PROMPT, params).stats
    assert (runs["all-right"].rounds, runs["all-right"].accepted_tokens) == (TOKENS // 8, TOKENS - TOKENS // 8)
    assert (runs["all-wrong"].rounds, runs["all-wrong"].accepted_tokens) == (TOKENS, 0)
    assert runs["all-wrong"].acceptance_by_position == [0.0] * 7
    # a tree of eight nodes holds the right path two deep: nodes 2 and 5
    assert runs["bushy"].mean_accept_length == pytest.approx(2, abs=0.2)
    for name in ("draft-model", "draft-model-tree", "wrong-at-thirds"):
        assert 0.1 < runs[name].mean_accept_length < 6, name


@pytest.mark.parametrize("accepted", [0, 2, 4], ids=["zero", "half", "full"])
@pytest.mark.parametrize("prompt", [5, 30])
@pytest.mark.parametrize("family", ["gemma3_text", "qwen2", "mistral"])
def test_sliding_windows_under_speculation(make_model: Make, family: str, prompt: int, accepted: int) -> None:
    """C06: windows of 8, four drafted tokens of which none, two or all are right."""
    folder, ids = make_model(family, tie_word_embeddings=False), some_ids(prompt)
    expected = Oracle(folder).greedy(ids, 60)
    full = ids + expected
    rounds = script(full)
    rounds.script = lambda now: [
        full[p] if i < accepted else (full[p] + 1) % 250
        for i, p in enumerate(range(len(now), min(len(now) + 4, len(full))))
    ]
    engine = tiny_engine(folder, rounds, budget=5)
    out = engine.generate(ids, SamplingParams(60, ignore_eos=True))
    assert out.token_ids == expected
    assert out.stats.mean_accept_length == pytest.approx(accepted, abs=0.4)
    assert all(slots.shape[-2] <= 8 + engine.cache.scratch for window, slots in engine.cache.buffers.items() if window)


@pytest.mark.parametrize("drafter", ["ngram:min=1", "draft-model"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_bf16_drafting_changes_nothing_but_at_near_ties(make_model: Make, drafter: str, temperature: float) -> None:
    """C04: where the ids first differ, the two candidates' scores are nearer than the rounding of bf16 logits."""
    from pad_engine.sampling import gumbel_noise

    folder = make_model("llama")
    params = SamplingParams(60, temperature, 5, True)
    plain = tiny_engine(folder, dtype="bfloat16").generate(PROMPT, params).token_ids
    draft = {"draft_model": make_model("llama", noise=0.05)} if drafter == "draft-model" else {}
    got = tiny_engine(folder, drafter, dtype="bfloat16", **draft).generate(PROMPT, params).token_ids
    first = next((i for i, (a, b) in enumerate(zip(plain, got, strict=True)) if a != b), None)
    if first is not None:
        context = PROMPT + plain[:first]
        noise = gumbel_noise(5, len(context), 300, torch.device("cpu"))
        scores = Oracle(folder, torch.bfloat16).logits(context)[-1] + temperature * noise
        # two logits of about 4, each off by a few roundings of 2^-8
        assert abs(scores[plain[first]] - scores[got[first]]) < 0.15


def test_eight_sequences_decode_as_one_forest(make_model: Make) -> None:
    """Each gets its own text, whatever its length, its seed, its drafts and the moment at which it ends."""
    folder = make_model("mistral")
    plain, target = tiny_engine(folder), tiny_decoder(folder, max_length=96)
    cache = target.new_cache(num_seqs=8, capacity=96, scratch=32)
    prompts = [some_ids(length, seed) for seed, length in enumerate((1, 2, 5, 8, 9, 17, 30, 40))]
    params = [SamplingParams(12 + 3 * s, (0.0, 0.8)[s % 2], 100 + s, True) for s in range(8)]
    expected = [plain.generate(ids, p).token_ids for ids, p in zip(prompts, params, strict=True)]
    for seq in (0, 2, 4, 6):
        assert expected[seq] == Oracle(folder).greedy(prompts[seq], params[seq].max_tokens)
    states = [State(list(prompts[s]), len(prompts[s]), 96, params[s], 100 + s, frozenset(), seq=s) for s in range(8)]
    rng, rounds = random.Random(0), 0
    with torch.inference_mode():
        for state in states:
            cache.reset(state.seq, state.prompt_length)
            prefill(target, cache, state.seq, state.ids[:-1], 32)
        while running := [state for state in states if state.finish_reason is None]:
            rng.shuffle(running)
            trees = []
            for state in running:
                full = prompts[state.seq] + expected[state.seq]
                drafter = rng.choice([bushy(full), script(full, lambda p: p % 4 == 0), script(full)])
                draft = drafter.script(list(state.ids))
                tree = draft if isinstance(draft, DraftTree) else DraftTree.chain([state.root, *draft])
                trees.append(tree.clip(state.remaining - 1, rng.randint(1, 12)))
            commits, _ = decode_round(target, cache, [MATCH] * len(running), running, trees, 300)
            assert [cache.lengths[s.seq] for s in running] == [len(s.ids) - 1 for s in running]
            assert all(len(commit.tokens) == commit.accepted + 1 for commit in commits)
            rounds += 1
    assert [state.generated for state in states] == expected
    assert rounds < 33


def test_a_longer_answer_begins_with_the_shorter_one(make_model: Make) -> None:
    engine = tiny_engine(make_model("gemma3_text"), "ngram:min=1", budget=8)
    long = engine.generate(PROMPT, SamplingParams(50, 0.9, 3, True)).token_ids
    for count in (1, 7, 33):
        assert engine.generate(PROMPT, SamplingParams(count, 0.9, 3, True)).token_ids == long[:count]


@pytest.mark.parametrize("rule", ["greedy", "match"])
def test_rules_by_name_at_temperature_0(make_model: Make, greedy: dict[str, list[int]], rule: str) -> None:
    engine = tiny_engine(make_model("llama"), "ngram", rule=rule)
    assert engine.generate(PROMPT, SamplingParams(TOKENS, ignore_eos=True)).token_ids == greedy["llama"]


def test_dynamic_rope_under_speculation(make_model: Make, tmp_path: Path) -> None:
    """Frequencies that depend on the length: drafted rows take those that plain decoding would have taken."""
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(make_model("llama"), folder)
    edit_config(folder, "rope_parameters", rope_scaling={"type": "dynamic", "factor": 4.0}, rope_theta=500.0)
    edit_config(folder, max_position_embeddings=40)
    target, oracle = tiny_decoder(folder), Oracle(folder)
    expected = oracle.greedy(PROMPT, 70)
    engine = Engine(
        target,
        tiny_engine(folder).tokenizer,
        script(PROMPT + expected, lambda p: p % 5 == 0),
        tiny_engine(folder, "ngram", budget=8).controller,
        max_length=120,
        num_tokens=300,
    )
    assert engine.generate(PROMPT, SamplingParams(70)).token_ids == expected
