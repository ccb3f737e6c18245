"""The draft model's own cache, and vocabularies, contexts and layers that differ from the target's."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FAMILY, Make, Oracle, edit_config, make_tiny_model, make_tokenizer, some_ids, tiny_engine

from pad_engine import SamplingParams
from pad_engine.drafters.draft_model import DraftModel
from pad_engine.errors import ModelError, RequestError
from pad_engine.loader import make_engine
from pad_engine.models.loader import load_model
from pad_engine.state import Commit, State
from pad_engine.tree import DraftTree

PROMPT = some_ids(12)


class Checked(DraftModel):
    """Before each round, compares its proposal with that of a fresh drafter which reads the committed ids at once."""

    fresh: DraftModel

    def propose(self, state: State) -> DraftTree:
        tree = super().propose(state)
        self.fresh.begin(state.ids[: state.prompt_length])
        assert (tree.tokens, tree.parents) == ((other := self.fresh.propose(state)).tokens, other.parents)
        if len(tree) > 1:
            assert self.cache.lengths == self.fresh.cache.lengths == [len(state.ids)]
        return tree

    def observe(self, commit: Commit) -> None:
        super().observe(commit)
        self.lengths = [*getattr(self, "lengths", []), commit.accepted]
        assert self.cache.depths == [[]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("trees", ["chain", "best-first"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_its_cache_is_that_of_a_fresh_one(make_model: Make, family: str, trees: str, temperature: float) -> None:
    """C05."""
    near = make_model(family, noise=0.04, tie_word_embeddings=False)
    engine = tiny_engine(
        make_model(family, tie_word_embeddings=False), "draft-model", draft_model=near, trees=trees, budget=7
    )
    drafter = engine.drafter
    options = {"num_tokens": 300, "capacity": 256, "budget": 7, "chunk": 32}
    checked = Checked(drafter.decoder, drafter.builder, **options)  # type: ignore[attr-defined]
    checked.fresh = DraftModel(drafter.decoder, drafter.builder, **options)  # type: ignore[attr-defined]
    engine.drafter = checked
    engine.generate(PROMPT, SamplingParams(90, temperature, 1, True))
    # several kinds of rewind were seen
    assert len(set(checked.lengths)) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["other-copy", "self"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_the_target_as_its_own_drafter_is_always_right(
    make_model: Make, family: str, draft: str, temperature: float
) -> None:
    """C05: 100 % acceptance over hundreds of tokens."""
    folder = make_model(family, max_position_embeddings=512)
    model = folder if draft == "other-copy" else "self:layers=0,1,2"
    engine = tiny_engine(folder, "draft-model:depth=5", draft_model=model)
    stats = engine.generate(PROMPT, SamplingParams(320, temperature, 3, True)).stats
    # the last round may draft what the limit then cuts
    assert stats.draft_tokens - stats.accepted_tokens <= 1
    assert stats.mean_accept_length > 4.9


def test_plain_rounds_between_drafts_are_caught_up(make_model: Make) -> None:
    folder = make_model("mistral")
    engine = tiny_engine(folder, "draft-model", draft_model="self:layers=0,1,2", budget=5)
    decide, rounds = engine.controller.decide, iter(range(10_000))

    def now_and_then(evidence: int, remaining: int, pinned: bool) -> Any:
        return decide(-1 if next(rounds) % 7 else evidence, remaining, pinned)

    engine.controller.decide = now_and_then  # type: ignore[method-assign]
    out = engine.generate(PROMPT, SamplingParams(80, ignore_eos=True))
    assert out.token_ids == Oracle(folder).greedy(PROMPT, 80)
    assert out.stats.accepted_tokens == out.stats.draft_tokens > 20


def padded(source: Path, folder: Path, rows: int) -> Path:
    """The same function with more rows in both matrices of the vocabulary; were they not masked they would win."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat((tensors[name], 9 * torch.randn(rows - len(tensors[name]), 48)))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return edit_config(folder, vocab_size=rows)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("trees", ["chain", "best-first"])
@pytest.mark.parametrize(("target_rows", "draft_rows"), [(320, 300), (300, 320), (300, 290), (290, 300)], ids=str)
def test_vocabularies_padded_differently(
    make_model: Make, tmp_path: Path, target_rows: int, draft_rows: int, trees: str, temperature: float
) -> None:
    """C16: 290 tokens, and matrices of more rows than that."""
    real = make_model("llama", vocab_size=290, tokens=290)
    target, draft = padded(real, tmp_path / "t", target_rows), padded(real, tmp_path / "d", draft_rows)
    params = SamplingParams(60, temperature, 5, True)
    expected = tiny_engine(real).generate(PROMPT, params).token_ids
    if temperature == 0:
        assert expected == Oracle(real).greedy(PROMPT, 60)
    out = tiny_engine(target, "draft-model", draft_model=draft, trees=trees, budget=6).generate(PROMPT, params)
    assert out.token_ids == expected
    assert out.stats.mean_accept_length > 1


def test_a_tokenizer_longer_than_the_draft_models_vocabulary(make_model: Make) -> None:
    """Tokens that only the target knows are read by the draft model too, whatever it makes of them."""
    folder = make_model("llama")
    draft = make_model("llama", seed=5, vocab_size=280, tokens=280)
    ids = [1, 295, 2, 299, 281]
    engine = tiny_engine(folder, "draft-model", draft_model=draft, budget=4)
    assert engine.generate(ids, SamplingParams(30, ignore_eos=True)).token_ids == Oracle(folder).greedy(ids, 30)


def with_tokenizer(source: Path, folder: Path, **options: Any) -> Path:
    shutil.copytree(source, folder)
    make_tokenizer(**options).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("swap", "first"), [((97, 120), 97), ((0, 255), 0), ((270, 299), 270)], ids=str)
def test_tokenizers_that_differ_are_refused(make_model: Make, tmp_path: Path, swap: Any, first: int) -> None:
    """C16: with the first id that differs."""
    draft = with_tokenizer(make_model("llama"), tmp_path / "draft", swap=swap)
    with pytest.raises(ModelError, match=rf"different tokenizers: id {first} "):
        tiny_engine(make_model("llama"), "draft-model", draft_model=draft)


@pytest.mark.parametrize("trees", ["chain", "best-first"])
@pytest.mark.parametrize("prompt", [10, 60, 64, 70])
def test_a_draft_model_with_a_shorter_context(make_model: Make, prompt: int, trees: str) -> None:
    """It stops drafting when its context is full, and the target goes on."""
    folder, draft = make_model("llama"), make_model("llama", noise=0.03, max_position_embeddings=64)
    ids = some_ids(prompt)
    engine = tiny_engine(folder, "draft-model", draft_model=draft, trees=trees, budget=8)
    out = engine.generate(ids, SamplingParams(90, ignore_eos=True))
    assert out.token_ids == Oracle(folder).greedy(ids, 90)
    assert (out.stats.accepted_tokens > 0) == (prompt < 60) or prompt == 60


@pytest.mark.parametrize("family", FAMILY)
def test_layers_left_out_keep_their_own_windows_and_weights(make_model: Make, tmp_path: Path, family: str) -> None:
    """self:drop=0 drafts what a model without layer 0 would say."""
    folder = make_model(family)
    smaller = tmp_path / "smaller"
    shutil.copytree(folder, smaller)
    tensors = load_file(folder / "model.safetensors")
    kept = {name.replace("layers.1.", "layers.0.").replace("layers.2.", "layers.1."): value
            for name, value in tensors.items() if "layers.0." not in name}  # fmt: skip
    save_file(kept, smaller / "model.safetensors", {"format": "pt"})
    edit_config(smaller, num_hidden_layers=2)
    if "layer_types" in (options := FAMILY[family]):
        edit_config(smaller, layer_types=options["layer_types"][1:])
    elif family == "qwen2":
        edit_config(smaller, layer_types=["full_attention", "sliding_attention"])
    elif family == "qwen3":
        edit_config(smaller, "layer_types")
    drafts = []
    for model in ("self:drop=0", smaller):
        engine = tiny_engine(folder, "draft-model", draft_model=model, budget=4)
        trees: list[DraftTree] = []
        observe = engine.drafter.observe
        engine.drafter.observe = lambda c, o=observe, t=trees: (t.append(c.tree), o(c))  # type: ignore
        engine.generate(some_ids(20), SamplingParams(30, ignore_eos=True))
        drafts.append([tree.tokens for tree in trees])
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"draft_model": None}, "draft_model"),
        ({"draft_model": "self:drop=9"}, r"\[0, 2\]"),
        ({"draft_model": "self:drop=0,1,2"}, "keeps no layer"),
        ({"draft_model": "self:drop=x"}, "whole numbers"),
        ({"draft_model": "self:"}, "self:layers"),
        ({"draft_model": "self:keep=1"}, "self:layers"),
        ({"drafter": "draft-model:depth=0", "draft_model": "self:drop=1"}, "depth"),
        ({"drafter": "draft-model:deep=2", "draft_model": "self:drop=1"}, "deep"),
        ({"drafter": "eagle"}, "eagle"),
        ({"drafter": "ngram:min=0"}, "min"),
        ({"drafter": "ngram", "draft_model": "self:drop=1"}, "draft_model"),
        ({"drafter": "none", "trees": "bush"}, "bush"),
        ({"drafter": "none", "budget": 0}, "budget"),
        ({"drafter": "none", "budget": 65}, "budget"),
        ({"drafter": "none", "rule": "typicality"}, "typicality"),
        ({"drafter": "none", "max_length": 1000}, "max_length"),
        ({"drafter": "none", "max_length": 1}, "max_length"),
        ({"drafter": "none", "dtype": "int8"}, "int8"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(make_model: Make, options: dict[str, Any], named: str) -> None:
    with pytest.raises((RequestError, ModelError), match=named):
        tiny_engine(make_model("llama"), **{"drafter": "draft-model"} | options)


def test_load_writes_nothing(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m")
    before = sorted((p.name, p.stat().st_size) for p in folder.iterdir())
    tiny_engine(folder, "draft-model", draft_model="self:drop=1").generate([1], SamplingParams(2))
    assert sorted((p.name, p.stat().st_size) for p in folder.iterdir()) == before


def test_the_cache_of_a_self_draft_is_counted(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(make_model("llama"), device="cpu", max_length=256)
    monkeypatch.setattr("pad_engine.models.memory.available_memory", lambda: 10_000)
    with pytest.raises(ModelError, match=r"needed on cpu.*KV cache"):
        make_engine(loaded, draft_model="self:layers=0,1")
