"""What tells a model from others of the same name: one that was trained again at the same place has another digest.

A file of at most 32 MiB counts whole. Of a larger one, which may take seconds to read, its size, its first MiB and 256
spans of 4 KiB count, which are spread evenly over the rest. A safetensors file begins with names, types and shapes, and
training changes nearly every number, so weights that were trained, merged or rounded anew are told; a few numbers that
were edited by hand may not be. Next file: `loader.py`.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from pad_engine.models.lora import CONFIG, WEIGHTS
from pad_engine.models.weights import Checkpoint

WHOLE, HEAD = 32 << 20, 1 << 20
SPANS, SPAN = 256, 4096
# beside the weights, what decides which ids come in and go out, where a folder has it
BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def model_digest(folder: Path) -> str:
    """Of a model's weights, config and tokenizer."""
    beside = [path for name in BESIDE if (path := folder / name).is_file()]
    return digest_of([*Checkpoint.open(folder).files, *beside])


def adapter_digest(folder: Path) -> str:
    """Of a LoRA adapter's weights and config."""
    return digest_of([folder / WEIGHTS, folder / CONFIG])


def digest_of(files: Iterable[Path]) -> str:
    """A SHA-256 over the names, the sizes and what counts of the content of files."""
    found = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        # unbuffered, as a buffer would read far more than a span
        with path.open("rb", buffering=0) as file:
            for start, length in spans(size):
                file.seek(start)
                found.update(file.read(length))
    return found.hexdigest()


def spans(size: int) -> list[tuple[int, int]]:
    """Where what counts of a file of this size begins, and how long it is."""
    if size <= WHOLE:
        return [(0, size)]
    rest = size - HEAD - SPAN
    return [(0, HEAD), *((HEAD + rest * i // (SPANS - 1), SPAN) for i in range(SPANS))]
