"""Rules for comparison against plain loops over the models, on the forest decoder; and prompts that do not fit."""

import math
from collections.abc import Callable

import pytest
import torch
from tiny import Make, Oracle, read, some_ids

from pad_engine import SamplingParams
from pad_engine.errors import RequestError
from pad_engine.forest import make_pair
from pad_engine.forest_request import ForestRequest
from pad_engine.loader import draft_engine
from pad_engine.training.baselines import direct, make_any_rule
from pad_engine.training.evaluate import Setting
from pad_engine.training.runner import Runner
from pad_engine.training.tasks.task import Question

TOKENS = 24
Keep = Callable[[torch.Tensor, int, int], bool]  # of the target's row, a token and its position


@pytest.fixture(scope="module")
def runner(make_model: Make) -> Runner:
    pair = make_pair(make_model("llama"), make_model("llama", noise=0.1), device="cpu")
    assert pair.draft is not None
    return Runner(pair, pair.draft, depth=4, batch=3)


def ids_of(runner: Runner, name: str, prompts: list[list[int]], depth: int | None = None) -> list[list[int]]:
    setting = runner.setting(name)
    if depth is not None:
        setting = Setting(name, setting.rule, depth)
    requests = [ForestRequest(p, SamplingParams(TOKENS, seed=i, ignore_eos=True), i) for i, p in enumerate(prompts)]
    found = {answer.key: answer.token_ids for _, answer in runner.decode((setting, one) for one in requests)}
    return [found[i] for i in range(len(prompts))]


def by_hand(oracles: tuple[Oracle, Oracle], prompt: list[int], keep: Keep) -> list[int]:
    """Token by token: the draft's choice where it is the target's or `keep(target row, token, position)` takes it."""
    ids = list(prompt)
    for _ in range(TOKENS):
        row, proposed = oracles[0].logits(ids)[-1], int(oracles[1].logits(ids)[-1].argmax())
        best = int(row.argmax())
        ids.append(proposed if proposed == best or keep(row, proposed, len(ids)) else best)
    return ids[len(prompt) :]


def but_last(answers: list[list[int]]) -> list[list[int]]:
    """The last token that a limit allows is never drafted."""
    return [ids[:-1] for ids in answers]


def entropy(row: torch.Tensor, token: int, position: int) -> bool:
    p = row.double().softmax(-1)
    return float(-(p * p.log()).sum()) >= 3.5


def runner_up(row: torch.Tensor, token: int, position: int) -> bool:
    z1, z2 = row.topk(2).values.tolist()
    return token == int(row.topk(2).indices[1]) and z1 > 0 and z2 > 0.5 * z1


@pytest.mark.parametrize(("spec", "keep"), [("entropy:h=3.5", entropy), ("margin:theta=0.5", runner_up)])
def test_direct_is_the_rule_token_by_token(spec: str, keep: Keep, runner: Runner, make_model: Make) -> None:
    """No token after an accepted draft is the target's by right: every one is offered to the rule, as a plain loop over
    transformers' logits does it. Speculation differs, at the depth where it differs most."""
    oracles = Oracle(make_model("llama")), Oracle(make_model("llama", noise=0.1))
    prompts = [some_ids(7, seed) for seed in range(3)]
    expected = [by_hand(oracles, prompt, keep) for prompt in prompts]
    assert but_last(ids_of(runner, f"direct {spec}", prompts)) == but_last(expected)
    assert but_last(expected) != but_last(ids_of(runner, "target", prompts))
    assert but_last(expected) != but_last(ids_of(runner, spec, prompts, depth=1))


def test_kl_is_the_rule_token_by_token(runner: Runner, make_model: Make) -> None:
    """The same for the rule that compares both models' rows; drafted or not, its overrides are those of the loop."""
    oracles = Oracle(make_model("llama")), Oracle(make_model("llama", noise=0.1))
    prompts = [some_ids(7, seed) for seed in range(3)]

    def divergence(ids: list[int]) -> float:
        p, q = (oracle.logits(ids)[-1].double().log_softmax(-1) for oracle in oracles)
        return float((p.exp() * (p - q)).sum())

    middle = sorted(divergence([*prompts[0], *ids]) for ids in ([], [1], [2, 3], [4], [5], [6, 7]))[3]
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(TOKENS):
            best, proposed = (int(oracle.logits(ids)[-1].argmax()) for oracle in oracles)
            ids.append(proposed if proposed == best or divergence(ids) < middle else best)
        expected.append(ids[len(prompt) :])
    spec = f"kl:t={middle}"
    assert but_last(ids_of(runner, f"direct {spec}", prompts)) == but_last(expected)
    assert but_last(expected) != but_last(ids_of(runner, "target", prompts))
    assert but_last(expected) != but_last(ids_of(runner, "draft", prompts))
    # one stream and its host's draft model give what the forest gives
    setting = runner.setting(spec)
    engine = draft_engine(runner.target, runner.draft, 300, 4, rule=setting.rule, fixed_budget=True)
    alone = [engine.generate(prompt, SamplingParams(TOKENS, ignore_eos=True)).token_ids for prompt in prompts]
    assert alone == ids_of(runner, spec, prompts)


def test_what_coins_and_gates_give_at_their_ends(runner: Runner) -> None:
    prompts = [some_ids(6, seed) for seed in range(4)]
    target, draft = ids_of(runner, "target", prompts), ids_of(runner, "draft", prompts)
    for spec in ("greedy", "random:rate=0", "direct random:rate=0", "entropy:h=100", "kl:t=0", "direct margin:theta=1"):
        assert ids_of(runner, spec, prompts) == target
    assert draft != target
    for spec in ("direct random:rate=1", "direct entropy:h=0", "direct kl:t=100"):
        assert but_last(ids_of(runner, spec, prompts)) == but_last(draft)


def test_a_coin_keeps_its_rate(runner: Runner) -> None:
    """Of the mismatches that are offered, and for any seed the same ones again."""
    setting = runner.setting("direct random:rate=0.3")
    requests = [ForestRequest(some_ids(6, i), SamplingParams(40, seed=i, ignore_eos=True), i) for i in range(8)]
    answers = {answer.key: answer for _, answer in runner.decode((setting, one) for one in requests)}
    kept, offered, cache = 0, 0, runner.draft.new_cache(capacity=64, scratch=64)
    for request in requests:
        tokens, places = answers[request.key].token_ids, [place for place, _ in answers[request.key].overrides]
        # what was drafted at each place is what the draft model says there
        cache.reset(0)
        rows = read(runner.draft, cache, [*request.prompt, *tokens[:-1]])
        drafted = rows[len(request.prompt) - 1 :].argmax(-1).tolist()
        assert all(drafted[place] == tokens[place] for place in places)
        kept += len(places)
        offered += len(places) + sum(a != b for a, b in zip(drafted[:-1], tokens, strict=False))
    assert kept > 10 and abs(kept / offered - 0.3) < 3 * math.sqrt(0.3 * 0.7 / offered)
    again = {answer.key: answer for _, answer in runner.decode((setting, one) for one in requests[:3])}
    assert again == {i: answers[i] for i in range(3)}


def test_rules_without_a_distribution_are_refused(runner: Runner) -> None:
    for spec, words in (("fly", "judges a token by those after it"), ("greedy", "relaxes nothing")):
        with pytest.raises(RequestError, match=words):
            direct(make_any_rule(spec, 300), spec)
    for spec in ("random:p=1", "entropy:theta=1", "random:rate=2", "kl:t=-1"):
        with pytest.raises(RequestError, match=r"rule (random|entropy|kl): "):
            make_any_rule(spec, 300)


def test_a_prompt_without_room_is_named(runner: Runner) -> None:
    for prompt, words in (("x" * 300, "question q9 has 300 tokens"), ("", "question q9: the prompt is empty")):
        with pytest.raises(RequestError, match=words):
            runner.encode(Question("q9", prompt, None))
