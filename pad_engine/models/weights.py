"""Read a checkpoint's tensors one at a time, after every header has been checked against the files.

Next file: `lora.py`, which merges adapters into the tensors on their way.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from pad_engine.errors import ModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
_WEIGHTS = ("F64", "F32", "F16", "BF16")
# buffers that old checkpoints hold and that the model computes itself
_HARMLESS = re.compile(r"rotary_emb\.|\.masked_bias$|\.attn\.bias$")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class Entry:
    """A tensor of a safetensors file; `nbytes` as stored."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Checkpoint:
    """The tensors of a folder: one `model.safetensors`, or shards and their index. Opening reads headers alone."""

    def __init__(self, folder: Path, entries: dict[str, Entry]) -> None:
        self.folder = folder
        self._entries = entries
        self._files: dict[Path, Any] = {}

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Raises ModelError, naming file and tensor, unless index, headers and file lengths agree."""
        # in this order: transformers takes the single file where both exist
        if (folder / SINGLE).is_file():
            return cls(folder, read_header(folder / SINGLE))
        if (folder / INDEX).is_file():
            return cls(folder, _open_shards(folder))
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles:
            raise ModelError(
                f"{folder} has only pickled weights ({pickles[0]}), which can run code and are refused",
                "convert them where you trust them: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)",
            )
        raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}", "the folder of a model in safetensors is wanted")

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors."""
        return sorted({entry.file for entry in self._entries.values()})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(entry.nbytes for entry in self._entries.values())

    def names(self) -> list[str]:
        return list(self._entries)

    def has(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """The tensor in `dtype` on `device`.

        On the CPU in its stored dtype it is a private view of the mapped file, read from disk when first used.
        """
        from safetensors import safe_open

        entry = self._entry(name)
        if entry.dtype not in _WEIGHTS:
            raise ModelError(f"{entry.file}: {name} is stored as {entry.dtype}: quantised weights are not supported")
        if entry.file not in self._files:
            self._files[entry.file] = safe_open(entry.file, framework="pt", device="cpu")
        stored: Tensor = self._files[entry.file].get_tensor(name)
        return stored.to(device=device, dtype=dtype)

    def require(self, expected: dict[str, tuple[int, ...]], *, optional: Collection[str] = ()) -> None:
        """Check that the checkpoint holds `expected` (name to shape), before any weight is read.

        Raises ModelError at the first tensor that is missing, has another shape, or is not of a float dtype. Warns, in
        one line, of tensors that are neither expected nor `optional`.
        """
        for name, shape in expected.items():
            entry = self._entry(name)
            if entry.shape != tuple(shape):
                got, want = list(entry.shape), list(shape)
                raise ModelError(f"{entry.file}: {name} has shape {got}, the config asks for {want}")
            if entry.dtype not in _WEIGHTS:
                raise ModelError(
                    f"{entry.file}: {name} is stored as {entry.dtype}: quantised weights are not supported"
                )
        known = expected.keys() | set(optional)
        extra = [name for name in self._entries if name not in known and not _HARMLESS.search(name)]
        if extra:
            warnings.warn(f"{self.folder}: tensors that the model does not use: {_grouped(extra)}", stacklevel=2)

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise ModelError(f"{self.folder}: tensor {name} is missing from the checkpoint")
        return self._entries[name]


def _grouped(names: Iterable[str]) -> str:
    """One pattern for the same tensor of every layer: `model.layers.*.foo (12)`."""
    counts: dict[str, int] = {}
    for name in names:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        counts[pattern] = counts.get(pattern, 0) + 1
    return ", ".join(f"{pattern} ({count})" if "*" in pattern else pattern for pattern, count in counts.items())


def _open_shards(folder: Path) -> dict[str, Entry]:
    weight_map = _weight_map(folder / INDEX)
    shards: dict[str, dict[str, Entry]] = {}
    for name, file in weight_map.items():
        _check_shard_path(folder, name, file)
        if file not in shards:
            if not (folder / file).is_file():
                raise ModelError(
                    f"{folder / INDEX} names {file} for {name}, and there is no such file", "fetch it again"
                )
            shards[file] = read_header(folder / file)
        if name not in shards[file]:
            raise ModelError(f"{folder / file} has no tensor {name}, though {INDEX} says so", "fetch the model again")
    # like transformers, take what the shards hold beyond the index; where both speak, the index decides
    entries = {name: entry for shard in shards.values() for name, entry in shard.items()}
    return entries | {name: shards[file][name] for name, file in weight_map.items()}


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is not an index of safetensors ({error!r})") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelError(f"{path}: weight_map must map tensor names to file names")
    return weight_map


def _check_shard_path(folder: Path, name: str, file: str) -> None:
    path = PurePosixPath(file)
    # the hub's cache is made of links out of the folder, so links are followed and names are judged
    if path.is_absolute() or ".." in path.parts or "\\" in file or not file.endswith(".safetensors"):
        raise ModelError(
            f"{folder / INDEX}: {name} is said to be in {file!r}, which is refused: not a file of this folder"
        )


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file. Raises ModelError unless they tile the file exactly."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ModelError(f"{path} is not a safetensors file, or is truncated: {size} bytes", "fetch it again")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        items = [(name, *_parse(item)) for name, item in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: the safetensors header cannot be read ({error!r})") from error
    entries, end = {}, 0
    for name, dtype, shape, start, stop in sorted(items, key=lambda item: (item[3], item[4])):
        if dtype not in _ITEM_BYTES:
            raise ModelError(f"{path}: {name} has the dtype {dtype}, which is not known")
        nbytes = _ITEM_BYTES[dtype] * math.prod(shape)
        if start != end or stop - start != nbytes or any(n < 0 for n in shape):
            raise ModelError(f"{path}: {name} {dtype} {list(shape)} does not fit its offsets {start}..{stop}")
        entries[name], end = Entry(path, dtype, shape, nbytes), stop
    if 8 + length + end != size:
        raise ModelError(
            f"{path} has {size} bytes, its header says {8 + length + end}", "it is damaged: fetch it again"
        )
    return {name: entries[name] for name in header}


def _parse(item: Any) -> tuple[str, tuple[int, ...], int, int]:
    start, stop = item["data_offsets"]
    numbers = [*item["shape"], start, stop]
    if not isinstance(item["dtype"], str) or not all(type(number) is int for number in numbers):
        raise ValueError(f"{item}")
    return item["dtype"], tuple(item["shape"]), start, stop
