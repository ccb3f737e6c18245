"""`pad info`: what this machine and this installation offer, and what a model is."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pad_engine.serving.terminal import fetch, reported

if TYPE_CHECKING:
    import torch

NAME_WIDTH = 18


def info(
    model: Annotated[
        str | None, typer.Option(help="Describe this model too; it is fetched if it is not here yet.")
    ] = None,
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="Accept the terms that a model is under.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Show what is installed and what it runs on; with --model, a model's sizes and memory."""
    with reported():
        facts = machine_facts()
        if model is not None:
            facts["model"] = {"name": model} | model_facts(fetch(model, accept_terms))
        print(json.dumps(facts) if as_json else "\n".join(lines(facts)))


def machine_facts() -> dict[str, Any]:
    """Versions, processor, cards, libpad and cache."""
    import torch

    from pad_engine import __version__, native
    from pad_engine.models.cache import cache_root

    return {
        "pad_engine": __version__,
        "libpad": native.version() or None,
        "libpad_missing": native.missing_reason() or None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "triton": installed("triton"),
        "transformers": installed("transformers"),
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "gpus": [gpu_facts(index) for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)],
        "cache": str(cache_root()),
    }


def installed(package: str) -> str | None:
    """A package's version, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's own name for itself; not every platform gives one."""
    try:
        names = [
            line.partition(":")[2].strip() for line in path.read_text().splitlines() if line.startswith("model name")
        ]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def machine_name(device: "torch.device") -> str:
    """What a device is, as far as speeds depend on it: its card, or its processor with the threads that are used."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def gpu_facts(index: int) -> dict[str, Any]:
    """One card."""
    import torch

    card = torch.cuda.get_device_properties(index)
    return {"name": card.name, "memory": card.total_memory, "compute_capability": f"{card.major}.{card.minor}"}


def model_facts(folder: Path) -> dict[str, Any]:
    """A model's sizes, and the memory it takes with the default device, type and context. Reads no weights."""
    from dataclasses import asdict
    from math import prod

    from pad_engine.models.config import ModelConfig
    from pad_engine.models.decoder import expected_tensors
    from pad_engine.models.loader import load_tokenizer, memory_need, pick_device, pick_dtype, pick_length
    from pad_engine.models.weights import read_header

    config = ModelConfig.from_folder(folder)
    tokenizer = load_tokenizer(folder)
    entries = [entry for path in folder.glob("*.safetensors") for entry in read_header(path).values()]
    device, length = pick_device("auto"), pick_length(None, config)
    dtype = pick_dtype("auto", device)
    need = memory_need(config, length, device, dtype)
    own_eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return {
        "path": str(folder),
        "family": config.family,
        "parameters": sum(prod(shape) for shape in expected_tensors(config).values()),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "context": config.max_position_embeddings,
        "sliding_layers": sum(window is not None for window in config.windows),
        "dtypes_on_disk": sorted({entry.dtype for entry in entries}),
        "bytes_on_disk": sum(entry.nbytes for entry in entries),
        "eos_token_ids": list(dict.fromkeys(config.eos_token_ids + own_eos)),
        "chat_template": bool(getattr(tokenizer, "chat_template", None)),
        "memory": asdict(need)
        | {
            "total": need.total,
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "max_length": length,
        },
    }


def lines(facts: dict[str, Any]) -> list[str]:
    """The same for people."""
    facts = dict(facts)
    model = facts.pop("model", None)
    missing, gpus, cuda = facts.pop("libpad_missing"), facts.pop("gpus"), facts.pop("torch_cuda")
    facts["libpad"] = facts["libpad"] or missing
    facts["torch"] += f", CUDA {cuda}" if cuda else ", no CUDA"
    facts["triton"] = facts["triton"] or "missing"
    facts["cpu"] += f", {facts.pop('cpus')} CPUs, {facts.pop('torch_threads')} threads"
    facts["gpu"] = "; ".join(
        f"{gpu['name']}, {size(gpu['memory'])}, compute capability {gpu['compute_capability']}" for gpu in gpus
    )
    facts["gpu"] = facts["gpu"] or "no GPU"
    return [row(name, value) for name, value in facts.items()] + (model_lines(model) if model else [])


def model_lines(model: dict[str, Any]) -> list[str]:
    """A model's facts for people."""
    model = dict(model)
    memory, name = model.pop("memory"), model.pop("name")
    model["parameters"] = f"{model['parameters'] / 1e6:.1f} M"
    model["on disk"] = f"{size(model.pop('bytes_on_disk'))}, {', '.join(model.pop('dtypes_on_disk'))}"
    model["chat_template"] = "yes" if model["chat_template"] else "no"
    model["eos_token_ids"] = ", ".join(map(str, model["eos_token_ids"]))
    model["memory"] = (
        f"{size(memory['total'])} on {memory['device']} in {memory['dtype']} for {memory['max_length']} tokens: "
        f"weights {size(memory['weights'])}, KV cache {size(memory['kv_cache'])}, scratch {size(memory['scratch'])}"
    )
    return ["", row("model", name), *(row(key, value) for key, value in model.items())]


def row(name: str, value: Any) -> str:
    """One aligned line."""
    return f"{name.replace('_', ' '):{NAME_WIDTH}} {value}"


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
