"""examples/llama_cpp_margin.py on a tiny model that is written as GGUF: llama.cpp's logits, libpad's decisions."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_gguf import build_model, gguf_tensors, write_gguf
from tiny import some_ids

from pad_engine import native
from pad_engine.integrations.transformers import speculative

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed, so its example was NOT tested")
pytestmark = pytest.mark.skipif(not native.available(), reason=native.missing_reason())

EXAMPLE = Path(__file__).parents[1] / "examples" / "llama_cpp_margin.py"
PROMPTS = [some_ids(1), some_ids(11, 1), some_ids(6, 2) * 4]
COUNT = 48


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llama_cpp_margin", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def oracle() -> Any:
    return build_model("llama")


@pytest.fixture(scope="module")
def llama(example: ModuleType, oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama", gguf_tensors(oracle, "llama"))
    opened = example.LlamaCpp(path, threads=1, context=256)
    yield opened
    opened.close()


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_greedy_is_one_token_at_a_time(example: ModuleType, llama: Any, prompt: list[int]) -> None:
    plain, alone = example.decode(llama, prompt, "greedy", 0, COUNT)
    drafted, stats = example.decode(llama, prompt, "greedy", 8, COUNT)
    assert drafted == plain
    assert example.first_difference(llama, prompt, drafted, plain) == ""
    assert alone.rounds == len(plain)
    assert stats.overrides == 0


@pytest.mark.parametrize("rule", ["greedy", "margin:theta=0.5"])
def test_the_same_rule_in_transformers(example: ModuleType, llama: Any, oracle: Any, rule: str) -> None:
    """Two runtimes of the same weights, drafts and rule."""
    method = speculative("ngram", rule=rule)
    for prompt in PROMPTS:
        got, stats = example.decode(llama, prompt, rule, 8, COUNT)
        out = oracle.generate(
            torch.tensor([prompt]), custom_generate=method, max_new_tokens=COUNT, eos_token_id=[0], pad_token_id=0
        )
        assert got == out[0, len(prompt) :].tolist()
        # where two logits are nearly equal, either runtime may call a token an override that is the other's own
        assert (stats.rounds, stats.accepted_tokens) == (method.stats.rounds, method.stats.accepted_tokens)
        assert (stats.overrides > 0) == (rule != "greedy")


def test_prompt_and_text(llama: Any) -> None:
    ids = llama.prompt("hello 12")
    assert ids[0] == 1, "the template's <|im_start|>"
    assert "hello 12" in llama.text(ids)
