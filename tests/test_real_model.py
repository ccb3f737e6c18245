"""SmolLM2-135M itself: a small share of what bench/equality.py proves at length."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pad_engine import SamplingParams
from pad_engine.kv_cache import RowGroup
from pad_engine.loader import make_engine
from pad_engine.models.loader import LoadedModel, load_model
from pad_engine.prompt import encode
from pad_engine.tree import DraftTree

pytestmark = pytest.mark.network
TOKENS = 24
# logits reach 37 here, and each of the two is about 1e-4 from the float64 result (docs/performance.md)
CLOSE = {"atol": 2e-4, "rtol": 0.0}
PROMPTS = [
    [{"role": "user", "content": "Copy this sentence twice: a small boat left the harbour before the small storm."}],
    "def area(width, height):\n    return width * height\n\ndef area_of_square(width):\n    return",
]
DRAFTS = [
    {"drafter": "none"},
    {"drafter": "ngram"},
    {"draft_model": "self:drop=7,13", "drafter": "draft-model:depth=4", "trees": "chain"},
    {"draft_model": "self:drop=7,13", "drafter": "draft-model:depth=4", "trees": "best-first"},
]


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> LoadedModel:
    return load_model(smollm2, device="cpu", max_length=512)


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)


def test_logits_equal_transformers_in_prefill_steps_and_trees(loaded: LoadedModel, oracle: Any) -> None:
    decoder = loaded.decoder
    ids = encode(loaded.tokenizer, PROMPTS[0], loaded.num_tokens)
    tree = DraftTree([ids[-1], 504, 260, 1345, 28], [-1, 0, 0, 1, 1])
    cache = decoder.new_cache(capacity=512, scratch=64)
    with torch.inference_mode():
        hidden, _ = decoder.forward(cache.place([RowGroup(0, ids[:-1], range(len(ids) - 1))]), cache)
        prefill = decoder.logits(hidden)
        cache.commit(0, range(len(ids) - 1))
        hidden, _ = decoder.forward(cache.place([RowGroup(0, tree.tokens, tree.depth, tree.mask())]), cache)
        rows = decoder.logits(hidden)
        torch.testing.assert_close(prefill, oracle(torch.tensor([ids[:-1]])).logits[0], **CLOSE)
        for node, path in enumerate(tree.paths):
            expected = oracle(torch.tensor([ids + path])).logits[0, -1]
            torch.testing.assert_close(rows[node], expected, **CLOSE)


@pytest.mark.parametrize("prompt", PROMPTS, ids=["chat", "code"])
def test_greedy_equals_transformers(prompt: Any, loaded: LoadedModel, oracle: Any) -> None:
    ids = encode(loaded.tokenizer, prompt, loaded.num_tokens)
    batch = torch.tensor([ids])
    answer = oracle.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=TOKENS, do_sample=False)
    for draft in DRAFTS:
        engine = make_engine(loaded, fixed_budget=True, **draft)
        assert engine.generate(ids, SamplingParams(TOKENS)).token_ids == answer[0, len(ids) :].tolist(), draft


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_match_equals_plain_sampling(temperature: float, loaded: LoadedModel) -> None:
    params = SamplingParams(TOKENS, temperature=temperature, seed=4)
    answers = [
        make_engine(loaded, fixed_budget=True, **draft).generate(PROMPTS[0], params).token_ids for draft in DRAFTS
    ]
    assert all(answer == answers[0] for answer in answers)
