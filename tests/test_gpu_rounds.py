"""Captured rounds on a CUDA device: the same answers every time, no synchronisation, no growth, and real models."""

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import CUDA, DEVICE, dots_by_element
from tiny import Make, make_tokenizer, some_ids

from pad_engine import Engine, SamplingParams
from pad_engine.controller import Controller
from pad_engine.drafters.none import NoDrafter
from pad_engine.drafters.scripted import Scripted
from pad_engine.loader import load_engine, make_engine
from pad_engine.models.config import parse_config
from pad_engine.models.decoder import Decoder, expected_tensors
from pad_engine.models.loader import load_model
from pad_engine.tree import DraftTree

pytestmark = pytest.mark.gpu

HALF = "bfloat16" if CUDA else "float16"  # the interpreter cannot multiply bf16
REQUESTS, ROUNDS, PROMPTS, TOKENS = (1000, 100, 20, 24) if CUDA else (3, 4, 1, 4)
# SmolLM2's shape, of which every size but the head's is odd to a power of two
SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "hidden_act": "silu", "max_position_embeddings": 2048,
}  # fmt: skip
if not CUDA:
    SMOLLM2 |= {"hidden_size": 144, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 300}


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernels are interpreted they read weights as they are, not as the CPU's library packs them."""
    if not CUDA:
        monkeypatch.setattr("pad_engine.kernels.linear.can_pack", lambda weight: False)


def tiny(folder: Path, drafter: Any = "none", **options: Any) -> Engine:
    options = {"dtype": HALF, "fixed_budget": True, "fused": True} | options
    return load_engine(folder, drafter=drafter, device=DEVICE, **options)


def shaped(drafter: Any = None, max_length: int = 1024, strict: bool = False) -> Engine:
    """An engine of SmolLM2's shape with random weights, scaled so that hidden states neither vanish nor overflow."""
    config = parse_config(SMOLLM2)
    shapes, generator = expected_tensors(config), torch.Generator(DEVICE).manual_seed(0)

    def get(name: str) -> torch.Tensor:
        weight = torch.ones(shapes[name], dtype=getattr(torch, HALF), device=DEVICE)
        return weight.normal_(0.0, 0.7 * shapes[name][-1] ** -0.5, generator=generator) if weight.dim() > 1 else weight

    vocab = config.vocab_size
    return Engine(
        Decoder(config, get, max_length), make_tokenizer(vocab), drafter or NoDrafter(), Controller(16, 15, fixed=True),
        max_length=max_length, num_tokens=vocab, fused=True, strict=strict,
    )  # fmt: skip


def wrong_now_and_then(ids: list[int]) -> list[int] | DraftTree:
    """A draft that every length of tree and of acceptance comes out of."""
    branching = DraftTree([ids[-1], 5, ids[0], ids[len(ids) // 2], 7], [-1, 0, 0, 2, 3])
    return branching if len(ids) % 3 else ids[-(len(ids) % 15) :]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", ["tiny", "smollm2"])
def test_a_request_repeats(shape: str, temperature: float, make_model: Make) -> None:
    """Every kernel may start while the one before it still runs, and none of them ever shows."""
    engine = tiny(make_model("llama")) if shape == "tiny" else shaped()
    params = SamplingParams(8, temperature, 3, ignore_eos=True)
    prompts = [some_ids(count, count) for count in (1, 5, 33)]
    first = [engine.generate(prompt, params).token_ids for prompt in prompts]
    for repeat in range(REQUESTS // 2):
        which = repeat % len(prompts)
        assert engine.generate(prompts[which], params).token_ids == first[which], repeat


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_trees_repeat(family: str, make_model: Make) -> None:
    engine = tiny(make_model(family), Scripted(wrong_now_and_then))
    params = SamplingParams(8, 0.8, 3, ignore_eos=True)
    first = engine.generate(some_ids(30), params).token_ids
    for _ in range(REQUESTS // 4):
        assert engine.generate(some_ids(30), params).token_ids == first


@pytest.fixture
def no_synchronisation() -> Iterator[Callable[[], None]]:
    """Call it, and from then on whatever synchronises raises."""
    yield lambda: torch.cuda.set_sync_debug_mode("error") if CUDA else None
    if CUDA:
        torch.cuda.set_sync_debug_mode("default")


def test_rounds_never_synchronise(no_synchronisation: Callable[[], None]) -> None:
    """Once the graphs are there, a round costs the host a launch and a look at the counter."""
    engine, ids = shaped(), some_ids(1)
    rounds = engine.rounds
    assert rounds is not None
    tree = DraftTree([7, 8, 9, 10], [-1, 0, 0, 1])
    results = []
    with torch.inference_mode():
        for watched in (False, True):
            emitted = []
            rounds.begin(0, ids, 1000, [], 3, 0.8)
            for step in range(ROUNDS):
                index = rounds.queue_tree([tree]) if step % 3 == 1 else rounds.queue_plain()
                rounds.wait(index)
                emitted += rounds.reports.read(index, 0)[0]
                if watched and step == 1:
                    no_synchronisation()
            results.append(emitted)
    assert results[0] == results[1] and len(results[0]) >= ROUNDS


def memory() -> tuple[int, int]:
    """Bytes that torch holds, and that the device has lent in all: also to other processes, so none may run beside."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_reserved(), total - free


@pytest.mark.skipif(not CUDA, reason="counts the memory of a GPU")
def test_memory_and_graphs_do_not_grow(make_model: Make) -> None:
    engine = tiny(make_model("llama"), Scripted(wrong_now_and_then))
    assert engine.rounds is not None
    kinds = [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 9}, {"logprobs": 2, "frequency_penalty": 0.3}]
    requests = itertools.product([200, 1, 77, 130, 40], [40, 1, 9, 24, 3], kinds)
    cases = itertools.cycle([(some_ids(n), SamplingParams(m, seed=5, ignore_eos=True, **k)) for n, m, k in requests])
    # every kind once: a library loads a kernel of its own for many a length of a prompt
    for prompt, params in itertools.islice(cases, 100):
        engine.generate(prompt, params)
    gc.collect()
    before, graphs = memory(), engine.rounds.num_graphs
    for prompt, params in itertools.islice(cases, 500):
        engine.generate(prompt, params)
    gc.collect()
    growth = [now - then for now, then in zip(memory(), before, strict=True)]
    assert max(growth) < 2**20, growth
    assert engine.rounds.num_graphs == graphs == 5  # one that reads short prompts beside four of rounds


@pytest.mark.skipif(not CUDA, reason="nothing is captured")
def test_without_graphs_rounds_are_slower_and_the_same(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, params = make_model("gemma3_text"), SamplingParams(12, 0.8, 3, ignore_eos=True)
    expected = tiny(folder, Scripted(wrong_now_and_then)).generate(some_ids(30), params).token_ids

    def failing(queue: Callable[[], None]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("pad_engine.graphs.capture", failing)
    engine = tiny(folder, Scripted(wrong_now_and_then))
    with pytest.warns(UserWarning, match="without a CUDA graph"):
        assert engine.generate(some_ids(30), params).token_ids == expected
    assert engine.generate(some_ids(30), params).token_ids == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", ["tiny", "smollm2"])
def test_strict_chains_equal_strict_plain_decoding(
    shape: str, temperature: float, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half precision, token for token and logarithm for logarithm: `match` is then plain sampling of that seed."""
    dots_by_element(monkeypatch)

    def engine_of(drafter: Any) -> Engine:
        return tiny(make_model("llama"), drafter, strict=True) if shape == "tiny" else shaped(drafter, strict=True)

    told: dict[int, list[int]] = {}
    plain, chains = engine_of(NoDrafter()), engine_of(Scripted(lambda ids: [*told[len(ids)], 1]))
    for case in range(PROMPTS):
        prompt = some_ids(1 + 7 * case, case)
        # every other request goes by way of its logits
        params = SamplingParams(TOKENS, temperature, case, ignore_eos=True, logprobs=2 if case % 2 else None)
        expected = plain.generate(prompt, params)
        whole = expected.token_ids
        told = {len(prompt) + done: whole[done : done + 1 + (done + case) % 11] for done in range(len(whole))}
        out = chains.generate(prompt, params)
        assert (out.token_ids, out.logprobs) == (whole, expected.logprobs), case
        assert out.stats.accepted_tokens >= TOKENS // 2


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_match_is_plain_sampling_in_fp32(family: str, make_model: Make) -> None:
    folder = make_model(family)
    plain = tiny(folder, dtype="float32")
    others = [
        tiny(folder, "ngram:min=1", dtype="float32", trees="best-first", budget=12),
        tiny(folder, "ngram:min=1", dtype="float32"),
        tiny(folder, Scripted(wrong_now_and_then), dtype="float32"),
    ]
    for seed in range(PROMPTS):
        params = SamplingParams(TOKENS, 0.8, seed, ignore_eos=True)
        expected = plain.generate(some_ids(9) * 3, params).token_ids
        assert all(other.generate(some_ids(9) * 3, params).token_ids == expected for other in others), seed


WRITTEN = [
    "The lighthouse keeper wrote in his diary every evening that",
    "To make a simple bread you need flour, water, salt and",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "The three largest planets of the solar system are",
    "Once upon a time, in a village behind the hills, there lived",
    "Water boils at one hundred degrees Celsius because",
    "Dear Anna,\n\nThank you for the parcel that arrived on Monday.",
    "1, 2, 4, 8, 16, 32,",
    "The opposite of hot is cold. The opposite of tall is",
    "In the year 1969 the first human being",
    "SELECT name, age FROM people WHERE",
    "A good way to learn a language is to",
    "She opened the old wooden box and found",
    "Photosynthesis is the process by which plants",
    "Monday, Tuesday, Wednesday, Thursday,",
    "The recipe calls for two eggs, and the second step is to",
    "import math\n\ndef circle_area(radius):\n    return",
    "My favourite season is autumn, since the leaves",
    "The train to the coast leaves at nine and arrives",
    "If a triangle has two equal sides, it is called",
]


@pytest.fixture(params=["smollm2", "gemma"])
def real_model(request: pytest.FixtureRequest) -> Path:
    if request.param == "smollm2":
        return request.getfixturevalue("smollm2")
    if "PAD_TEST_GEMMA" not in os.environ:
        pytest.skip("PAD_TEST_GEMMA names no folder of a Gemma 3 model")
    return Path(os.environ["PAD_TEST_GEMMA"])


def test_real_models_leave_the_cpus_answer_at_near_ties_only(real_model: Path) -> None:
    """Greedy answers: where the first token differs, the CPU's two best are closer than the type's roundings reach."""
    options = {"max_length": 256}
    cpu = make_engine(load_model(real_model, device="cpu", dtype="float32", **options), drafter="none", fused=False)
    params = SamplingParams(TOKENS, logprobs=2)
    expected = [cpu.generate(prompt, params) for prompt in WRITTEN[:PROMPTS]]
    assert len({tuple(out.token_ids) for out in expected}) > len(expected) // 2
    for dtype, drafter, bound in [("float32", "none", 1e-3), ("float32", "ngram", 1e-3), (HALF, "ngram", 0.5)]:
        loaded = load_model(real_model, device=DEVICE, dtype=dtype, **options)
        engine = make_engine(loaded, drafter=drafter, fused=True, fixed_budget=True)
        for prompt, out in zip(WRITTEN, expected, strict=False):
            ids = engine.generate(prompt, SamplingParams(TOKENS)).token_ids
            if ids == out.token_ids:
                continue
            place = next(i for i, (a, b) in enumerate(itertools.zip_longest(ids, out.token_ids)) if a != b)
            assert out.logprobs is not None
            (_, best), (_, second) = out.logprobs[place].top
            assert best - second < bound, (dtype, drafter, prompt, place)
