"""The reference operators on a CUDA device: the same answers there as on the CPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pad_engine import SamplingParams
from pad_engine.loader import load_engine

pytestmark = pytest.mark.gpu

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]
DRAFTS = [
    {"drafter": "none"},
    {"drafter": "ngram:min=1", "trees": "best-first"},
    {"drafter": "draft-model:depth=4", "draft_model": "self:layers=0,1"},
    {"drafter": "draft-model:depth=4", "draft_model": "self:layers=0,1", "trees": "best-first"},
]
PROMPT = list(b"one two three, one two three, one two")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_cuda_fp32_equals_cpu(family: str, temperature: float, make_model: Callable[..., Path]) -> None:
    folder = make_model(family)
    params = SamplingParams(48, temperature=temperature, seed=3, ignore_eos=True)
    cpu = load_engine(folder, drafter="none", device="cpu").generate(PROMPT, params)
    for draft in DRAFTS:
        engine = load_engine(folder, device="cuda", dtype="float32", fixed_budget=True, **draft)
        assert engine.generate(PROMPT, params).token_ids == cpu.token_ids, draft


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_half_precision_drafts_do_not_change_much(
    family: str, dtype: str, make_model: Callable[..., Path]
) -> None:
    """Half precision may flip near-ties between row counts; with the same rows every time an answer repeats."""
    folder = make_model(family)
    params = SamplingParams(32, ignore_eos=True)
    for draft in DRAFTS:
        engine = load_engine(folder, device="cuda", dtype=dtype, fixed_budget=True, **draft)
        first = engine.generate(PROMPT, params).token_ids
        assert all(engine.generate(PROMPT, params).token_ids == first for _ in range(3)), draft


def test_cuda_picks_equal_cpu_picks() -> None:
    from pad_engine.sampling import gumbel_pick

    logits = torch.randn(7, 4097) * 4
    positions = torch.tensor([5, 5, 6, 7, 7, 900, 901])
    for temperature in (0.0, 0.7, 1.0):
        on_cpu = gumbel_pick(logits, positions, 11, temperature)
        on_gpu = gumbel_pick(logits.cuda(), positions.cuda(), 11, temperature)
        assert on_gpu.tolist() == on_cpu.tolist()
