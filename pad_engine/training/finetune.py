"""Fine-tuning of small Hugging Face models on a task's worked solutions: a low-rank adapter on the whole model, or all
weights of one that keeps a part of its layers.

LoRA (arXiv 2106.09685) is two small matrices beside each linear layer of the blocks; they are saved as PEFT does, which
models/lora.py merges at load. That is so little that peft itself is not needed. Next to read: bench/pairs.py.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pad_engine.errors import ModelError, RequestError
from pad_engine.models.lora import CONFIG, WEIGHTS
from pad_engine.prompt import encode
from pad_engine.training.tasks.task import Prompt, Question, Task

SAVE_EVERY = 200  # steps
ALIGNED = 64  # lengths of batches are multiples of it: the compiled blocks serve few shapes
LOG_EVERY = 10
MAX_NORM = 1.0  # of a gradient


@dataclass(frozen=True)
class Settings:
    """steps of `batch` examples each. learning_rate: at its highest, after `warmup` steps; then it falls to zero along
    a cosine. seed: of the examples, and of new weights where whoever makes them sets it."""

    steps: int = 600
    batch: int = 64
    learning_rate: float = 1e-3
    warmup: int = 30
    seed: int = 0

    def rate(self, step: int) -> float:
        """The share of the learning rate that a step takes."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return 0.5 * (1.0 + math.cos(math.pi * (step - self.warmup) / max(1, self.steps - self.warmup)))


@dataclass
class Progress:
    """step: how many are done. curve: (step, mean loss since the last entry) every LOG_EVERY steps. seconds: of all
    runs together."""

    step: int = 0
    seconds: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)


class LoRALinear(nn.Module):
    """A frozen linear layer, and what is learnt beside it: base(x) + alpha / rank * b(a(x)); b starts at zero."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.scale * self.b(self.a(x))
        return out


def load_base(folder: Path) -> Any:
    """A model folder as transformers has it, in fp32: what is learnt needs the digits."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)


def add_lora(model: Any, rank: int = 16, alpha: float = 32.0) -> None:
    """Freeze a model and put an adapter beside every linear layer of its blocks."""
    model.requires_grad_(False)
    for block in model.base_model.layers:
        for module in list(block.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, LoRALinear(child, rank, alpha))


def narrow_frozen(model: Any) -> None:
    """Keep the frozen weights of adapted layers in bf16, as autocast multiplies by them: else it would round them anew
    in every pass."""
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.base.to(torch.bfloat16)


def compile_blocks(model: Any) -> None:
    """Compile a model's blocks in place, all by the code of one of them: a block of a small model is some hundred
    kernels and as many words from the host, and the host is what a step waits for."""
    for block in model.base_model.layers:
        block.compile()


def save_lora(model: Any, folder: Path, base: str) -> None:
    """Write the adapter as PEFT does, in fp16: 9.8 MB for SmolLM2-135M at rank 16. base: the model it belongs to."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    tensors = {}
    for name, layer in layers.items():
        for side, half in (("A", layer.a), ("B", layer.b)):
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = half.weight.detach().half().cpu().contiguous()
    first = next(iter(layers.values()))
    rank = first.a.out_features
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
        "lora_alpha": first.scale * rank, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}), "inference_mode": True,
    }  # fmt: skip

    def write(out: Path) -> None:
        out.mkdir()
        save_file(tensors, out / WEIGHTS)
        (out / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    replace_folder(folder, write)


def keep_layers(model: Any, layers: Sequence[int]) -> None:
    """Leave out all blocks but these, in place. RequestError unless they are some, in their order."""
    count = len(model.base_model.layers)
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < count:
        raise RequestError(f"layers must be rising numbers in [0, {count - 1}], got {list(layers)}")
    take_layers(model, layers)


def take_layers(model: Any, layers: Sequence[int]) -> None:
    """The same with any of a model's blocks."""
    config, blocks = model.config, model.base_model.layers
    model.base_model.layers = nn.ModuleList(blocks[layer] for layer in layers)
    for index, block in enumerate(model.base_model.layers):
        block.self_attn.layer_idx = index
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a whole model in bf16, with its tokenizer."""

    def write(out: Path) -> None:
        model.to(torch.bfloat16).save_pretrained(out)
        tokenizer.save_pretrained(out)

    replace_folder(folder, write)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a new folder and put it in the place of another, so that it is there whole or not at all."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    write(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def encode_examples(
    tokenizer: Any, examples: Iterable[tuple[Question, str]], num_tokens: int
) -> Iterator[tuple[list[int], int]]:
    """Ids of prompt, solution and end of sequence, and how many are the prompt's. The prompt is encoded by itself, as
    the engine does, so that the model learns to go on from the same ids."""
    end = tokenizer.eos_token_id
    if end is None:
        raise ModelError("the tokenizer names no end of sequence, so a model cannot learn to end an answer")
    for question, solution in examples:
        prompt = encode(tokenizer, question.prompt, num_tokens)
        yield [*prompt, *tokenizer(solution, add_special_tokens=False).input_ids, end], len(prompt)


def loss_of(model: Any, rows: Sequence[tuple[list[int], int]], device: torch.device) -> Tensor:
    """Mean cross-entropy of the solutions' tokens, in nats. Rows are padded on the right, where no token looks, so that
    attention needs no mask; the LM head sees only the places that count."""
    length = -(-max(len(ids) for ids, _ in rows) // ALIGNED) * ALIGNED
    ids = torch.tensor([[*ids, *[0] * (length - len(ids))] for ids, _ in rows])
    places = torch.arange(1, length)
    starts, ends = (torch.tensor(numbers)[:, None] for numbers in zip(*((n, len(i)) for i, n in rows), strict=True))
    wanted = (places >= starts) & (places < ends)  # [B, length - 1], of the token at each place
    # what counts is worked out on the host, which then need not wait for the device
    before = nn.functional.pad(wanted, (0, 1)).flatten().nonzero()[:, 0].to(device, non_blocking=True)
    tokens = ids[:, 1:][wanted].to(device, non_blocking=True)
    ids = ids.to(device, non_blocking=True)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # [B, length, d]
        logits = model.get_output_embeddings()(hidden.flatten(0, 1)[before])
    return nn.functional.cross_entropy(logits.float(), tokens)


def fit(
    model: Any,
    rows: Iterable[tuple[list[int], int]],
    settings: Settings,
    *,
    device: torch.device,
    checkpoint: Path,
    minutes: float = math.inf,
) -> Progress:
    """Train what requires a gradient; returns early, with a checkpoint, when the minutes are over. A checkpoint that is
    there is gone on from, and gives what a run in one piece gives.

    rows: as encode_examples gives them, from the first one on; steps times batch of them are taken.
    """
    start = time.monotonic()
    model.to(device).train()
    if device.type == "cuda":
        narrow_frozen(model)
        compile_blocks(model)
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(weights.values(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    progress = restore(checkpoint, weights, optimizer, settings)
    before, total = progress.seconds, torch.zeros((), device=device)
    source = islice(rows, progress.step * settings.batch, None)
    while progress.step < settings.steps:
        batch = list(islice(source, settings.batch))
        if len(batch) < settings.batch:
            raise RequestError(f"the examples end in step {progress.step + 1} of {settings.steps}")
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * settings.rate(progress.step)
        loss = loss_of(model, batch, device)
        loss.backward()
        nn.utils.clip_grad_norm_(weights.values(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        total += loss.detach()
        if progress.step % LOG_EVERY == 0:
            progress.curve.append((progress.step, round(float(total) / LOG_EVERY, 4)))
            total.zero_()
        progress.seconds = before + time.monotonic() - start
        over = time.monotonic() - start > 60 * minutes and progress.step % LOG_EVERY == 0
        if over or progress.step % SAVE_EVERY == 0:
            save_checkpoint(checkpoint, weights, optimizer, settings, progress)
        if over:
            break
    return progress


def save_checkpoint(
    path: Path, weights: dict[str, nn.Parameter], optimizer: Any, settings: Settings, progress: Progress
) -> None:
    """Everything that fit needs to go on."""
    state = {
        "settings": asdict(settings), "progress": asdict(progress), "optimizer": optimizer.state_dict(),
        "weights": {name: weight.detach() for name, weight in weights.items()},
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def restore(path: Path, weights: dict[str, nn.Parameter], optimizer: Any, settings: Settings) -> Progress:
    """Put back what a checkpoint holds, if there is one; RequestError if it is of another training."""
    if not path.is_file():
        return Progress()
    # tensors and plain numbers alone, never code
    state = torch.load(path, weights_only=True, map_location="cpu")
    if state["settings"] != asdict(settings) or state["weights"].keys() != weights.keys():
        raise RequestError(f"{path} was made with other settings: {state['settings']}", "remove it to start anew")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(state["weights"][name])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def exact_match(task: Task, decode: Callable[[list[Prompt]], list[str]], questions: Sequence[Question]) -> float:
    """Share of questions that a decoder answers rightly."""
    texts = decode([question.prompt for question in questions])
    return sum(task.utility(question, text) for question, text in zip(questions, texts, strict=True)) / len(questions)
