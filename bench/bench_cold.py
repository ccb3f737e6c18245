"""Seconds from the start of a process to its first token on a GPU, beyond importing torch and reading the weights.

    python bench/bench_cold.py --model smollm2-135m --out h100     # a short name, folder or .gguf file
    python bench/bench_cold.py --model shape:8b --out h100         # random weights of a shape of shapes.py

Each start is a process of its own (cold_start.py). The first finds no compiled kernel, the later ones find those that
it left. What the files of Python, torch and the model cost to read from disk for the first time is in neither: this
process has read them before.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch

from pad_engine.models.sources import resolve

EXCLUDED = ("torch", "weights")


def start(model: str, cache: str) -> dict[str, float]:
    """Seconds of the parts of one start with compiled kernels in the folder `cache`; RuntimeError if it fails."""
    command = [sys.executable, str(Path(__file__).parent / "cold_start.py"), repr(time.time()), model]
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"a start of {model} failed:\n{done.stderr}")
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return parts


def beyond(parts: dict[str, float]) -> float:
    """Seconds of a start that are the engine's own."""
    return sum(seconds for name, seconds in parts.items() if name not in EXCLUDED)


def result(starts: list[dict[str, float]]) -> dict[str, Any]:
    """What some starts took, of which the first found no compiled kernel."""
    fresh, *cached = starts
    seconds = {"not_cached": round(beyond(fresh), 3)}
    if cached:
        seconds["cached"] = round(median(map(beyond, cached)), 3)
    return {"seconds": seconds, "parts": {"not_cached": fresh, "cached": cached}, "excluded": EXCLUDED}


def warm_files(model: str) -> str:
    """Bring files into the system's cache, and convert a model that needs it; returns what a start is given."""
    if model.startswith("shape:"):
        return model
    folder = resolve(model, accept_terms=True)
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m", help="short name, folder, .gguf file, or shape:8b")
    parser.add_argument("--name", help="of the model in the result file, where its path does not tell it")
    parser.add_argument("--repeats", type=int, default=3, help="of the starts with compiled kernels")
    parser.add_argument("--out", required=True, help="folder of results/ for this card, h100 for instance")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    model = warm_files(args.model)
    name = args.name or Path(args.model).stem.removeprefix("shape:")
    with tempfile.TemporaryDirectory() as cache:
        starts = []
        for _ in range(1 + args.repeats):
            starts.append(start(model, cache))
            print("kernels cached" if starts[1:] else "none cached", starts[-1], flush=True)
            print(harness.save(f"cold-{name}", {"model": name} | result(starts), args.out), flush=True)


if __name__ == "__main__":
    main()
