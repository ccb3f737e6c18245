"""The two lossless rules: ties go to the lowest id everywhere, and sampling follows the softmax."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chisquare
from tiny import Make, Oracle, make_tiny_model, sequential, some_ids, tiny_decoder, tiny_engine

from pad_engine import SamplingParams
from pad_engine.accept import accept_each
from pad_engine.drafters.scripted import Scripted
from pad_engine.errors import RequestError
from pad_engine.kernels.gumbel import gumbel_ref
from pad_engine.kernels.row_stats import row_stats_ref
from pad_engine.record import Record
from pad_engine.rules.greedy import GREEDY
from pad_engine.rules.match import MATCH
from pad_engine.rules.rule import Accepted
from pad_engine.rules.select import make_rule, rule_for
from pad_engine.state import State
from pad_engine.tree import DraftTree, make_forest

COPIED = range(100, 200)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ids 100 to 199 have the logits of ids 0 to 99, exactly."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tied"), "llama")
    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"].clone()
    head[100:200] = head[0:100]
    # the tied ids are the likely ones
    head[200:] *= 0.5
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17])
def test_equal_weight_rows_give_equal_logits(tied: Path, rows: int) -> None:
    """Else the tie is not one, and the tests of ties below say nothing."""
    decoder = tiny_decoder(tied)
    with torch.inference_mode():
        logits = decoder.logits(torch.randn(rows, 48))
    assert torch.equal(logits[:, :100], logits[:, 100:200])


@pytest.mark.parametrize(
    "options",
    [
        {"drafter": "none"},
        {"drafter": "ngram:min=1"},
        {"drafter": "draft-model", "draft_model": "self:layers=0,1,2"},
        {"drafter": "draft-model", "draft_model": "self:layers=0,1,2", "trees": "best-first"},
    ],
    ids=["plain", "ngram", "draft", "tree"],
)
def test_the_lowest_id_of_a_tie_is_taken(tied: Path, options: dict[str, Any]) -> None:
    """C04."""
    prompt = some_ids(10)
    out = tiny_engine(tied, budget=6, **options).generate(prompt, SamplingParams(40, ignore_eos=True))
    assert out.token_ids == Oracle(tied).greedy(prompt, 40)
    assert not set(out.token_ids) & set(COPIED)
    assert sum(token < 100 for token in out.token_ids) > 20
    if options.get("trees") is None and "draft_model" in options:
        # the draft path breaks ties in the same way, so the target as its own drafter is always right
        assert out.stats.draft_tokens - out.stats.accepted_tokens <= 1


@pytest.mark.parametrize("trees", ["chain", "best-first"])
@pytest.mark.parametrize("vocab", [300, 49152])
def test_drafted_ties_rank_by_id(tied: Path, vocab: int, trees: str) -> None:
    """C04, with as many tokens as real models have: torch.topk takes any of equal values."""
    engine = tiny_engine(tied, "draft-model", draft_model="self:layers=0,1,2", trees=trees)
    drafter: Any = engine.drafter
    drafter.num_tokens = vocab
    logits, equal = torch.randn(1, vocab), [5, 7, 123, 200, 250, 299]
    logits[:, equal] = 20.0
    candidates: list[Any] = []
    drafter.rank(State([1], 1, 9, SamplingParams(), 0, frozenset()), candidates, [-1], logits, 1)
    assert [candidate.token for candidate in candidates] == equal[: drafter.builder.branches]


def test_the_twin_of_a_tie_is_rejected_in_verification(tied: Path) -> None:
    prompt = some_ids(10)
    expected = Oracle(tied).greedy(prompt, 40)
    twins = [token + 100 if token < 100 else token for token in expected]
    full = prompt + expected

    def script(ids: list[int]) -> DraftTree:
        # the twin first, then the right token: both have the same logit
        place = len(ids) - len(prompt)
        tokens = [ids[-1], *([twins[place], full[len(ids)]] if place < len(twins) else [])]
        return DraftTree(tokens, [-1, 0, 0][: len(tokens)])

    out = tiny_engine(tied, Scripted(script), budget=4).generate(prompt, SamplingParams(40, ignore_eos=True))
    assert out.token_ids == expected


def test_row_statistics_rank_equal_logits_by_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, -torch.inf], [5.0, 5.0, 5.0, 5.0, 5.0], [0.0, 1.0, 2.0, 3.0, 4.0]])
    stats = row_stats_ref(logits)
    assert stats.top_id.tolist() == [[1, 2, 3], [0, 1, 2], [4, 3, 2]]
    assert stats.margin.tolist() == [0.0, 0.0, 1.0]
    p = logits.double().softmax(-1)
    entropy = -(p * p.clamp_min(1e-300).log()).sum(-1)
    torch.testing.assert_close(stats.entropy.double(), entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(stats.lse, logits.logsumexp(-1))


@pytest.mark.parametrize("rule", [GREEDY, MATCH], ids=lambda rule: rule.name)
def test_accept_follows_the_picks_of_parents(rule: Any) -> None:
    """Random forests with few tokens: the path is the one that the picks lead along, its first twin at each step."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        trees = []
        for _ in range(int(rng.integers(1, 5))):
            size = int(rng.integers(1, 20))
            parents = [-1, *(int(rng.integers(0, node)) for node in range(1, size))]
            trees.append(DraftTree(rng.integers(0, 3, size).tolist(), parents))
        forest = make_forest(trees, rng.permutation(len(trees)).tolist())
        picks = torch.tensor(rng.integers(0, 3, len(forest.token)), dtype=torch.int32)
        record = Record(forest, *[torch.randn(len(picks), 3)] * 2, picks, {})
        nobody = [State([1], 1, 9, SamplingParams(), 0, frozenset())] * len(trees)
        found = accept_each(record, [rule] * len(trees), nobody, trees)
        for kept, tree, start in zip(found, trees, forest.starts, strict=True):
            node, expected = 0, [0]
            while True:
                pick = int(picks[start + node])
                twins = [n for n in range(len(tree)) if tree.parents[n] == node and tree.tokens[n] == pick]
                if not twins:
                    break
                node = twins[0]
                expected.append(node)
            assert kept == Accepted(expected, int(picks[start + node]))


@pytest.mark.parametrize("drafter", ["none", "draft-model"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampling_follows_the_softmax(make_model: Make, temperature: float, drafter: str) -> None:
    """Pairs of first two tokens over many seeds, with twelve tokens, against the product of softmaxes."""
    folder = make_model("llama", vocab_size=12)
    options = {"draft_model": make_model("llama", vocab_size=12, noise=0.1)} if drafter != "none" else {}
    engine, prompt, runs = tiny_engine(folder, drafter, budget=3, **options), [3, 7], 800
    decoder = tiny_decoder(folder)
    first = (sequential(decoder, prompt)[-1] / temperature).softmax(-1)
    second = torch.stack([(sequential(decoder, [*prompt, token])[-1] / temperature).softmax(-1) for token in range(12)])
    expected = (first[:, None] * second).double().flatten()
    counts: Counter[int] = Counter()
    for seed in range(runs):
        a, b = engine.generate(prompt, SamplingParams(2, temperature, seed, True)).token_ids
        counts[12 * a + b] += 1
    observed = torch.tensor([counts[pair] for pair in range(144)], dtype=torch.float64)
    single = observed.view(12, 12).sum(1)
    assert chisquare(single, first.double() / first.double().sum() * runs).pvalue > 1e-3
    # rare pairs share a cell
    order = expected.argsort()
    rare = order[expected[order].cumsum(0) * runs < 25]
    common = torch.tensor([i for i in range(144) if i not in set(rare.tolist())])
    cells = torch.cat((observed[common], observed[rare].sum()[None]))
    means = torch.cat((expected[common], expected[rare].sum()[None]))
    assert len(cells) > 20
    assert chisquare(cells, means / means.sum() * runs).pvalue > 1e-3


def test_sampling_is_what_the_design_says(make_model: Make) -> None:
    """argmax(logits / T + G[seed, position, token]), where a token's position is the number of tokens before it."""
    folder, ids, seed = make_model("qwen3"), some_ids(9), 2**40 + 3
    got = tiny_engine(folder, "ngram").generate(ids, SamplingParams(12, 0.8, seed, True)).token_ids
    oracle = Oracle(folder)
    for token in got:
        noise = gumbel_ref(seed, torch.tensor([len(ids)]), 300)[0]
        scores = oracle.logits(ids)[-1] / 0.8 + noise
        assert token == int(scores.argmax())
        ids = [*ids, token]


def test_neighbouring_positions_and_seeds_are_independent(make_model: Make) -> None:
    """Noise that did not depend on the position would make the same picks again under equal logits."""
    engine = tiny_engine(make_model("llama"))
    ids = engine.generate([3], SamplingParams(200, 1000.0, 1, True)).token_ids
    assert len(set(ids)) > 120
    other = engine.generate([3], SamplingParams(200, 1000.0, 2, True)).token_ids
    assert sum(a == b for a, b in zip(ids, other, strict=True)) < 6


def test_the_rule_of_a_request() -> None:
    greedy, warm = SamplingParams(), SamplingParams(temperature=0.5)
    assert (rule_for("auto", greedy), rule_for("auto", warm)) == (GREEDY, MATCH)
    assert rule_for("match", greedy) is MATCH
    assert rule_for(GREEDY, warm) is GREEDY
    with pytest.raises(RequestError, match="rule greedy needs temperature 0"):
        rule_for("greedy", warm)
    for name in ("auto", "greedy", "match", "rejection"):
        assert make_rule(name, 300) == name
    for name in ("lucky", ""):
        with pytest.raises(RequestError, match="rule must be one of"):
            make_rule(name, 300)
    assert GREEDY.lossless
    assert MATCH.lossless
