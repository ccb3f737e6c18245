"""A fused engine answers like the eager one, id for id in fp32, and is as good as new whatever ended a request.

On a GPU its rounds are captured; elsewhere the same kernels are interpreted, so models and answers are small.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import DEVICE, bits, dots_by_element, ints
from tiny import Make, edit_config, make_tiny_model, some_ids

from pad_engine import Engine, SamplingParams
from pad_engine.captured import Played
from pad_engine.drafters.ngram_device import Lookup
from pad_engine.drafters.scripted import Scripted
from pad_engine.errors import NonFiniteError, RequestError
from pad_engine.graphs import most_read
from pad_engine.loader import load_engine
from pad_engine.output import Output
from pad_engine.tree import UNKNOWN, DraftTree

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PROMPT, OTHER = some_ids(5) * 4, some_ids(6, 9) * 2
SELF = {"draft_model": "self:layers=0", "budget": 8}
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
# a window that the prompt has long left behind, in one layer or both
SHAPES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "mistral": SMALL,
    "qwen2": SMALL | {"max_window_layers": 1},
    "qwen3": SMALL,
    "gemma3_text": SMALL | {"layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels read weights as they are, not as a CPU's library packs them."""
    monkeypatch.setattr("pad_engine.kernels.linear.can_pack", lambda weight: False)


@pytest.fixture
def model(make_model: Make) -> Callable[[str], Path]:
    return lambda family: make_model(family, **SHAPES[family])


def engine_of(folder: Path, drafter: Any = "none", *, fused: bool = True, **options: Any) -> Engine:
    options = {"dtype": "float32", "fixed_budget": True, "max_length": 64} | options
    return load_engine(folder, drafter=drafter, device=DEVICE, fused=fused, **options)


def answer(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> tuple[list[int], str, str]:
    out = engine.generate(prompt, params)
    return out.token_ids, out.text, out.finish_reason


def guess(answer: list[int], right: int, tree: bool = False, prompt: list[int] = PROMPT) -> Scripted:
    """A drafter that knows the answer: some right tokens and a wrong one, in a tree with a wrong sibling of each."""

    def script(ids: list[int]) -> list[int] | DraftTree:
        ahead = answer[len(ids) - len(prompt) :][:right]
        if not tree:
            return [*ahead, 299]
        tokens, parents, node = [ids[-1]], [-1], 0
        for token in ahead:
            tokens, parents = [*tokens, (token + 1) % 256, token], [*parents, node, node]
            node = len(tokens) - 1
        return DraftTree([*tokens, 299], [*parents, node])

    return Scripted(script)


@pytest.mark.parametrize("family", SHAPES)
def test_families_and_drafters(model: Callable[[str], Path], family: str) -> None:
    folder, eager = model(family), engine_of(model(family), fused=False)
    greedy, match = SamplingParams(6, ignore_eos=True), SamplingParams(7, 0.8, 3, ignore_eos=True)
    expected = answer(eager, greedy), answer(eager, match)
    assert answer(engine_of(folder), greedy) == expected[0]
    for drafter, options, sampled in [
        ("ngram:min=1", {"trees": "best-first", "budget": 6}, False),
        (guess(expected[1][0], 2, tree=True), {}, True),
        (None, SELF | {"trees": "best-first"}, True),
    ]:
        engine = engine_of(folder, drafter, **options)
        assert answer(engine, match if sampled else greedy) == expected[sampled], options
        assert engine.rounds is not None and engine.rounds.queued > 0, "no round was fused"


@pytest.mark.parametrize("depth", [2, 15])
def test_prompt_lookup_is_part_of_the_round(model: Callable[[str], Path], depth: int) -> None:
    """The device finds what the host's index says is there, as deep as the drafter may go."""
    folder, params = model("llama"), SamplingParams(8, ignore_eos=True)
    engine, rounds = engine_of(folder, f"ngram:min=1,depth={depth}"), list[Played]()
    out = engine.generate(PROMPT, params, on_round=rounds.append)
    assert out.token_ids == answer(engine_of(folder, fused=False), params)[0]
    assert engine.rounds is not None and {type(kind) for kind, _ in engine.rounds.replays} <= {Lookup, str}
    drafts = [round for round in rounds if len(round.commit.tree) > 1]
    assert drafts and max(len(round.commit.tree) for round in drafts) == 1 + min(depth, 8 - 1)
    assert all(round.rows == 16 and round.commit.tree.evidence > 0 for round in drafts)
    for commit in (round.commit for round in drafts):  # what was rejected stayed on the device
        assert commit.tree.tokens[1 : 1 + commit.accepted] == commit.tokens[: commit.accepted]
        assert set(commit.tree.tokens[1 + commit.accepted :]) <= {UNKNOWN}


@pytest.mark.parametrize(("family", "most", "passes"), [("llama", 200, 3), ("llama", 64, 0), ("gemma3_text", 200, 0)])
def test_a_prompt_is_read_by_captured_passes(
    model: Callable[[str], Path], family: str, most: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By several, as long as no ring wraps; what the library is quicker with, it reads."""
    folder, params, prompt = model(family), SamplingParams(3, ignore_eos=True), some_ids(150)
    engine, lengths = engine_of(folder, max_length=160), []
    rounds = engine.rounds
    assert rounds is not None
    read = rounds.read

    def counted(seq: int, tokens: list[int]) -> None:
        lengths.append(len(tokens))
        read(seq, tokens)

    monkeypatch.setattr(rounds, "read", counted)
    monkeypatch.setattr(rounds, "most_read", most)
    expected = answer(engine_of(folder, fused=False, max_length=160), params, prompt)
    assert answer(engine, params, prompt) == expected
    assert lengths == [64, 64, 21][:passes]


def test_how_much_captured_passes_read() -> None:
    half, shapes = torch.bfloat16, {"135m": (960 * 576 + 576 * 576 + 3 * 576 * 1536), "8b": 218_103_808}
    found = {name: most_read(2 * weights, half) for name, weights in shapes.items()}
    assert found == {"135m": 960, "8b": 128}
    assert most_read(2 * shapes["8b"], torch.float32) == most_read(10**10, half) == 64


def same(a: Output, b: Output) -> bool:
    """Equal but for roundings of the log-probabilities."""
    pairs = zip(a.logprobs or [], b.logprobs or [], strict=True)
    close = all(abs(x.logprob - y.logprob) < 1e-4 and x.token_id == y.token_id for x, y in pairs)
    return (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason) and close


LOGITS = {
    "top-k": SamplingParams(5, 0.8, 3, True, top_k=20, logprobs=2),
    "penalties": SamplingParams(5, 0.0, 3, True, repetition_penalty=1.3, frequency_penalty=0.5),
    "min-tokens": SamplingParams(6, 0.8, 3, stop_token_ids=list(range(0, 300, 2)), min_tokens=4),
    "rejection": SamplingParams(5, 0.8, 3, True),
}


@pytest.mark.parametrize("name", LOGITS)
def test_requests_that_need_logits(model: Callable[[str], Path], name: str) -> None:
    folder, rule = model("llama"), "rejection" if name == "rejection" else "auto"
    for drafter, options in (("none", {}), (None, SELF | {"trees": "chain" if rule == "rejection" else "best-first"})):
        eager, fused = (engine_of(folder, drafter, fused=fused, rule=rule, **options) for fused in (False, True))
        assert same(fused.generate(PROMPT, LOGITS[name]), eager.generate(PROMPT, LOGITS[name])), options
        assert fused.rounds is not None and fused.rounds.queued == 0
        assert {kind for kind, _ in fused.rounds.replays} == {"read", "logits"}


def test_where_an_answer_ends(model: Callable[[str], Path]) -> None:
    folder = model("llama")
    eager = engine_of(folder, fused=False)
    whole = eager.generate(PROMPT, SamplingParams(8, ignore_eos=True))
    text = eager.tokenizer.decode(whole.token_ids[2:4])
    ends = [
        SamplingParams(8, stop_token_ids=[whole.token_ids[3]]),
        SamplingParams(8, ignore_eos=True, stop=text),
        SamplingParams(1, ignore_eos=True),
        SamplingParams(4, ignore_eos=True),
    ]
    for engine in (engine_of(folder), engine_of(folder, guess(whole.token_ids, 2))):
        for params in ends:
            assert answer(engine, params) == answer(eager, params)
    assert {eager.generate(PROMPT, params).finish_reason for params in ends} == {"stop", "length"}


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_end_of_the_context(model: Callable[[str], Path], family: str) -> None:
    folder, params = model(family), SamplingParams(50, ignore_eos=True)
    expected = answer(engine_of(folder, fused=False, max_length=len(PROMPT) + 5), params)
    assert len(expected[0]) == 5 and expected[2] == "length"
    for drafter in ("none", guess(expected[0], 2), guess(expected[0], 9)):
        assert answer(engine_of(folder, drafter, max_length=len(PROMPT) + 5), params) == expected


def test_rounds_run_ahead_of_what_is_read(model: Callable[[str], Path]) -> None:
    """Round r + 1 is queued before round r is waited for, and the last one is not followed by any."""
    engine, events = engine_of(model("llama")), []
    rounds, params = engine.rounds, SamplingParams(4, ignore_eos=True)
    assert rounds is not None
    engine.generate(PROMPT, params)  # a first run of a round's kernels counts as a round
    queue, wait, past = rounds.queue, rounds.wait, rounds.queued
    rounds.queue = lambda kind, nodes: events.append(f"queue {rounds.queued - past}") or queue(kind, nodes)  # type: ignore
    rounds.wait = lambda index: events.append(f"wait {index - past}") or wait(index)  # type: ignore
    engine.drafter.propose = lambda state: pytest.fail("the host drafts")  # type: ignore
    engine.generate(PROMPT, params)
    assert events == ["queue 0", "queue 1", "wait 0", "queue 2", "wait 1", "queue 3", "wait 2", "wait 3"]


def test_graphs_are_few_and_serve_every_request(model: Callable[[str], Path]) -> None:
    """One graph a kind and padded number of rows, whatever a request's length, draft and parameters."""
    engine = engine_of(model("llama"), Scripted(lambda ids: ids[: len(ids) % 3]), budget=64)
    for params in (SamplingParams(3, ignore_eos=True), LOGITS["top-k"], SamplingParams(2, 0.8, 3)):
        engine.generate(PROMPT[: params.max_tokens * 7], params)
    assert engine.rounds is not None and engine.rounds.num_graphs == 6
    assert set(engine.rounds.replays) == {
        ("read", 16),
        ("read", 64),
        ("plain", 1),
        ("tree", 16),
        ("logits", 1),
        ("logits", 16),
    }


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_request_that_is_left_midway(model: Callable[[str], Path], family: str) -> None:
    """By closing the stream or by cancelling it: rounds that were queued ahead leave nothing behind."""
    folder, params = model(family), SamplingParams(20, ignore_eos=True)
    engine, short = engine_of(folder), SamplingParams(3, 0.8, 7, True)
    eager = engine_of(folder, fused=False)
    stream = engine.stream(PROMPT, params)
    first = [next(stream).token_ids, next(stream).token_ids]
    stream.close()  # type: ignore[attr-defined]
    assert [*first[0], *first[1]] == eager.generate(PROMPT, SamplingParams(2, ignore_eos=True)).token_ids
    assert answer(engine, short, OTHER) == answer(eager, short, OTHER)
    stream = engine.stream(PROMPT, params)
    next(stream)
    engine.cancel()
    assert list(stream)[-1].finish_reason == "cancelled"
    assert answer(engine, short, OTHER) == answer(eager, short, OTHER)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_turns_of_a_chat(model: Callable[[str], Path], family: str) -> None:
    """What the cache kept of a turn, however it ended, serves the next one as a fresh cache would."""
    folder, params = model(family), SamplingParams(3, ignore_eos=True)
    eager = engine_of(folder, fused=False)
    for drafter in ("none", Scripted(lambda ids: ids[-3:-1])):
        engine, ids, reused = engine_of(folder, drafter), list(PROMPT), []
        handle = engine.prefill(ids)
        for turn in range(3):
            if turn == 1:
                stream = engine.stream(ids, params, prefix=handle)
                kept = next(stream).token_ids
                stream.close()  # type: ignore[attr-defined]
            else:
                out = engine.generate(ids, params, prefix=handle)
                kept = out.token_ids
                reused.append(out.stats.reused_tokens)
                assert kept == eager.generate(ids, params).token_ids, turn
            ids = [*ids, *kept, *some_ids(3, turn)]
        assert reused[0] == len(PROMPT) - 1 and (family != "llama" or reused[1] > len(PROMPT))


class DeviceChain:
    """Knows the answer, and writes it as a chain where the round itself is queued: the host decides nothing."""

    captured, readings, draft_probs, taps, nbytes = True, 0, "none", (), 0

    def __init__(self, ids: list[int], nodes: int) -> None:
        self.ids, self.nodes = ints([*ids, *[1] * nodes]), nodes

    def queue(self, rounds: Any, plan: Any) -> tuple[int, int]:
        return rounds.queue(self, self.nodes), self.nodes - 1

    def queue_draft(self, requests: Any, forest: Any, rows: int) -> None:
        index = torch.arange(self.nodes, device=DEVICE)
        forest.token[: self.nodes] = self.ids[(requests.cache_len + index).clamp(max=len(self.ids) - 1)]
        forest.token[:1] = requests.root[:1]
        forest.parent[: self.nodes], forest.depth[: self.nodes] = index - 1, index
        forest.mask_bits[: self.nodes] = (2 << index) - 1
        forest.start[1:] = (requests.limit - requests.cache_len - 1).clamp(1, self.nodes)

    def evidence(self, state: Any) -> int:
        return -1

    def begin(self, *ignored: Any) -> None: ...

    observe = begin


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_drafter_on_the_device_runs_ahead_too(model: Callable[[str], Path], family: str) -> None:
    """A round that nobody read may have gone round a ring: the next turn must not take its keys for the old ones."""
    folder, params = model(family), SamplingParams(12, ignore_eos=True)
    eager = engine_of(folder, fused=False)
    whole = eager.generate(PROMPT, params)
    engine = engine_of(folder, DeviceChain(PROMPT + whole.token_ids, 5))
    out = engine.generate(PROMPT, params)
    assert out.token_ids == whole.token_ids and (out.stats.rounds, out.stats.accepted_tokens) == (3, 9)
    handle = engine.prefill(PROMPT)
    stream = engine.stream(PROMPT, params, prefix=handle)
    kept = next(stream).token_ids
    stream.close()  # type: ignore[attr-defined]
    ids, short = [*PROMPT, *kept, *OTHER[:2]], SamplingParams(3, ignore_eos=True)
    assert engine.generate(ids, short, prefix=handle).token_ids == eager.generate(ids, short).token_ids


@pytest.mark.parametrize(("temperature", "drafted"), [(0.0, 0), (0.8, 1)])
def test_logits_that_are_not_finite(model: Callable[[str], Path], temperature: float, drafted: int) -> None:
    """A named error, in rounds that run ahead and in trees, and a healed engine is as good as new."""
    folder, params = model("llama"), SamplingParams(5, temperature, 3, True)
    expected = answer(engine_of(folder, fused=False), params)
    engine, got = engine_of(folder, guess(expected[0], drafted) if drafted else "none"), []
    weight = engine.target.lm_head.weight
    good = weight[200].clone()
    with pytest.raises(NonFiniteError, match="not finite"):
        for delta in engine.stream(PROMPT, params):
            got += delta.token_ids
            weight[200] = torch.nan
    assert got == expected[0][: len(got)] and got
    weight[200] = good
    assert answer(engine, params) == expected


@pytest.mark.parametrize("request_of", ["captured", "logits"])
def test_strict_answers_and_keys_have_the_same_bits_however_much_is_drafted(
    model: Callable[[str], Path], request_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dots_by_element(monkeypatch)
    folder, logits = model("llama"), request_of == "logits"
    params = SamplingParams(7, 0.8, 3, True, logprobs=3 if logits else None)
    plain = engine_of(folder, strict=True, dtype="float16")
    expected = plain.generate(PROMPT, params)
    held = slice(plain.cache.scratch, plain.cache.scratch + len(PROMPT) + len(expected.token_ids) - 1)
    for right in (2, 7):
        engine = engine_of(folder, guess(expected.token_ids, right), strict=True, dtype="float16")
        out = engine.generate(PROMPT, params)
        assert (out.token_ids, out.logprobs) == (expected.token_ids, expected.logprobs)
        assert out.stats.accepted_tokens >= 4
        for window, buffer in plain.cache.buffers.items():
            other = engine.cache.buffers[window]
            assert torch.equal(bits(buffer[..., held, :]), bits(other[..., held, :]))


def test_strict_mode_refuses_what_it_cannot_keep(model: Callable[[str], Path]) -> None:
    with pytest.raises(RequestError, match="branches"):
        engine_of(model("llama"), "ngram", trees="best-first", strict=True)
    with pytest.raises(RequestError, match="window"):
        engine_of(model("mistral"), strict=True)
    # a context within the window wraps nothing
    assert engine_of(model("mistral"), strict=True, max_length=8).rounds is not None


def test_a_model_that_cannot_run_fused_says_so(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, **SMALL)
    edit_config(folder, "rope_parameters", rope_scaling={"type": "dynamic", "factor": 4.0}, rope_theta=500.0)
    with pytest.warns(UserWarning, match="depend on the length"):
        engine = engine_of(folder)
    assert engine.rounds is None
    assert answer(engine, SamplingParams(3)) == answer(engine_of(folder, fused=False), SamplingParams(3))
    with pytest.raises(RequestError, match="depend on the length"):
        engine_of(folder, strict=True)
