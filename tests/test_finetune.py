"""Fine-tuning: the loss is that of the solution, what is learnt comes back through our own loader, and a training that
was cut off gives what one in one piece gives."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import bench_module
from tiny import CPU, EOS, Make, Oracle, sequential, some_ids, tiny_decoder, tiny_engine
from torch import nn

from pad_engine import SamplingParams
from pad_engine.errors import ModelError, RequestError
from pad_engine.models.config import ModelConfig
from pad_engine.models.loader import load_decoder, load_tokenizer
from pad_engine.training import finetune
from pad_engine.training.finetune import LoRALinear, Settings
from pad_engine.training.tasks.task import Question

IDS = some_ids(24)
WORDS = ("red", "blue", "green", "pink", "grey")


class Colours:
    """The next word of a circle."""

    name, max_tokens = "colours", 8

    def questions(self, split: str, count: int | None = None, seed: int = 0) -> Iterator[Question]:
        return iter([Question(word, f"{word} ->", word_after(word)) for word in WORDS])

    def extract(self, text: str) -> str | None:
        return text.strip() or None

    def utility(self, question: Question, text: str) -> int:
        return int(self.extract(text) == question.answer)

    def examples(self) -> Iterator[tuple[Question, str]]:
        while True:
            yield from ((question, f" {question.answer}") for question in self.questions("train"))


def word_after(word: str) -> str:
    return WORDS[(WORDS.index(word) + 1) % len(WORDS)]


def rows(folder: Path) -> Iterator[tuple[list[int], int]]:
    return finetune.encode_examples(load_tokenizer(folder), Colours().examples(), 300)


def train(folder: Path, checkpoint: Path, settings: Settings, lora: bool = True, minutes: float = 9.0) -> Any:
    torch.manual_seed(settings.seed)
    model = finetune.load_base(folder)
    if lora:
        finetune.add_lora(model, rank=4, alpha=8.0)
    progress = finetune.fit(model, rows(folder), settings, device=CPU, checkpoint=checkpoint, minutes=minutes)
    return model, progress


def test_examples_go_on_from_the_prompts_ids_and_end(make_model: Make) -> None:
    ids, length = next(rows(make_model()))
    assert bytes(ids[:length]) == b"red ->" and bytes(ids[length:-1]) == b" blue" and ids[-1] == EOS
    tokenizer = load_tokenizer(make_model())
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="names no end of sequence"):
        next(finetune.encode_examples(tokenizer, Colours().examples(), 300))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_loss_is_the_mean_over_the_solutions_tokens(make_model: Make, family: str) -> None:
    folder = make_model(family)
    batch = [(IDS[:9], 4), (IDS[:24], 20), (IDS[3:8], 1)]
    oracle, losses = Oracle(folder), []
    for ids, length in batch:
        logits = oracle.logits(ids)[length - 1 : -1]
        losses += nn.functional.cross_entropy(logits, torch.tensor(ids[length:]), reduction="none").tolist()
    loss = finetune.loss_of(finetune.load_base(folder), batch, CPU)
    assert loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_learning_rate_rises_and_falls() -> None:
    settings = Settings(steps=110, warmup=10)
    rates = [settings.rate(step) for step in range(110)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and rates[60] == pytest.approx(0.5)
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] < 1e-3


@pytest.mark.slow
def test_compiled_blocks_learn_the_same(make_model: Make) -> None:
    batches = [[(IDS[:9], 4), (IDS[:24], 20)], [(IDS[3:20], 1)], [([*IDS, *IDS, *IDS], 30)]]  # of two lengths
    losses, folder = [], make_model()  # made ahead of the seed: its weights are random too
    for compiled in (False, True):
        torch.manual_seed(0)
        model = finetune.load_base(folder)
        finetune.add_lora(model, rank=4, alpha=8.0)
        if compiled:
            finetune.compile_blocks(model)
        optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.5)
        for batch in batches * 2:
            optimizer.zero_grad()
            losses.append(finetune.loss_of(model, batch, CPU))
            losses[-1].backward()
            optimizer.step()
    half = len(losses) // 2
    torch.testing.assert_close(losses[half:], losses[:half], rtol=1e-5, atol=1e-6)
    assert losses[3] < losses[0]  # learnt, so that the gradients were compared


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_adapter_comes_back_through_our_loader_and_peft(make_model: Make, tmp_path: Path, family: str) -> None:
    folder = make_model(family)
    before = Oracle(folder).logits(IDS)
    torch.manual_seed(1)
    model = finetune.load_base(folder)
    finetune.add_lora(model, rank=4, alpha=8.0)
    with torch.no_grad():
        torch.testing.assert_close(model(torch.tensor([IDS])).logits[0], before)  # b is zero: nothing is changed yet
    settings = Settings(steps=40, batch=5, learning_rate=1e-2, warmup=2)
    progress = finetune.fit(model, rows(folder), settings, device=CPU, checkpoint=tmp_path / "c")
    assert progress.step == 40 and progress.curve[-1][1] < 0.5 * progress.curve[0][1]
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    assert len(layers) == 3 * 7
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == {
        name for name, _ in model.named_parameters() if name.endswith((".a.weight", ".b.weight"))
    }
    for layer in layers:
        for half in (layer.a, layer.b):
            half.weight.data = half.weight.data.half().float()  # as it is saved
    with torch.no_grad():
        learnt = model(torch.tensor([IDS])).logits[0]
    assert (learnt - before).abs().max() > 0.1
    finetune.save_lora(model, tmp_path / "adapter", "tiny")
    decoder = load_decoder(
        folder, ModelConfig.from_folder(folder), 64, CPU, torch.float32, adapters=[tmp_path / "adapter"]
    )
    torch.testing.assert_close(sequential(decoder, IDS), learnt, rtol=1e-4, atol=1e-4)
    peft = pytest.importorskip("peft")
    other = peft.PeftModel.from_pretrained(finetune.load_base(folder), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(other(torch.tensor([IDS])).logits[0], learnt, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_layers_that_are_kept_are_those_of_a_self_draft(make_model: Make, tmp_path: Path, family: str) -> None:
    folder = make_model(family)
    model = finetune.load_base(folder)
    finetune.keep_layers(model, [0, 2])
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0]
    whole = tiny_decoder(folder).with_layers([0, 2])
    torch.testing.assert_close(sequential(whole, IDS), logits, rtol=1e-4, atol=1e-4)
    finetune.save_model(model, load_tokenizer(folder), tmp_path / "drafter")
    loaded = tiny_decoder(tmp_path / "drafter")
    assert loaded.config.num_layers == 2
    saved = Oracle(tmp_path / "drafter").logits(IDS)  # rounded to bf16
    torch.testing.assert_close(sequential(loaded, IDS), saved, rtol=1e-4, atol=1e-4)
    assert (saved - logits).abs().max() < 0.1 * logits.abs().max()
    for layers in ([], [2, 0], [0, 0], [0, 3], [-1, 0]):
        with pytest.raises(RequestError, match=r"layers must be rising numbers in \[0,"):
            finetune.keep_layers(finetune.load_base(folder), layers)


def test_a_pruned_model_learns_the_task(make_model: Make, tmp_path: Path) -> None:
    folder, task = make_model(), Colours()
    model = finetune.load_base(folder)
    finetune.keep_layers(model, [0, 2])
    settings = Settings(steps=60, batch=5, learning_rate=1e-2, warmup=5)
    finetune.fit(model, rows(folder), settings, device=CPU, checkpoint=tmp_path / "c")
    finetune.save_model(model, load_tokenizer(folder), tmp_path / "drafter")
    right = []
    for path in (folder, tmp_path / "drafter"):
        engine = tiny_engine(path)
        params = SamplingParams(task.max_tokens)
        questions = list(task.questions("test"))
        right.append(
            finetune.exact_match(task, lambda ps, e=engine, p=params: [e.generate(x, p).text for x in ps], questions)
        )
    assert right == [0.0, 1.0]


def test_a_training_in_pieces_is_the_training(make_model: Make, tmp_path: Path) -> None:
    folder, settings = make_model(), Settings(steps=30, batch=2, warmup=3, seed=5)
    whole, progress = train(folder, tmp_path / "whole", settings)
    steps = []
    for _ in range(3):
        # no time at all: a piece ends at the first entry of the curve, and leaves a checkpoint
        pieces, part = train(folder, tmp_path / "pieces", settings, minutes=0.0)
        steps.append(part.step)
    assert steps == [10, 20, 30] and part.curve == progress.curve and len(part.curve) == 3
    for (name, weight), other in zip(whole.named_parameters(), pieces.parameters(), strict=True):
        assert torch.equal(weight, other), name
    assert [path.name for path in tmp_path.iterdir()] == ["pieces"]
    with pytest.raises(RequestError, match="made with other settings"):
        train(folder, tmp_path / "pieces", Settings(steps=31, batch=2, warmup=3, seed=5))
    with pytest.raises(RequestError, match="made with other settings"):
        train(folder, tmp_path / "pieces", settings, lora=False)


def test_examples_that_end_too_early_are_an_error(make_model: Make, tmp_path: Path) -> None:
    model = finetune.load_base(make_model())
    few = [row for row, _ in zip(rows(make_model()), range(5), strict=False)]
    with pytest.raises(RequestError, match="the examples end in step 3 of 4"):
        finetune.fit(model, few, Settings(steps=4, batch=2), device=CPU, checkpoint=tmp_path / "c")


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def write(out: Path, text: str) -> None:
        out.mkdir()
        (out / text).write_text(text)
        if text == "bad":
            raise OSError("no space")

    for text in ("one", "two"):
        finetune.replace_folder(folder, lambda out, text=text: write(out, text))
    with pytest.raises(OSError, match="no space"):
        finetune.replace_folder(folder, lambda out: write(out, "bad"))
    assert [path.name for path in folder.iterdir()] == ["two"]


def test_stages_of_the_pair(make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(max_position_embeddings=1024)
    pairs = bench_module("pairs")

    def run(*words: str) -> None:
        options = ["--out", tmp_path, "--results", tmp_path / "results", "--model", folder, "--layers", "0,2"]
        options += ["--steps", "20", "--batch", "1", "--questions", "1", "--device", "cpu", *words]
        monkeypatch.setattr("sys.argv", ["pairs.py", *map(str, options)])
        pairs.main()

    with pytest.raises(SystemExit, match="not done yet"):
        run("target", "--minutes", "0")
    assert not (tmp_path / "target").exists()
    run("target", "--minutes", "0")
    run("drafter-mixed")
    assert (tmp_path / "target" / "adapter_model.safetensors").stat().st_size < 12e6
    assert not list(tmp_path.glob("*.checkpoint"))
    result = json.loads((tmp_path / "results" / "pairs-drafter-mixed.json").read_text())
    assert result["layers"] == [0, 2] and result["task"] == "word-problems:digits=2,wording=mixed:0.5"
    assert len(result["curve"]) == 2 and result["right_by_digits"] == {"1": 0.0, "2": 0.0}
    drafter = {"drafter": "draft-model", "draft_model": tmp_path / "drafter-mixed"}
    engine = tiny_engine(folder, adapters=[tmp_path / "target"], **drafter)
    assert len(engine.generate(IDS, SamplingParams(5)).token_ids) == 5
