"""Checkpoints with and without an output matrix of their own, in one file or in shards, and adapters (C14)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import CPU, Make, Oracle, edit_config, sequential, some_ids, tiny_decoder, tiny_engine

from pad_engine import Engine, SamplingParams
from pad_engine.errors import ModelError, RequestError
from pad_engine.models.config import ModelConfig
from pad_engine.models.loader import load_decoder, load_model, load_tokenizer

IDS = some_ids(30)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def rewritten(source: Path, folder: Path, tied: bool, head: str) -> Path:
    """A copy whose config ties or not, and whose checkpoint has no head, one equal to the embedding, or another."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(HEAD, None)
    if head != "none":
        tensors[HEAD] = tensors[EMBEDDING].clone() if head == "equal" else tensors[EMBEDDING].flip(0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return edit_config(folder, tie_word_embeddings=tied)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    ("tied", "head"), [(True, "none"), (True, "equal"), (True, "other"), (False, "equal"), (False, "other")], ids=str
)
@pytest.mark.filterwarnings("ignore")
def test_the_head_is_that_of_transformers(make_model: Make, tmp_path: Path, family: str, tied: bool, head: str) -> None:
    folder = rewritten(make_model(family), tmp_path / "copy", tied, head)
    ours, theirs = sequential(tiny_decoder(folder), IDS), Oracle(folder).logits(IDS)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_a_contradiction_is_warned_of_and_agreement_is_not(
    make_model: Make, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    for head in ("none", "equal"):
        tiny_decoder(rewritten(make_model("llama"), tmp_path / head, True, head))
    assert not recwarn.list
    with pytest.warns(UserWarning, match=HEAD):
        tiny_decoder(rewritten(make_model("llama"), tmp_path / "other", True, "other"))


def test_a_missing_head_is_an_error_that_names_it(make_model: Make, tmp_path: Path) -> None:
    folder = rewritten(make_model("llama"), tmp_path / "copy", False, "none")
    with pytest.raises(ModelError, match=HEAD):
        tiny_decoder(folder)


def test_a_tied_head_of_another_shape_is_an_error(make_model: Make, tmp_path: Path) -> None:
    folder = rewritten(make_model("llama"), tmp_path / "copy", True, "equal")
    tensors = load_file(folder / "model.safetensors")
    tensors[HEAD] = torch.randn(301, 48)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{HEAD} has shape \[301, 48\]"):
        tiny_decoder(folder)


@pytest.mark.parametrize("size", ["20KB", "1GB"], ids=["shards", "single"])
def test_shards_and_a_single_file_without_index(make_model: Make, tmp_path: Path, size: str) -> None:
    oracle = Oracle(make_model("qwen3"))
    oracle.model.save_pretrained(tmp_path, max_shard_size=size)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 if size == "1GB" else len(list(tmp_path.iterdir())) > 4
    torch.testing.assert_close(sequential(tiny_decoder(tmp_path), IDS), oracle.logits(IDS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_checkpoints_are_read_as_fp32(make_model: Make, tmp_path: Path, stored: torch.dtype) -> None:
    Oracle(make_model("gemma3_text"), stored).model.save_pretrained(tmp_path)
    torch.testing.assert_close(sequential(tiny_decoder(tmp_path), IDS), Oracle(tmp_path).logits(IDS), atol=1e-4, rtol=0)


def test_a_draft_model_borrows_the_head_that_was_used(make_model: Make, tmp_path: Path) -> None:
    folder = rewritten(make_model("llama"), tmp_path / "copy", True, "none")
    engine = tiny_engine(folder, "draft-model", draft_model="self:layers=0,1,2", budget=5)
    out = engine.generate(IDS, SamplingParams(30, ignore_eos=True))
    assert out.token_ids == Oracle(folder).greedy(IDS, 30)
    assert out.stats.accepted_tokens >= out.stats.draft_tokens - 1


@pytest.mark.parametrize("count", [1, 2])
def test_adapters_merge_at_load(make_model: Make, tmp_path: Path, count: int) -> None:
    peft = pytest.importorskip("peft")
    folder, oracle, paths = make_model("llama"), Oracle(make_model("llama")), []
    model: Any = oracle.model
    for number in range(count):
        config = peft.LoraConfig(
            r=2, lora_alpha=6, target_modules=["q_proj", "o_proj", "gate_proj"], init_lora_weights=False
        )
        model = peft.get_peft_model(model, config)
        paths.append(tmp_path / str(number))
        model.save_pretrained(paths[-1])
        model = model.merge_and_unload()
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    decoder = load_decoder(folder, ModelConfig.from_folder(folder), 64, CPU, torch.float32, adapters=paths)
    torch.testing.assert_close(sequential(decoder, IDS), expected, atol=1e-4, rtol=0)
    assert (expected - Oracle(folder).logits(IDS)).abs().max() > 0.01
    engine = tiny_engine(folder, "ngram", adapters=paths)
    assert engine.generate(IDS, SamplingParams(1)).token_ids == [int(expected[-1].argmax())]


def test_from_pretrained_is_the_front_door(make_model: Make) -> None:
    engine = Engine.from_pretrained(str(make_model("llama")), drafter="ngram", rule="greedy", device="cpu")
    out = engine.generate("Why is the sky blue?", SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(out.token_ids) == 8
    assert json.loads(json.dumps(out.to_dict()))["token_ids"] == out.token_ids
    assert set(out.to_dict()) >= {"text", "token_ids", "finish_reason", "stats", "logprobs"}


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", "{}"), ("tokenizer.json", "[]"), ("tokenizer.json", '{"model": {"type": "Later"}}'),
     ("tokenizer_config.json", "[]"), ("tokenizer_config.json", "{")],
)  # fmt: skip
def test_a_tokenizer_that_cannot_be_read_is_one_error(
    make_model: Make, tmp_path: Path, name: str, content: str
) -> None:
    """Whatever type the libraries raise, a bare Exception among them."""
    folder = Path(shutil.copytree(make_model("llama"), tmp_path / "broken"))
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=r"the tokenizer in .* cannot be loaded"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_length": "10"}, r"max_length must be in .* got '10'"),
        ({"max_length": 10.5}, r"max_length must be in .* got 10.5"),
        ({"budget": 2.5}, r"budget must be a whole number in \[1, 64\], got 2.5"),
        ({"rule": None}, "rule must be a name or a rule, got None"),
        ({"strict": True}, "strict mode needs fused rounds"),
    ],
)
def test_options_of_a_wrong_type_and_strict_without_kernels(
    make_model: Make, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        Engine.from_pretrained(make_model("llama"), device="cpu", **options)


def test_requests_of_a_wrong_type(make_model: Make) -> None:
    engine = tiny_engine(make_model("llama"))
    with pytest.raises(RequestError, match="params must be SamplingParams"):
        engine.generate("a", {"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="prefix must be a handle of prefill"):
        engine.generate("a", prefix="a")  # type: ignore[arg-type]


def test_an_end_of_answer_beyond_the_vocabulary_is_warned_of(make_model: Make, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make_model("llama"), tmp_path / "late"))
    edit_config(folder, eos_token_id=[2, 99999])
    with pytest.warns(UserWarning, match="eos_token_id 99999 is beyond the 300 tokens"):
        load_model(folder, device="cpu")
