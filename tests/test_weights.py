"""Checkpoint: what is wrong with a model folder is named before any weight is used."""

import json
import pickle
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pad_engine.errors import ModelError
from pad_engine.models.weights import INDEX, SINGLE, Checkpoint

TENSORS = {f"model.layers.{i}.mlp.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3) + i for i in range(3)}
SHAPES = dict.fromkeys(TENSORS, (2, 3))


def write_shards(folder: Path) -> dict[str, str]:
    weight_map = {}
    for i, (name, value) in enumerate(TENSORS.items(), start=1):
        weight_map[name] = f"model-0000{i}-of-00003.safetensors"
        save_file({name: value}, folder / weight_map[name])
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_raw(path: Path, header: Any, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_come_back_in_any_dtype(tmp_path: Path, sharded: bool) -> None:
    if sharded:
        write_shards(tmp_path)
    else:
        save_file(TENSORS, tmp_path / SINGLE)
    checkpoint = Checkpoint.open(tmp_path)
    assert sorted(checkpoint.names()) == sorted(TENSORS) and checkpoint.nbytes == 3 * 24
    checkpoint.require(SHAPES)
    for name, value in TENSORS.items():
        assert checkpoint.shape(name) == (2, 3)
        assert torch.equal(checkpoint.tensor(name, torch.float32), value)
        assert torch.equal(checkpoint.tensor(name, torch.bfloat16), value.bfloat16())


def test_missing_shard_is_named(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    (tmp_path / weight_map["model.layers.1.mlp.weight"]).unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003.safetensors for model.layers.1.mlp.weight"):
        Checkpoint.open(tmp_path)


def test_tensor_missing_from_its_shard_is_named(tmp_path: Path) -> None:
    write_index(tmp_path, write_shards(tmp_path) | {"lm_head.weight": "model-00003-of-00003.safetensors"})
    with pytest.raises(ModelError, match=r"model-00003-of-00003.safetensors has no tensor lm_head.weight"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("file", ["../model.safetensors", "a/../../model.safetensors", "/model.safetensors", "x.bin"])
def test_index_entries_outside_the_folder_are_refused(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    # the file exists, so only the path can be what is wrong
    save_file({"lm_head.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    write_index(folder, write_shards(folder) | {"lm_head.weight": file})
    with pytest.raises(ModelError, match=r"lm_head.weight is said to be in .*refused"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_broken_index_is_an_error(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ModelError, match="index"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("cut", [1, 30, 100])
def test_truncated_file_is_an_error(tmp_path: Path, cut: int) -> None:
    save_file(TENSORS, tmp_path / SINGLE)
    data = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(data[:-cut])
    with pytest.raises(ModelError, match=SINGLE):
        Checkpoint.open(tmp_path)
    (tmp_path / SINGLE).write_bytes(data[:cut])
    with pytest.raises(ModelError, match="truncated"):
        Checkpoint.open(tmp_path)


def item(dtype: str, shape: list[Any], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "header, message",
    [
        ({"a": item("F32", [2], 0, 4)}, "a F32"),
        ({"a": item("F32", [2], 0, 8), "b": item("F32", [1], 4, 8)}, "b F32"),
        ({"a": item("F32", [1], 4, 8)}, "a F32"),
        ({"a": item("F32", [1], 0, 4)}, "has 8?.* bytes, its header says"),
        ({"a": item("F32", [-1, -2], 0, 8)}, "a F32"),
        ({"a": item("F4_MX", [2], 0, 8)}, "dtype F4_MX"),
        ({"a": item("F32", [2.0], 0, 8)}, "header cannot be read"),
        ({"a": {"dtype": "F32"}}, "header cannot be read"),
        ([], "header cannot be read"),
    ],
)
def test_header_must_describe_the_file(tmp_path: Path, header: Any, message: str) -> None:
    write_raw(tmp_path / SINGLE, header, bytes(8))
    with pytest.raises(ModelError, match=message):
        Checkpoint.open(tmp_path)


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused_and_never_run(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(ModelError, match=name) as caught:
        Checkpoint.open(tmp_path)
    assert "convert" in caught.value.hint and not marker.exists()
    # the trap does work
    pickle.loads((tmp_path / name).read_bytes())
    assert marker.exists()


def test_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has neither"):
        Checkpoint.open(tmp_path)


def test_missing_tensor_wrong_shape_and_integers_are_named(tmp_path: Path) -> None:
    save_file(TENSORS | {"packed": torch.zeros(2, dtype=torch.int8)}, tmp_path / SINGLE)
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight is missing"):
        checkpoint.require(SHAPES | {"lm_head.weight": (4, 3)})
    with pytest.raises(ModelError, match=r"layers.2.mlp.weight has shape \[2, 3\], the config asks for \[3, 2\]"):
        checkpoint.require(SHAPES | {"model.layers.2.mlp.weight": (3, 2)}, optional=["packed"])
    with pytest.raises(ModelError, match="packed is stored as I8"):
        checkpoint.require({"packed": (2,)})
    with pytest.raises(ModelError, match="packed is stored as I8"):
        checkpoint.tensor("packed", torch.float32)


def test_unexpected_tensors_are_warned_of_in_one_line(tmp_path: Path) -> None:
    extra = {f"model.layers.{i}.odd.weight": torch.ones(1) for i in range(2)}
    harmless = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)}
    save_file(TENSORS | extra | harmless, tmp_path / SINGLE)
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.warns(UserWarning, match=r"not use: model\.layers\.\*\.odd\.weight \(2\)$") as caught:
        checkpoint.require(SHAPES)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.require(SHAPES, optional=list(extra))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_tied_and_untied_layouts(tmp_path: Path, tied: bool, head: bool) -> None:
    embed = {"model.embed_tokens.weight": torch.ones(4, 3)}
    save_file(embed | ({"lm_head.weight": torch.ones(4, 3)} if head else {}), tmp_path / SINGLE)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.has("lm_head.weight") == head
    expected = {"model.embed_tokens.weight": (4, 3)} | ({} if tied else {"lm_head.weight": (4, 3)})
    if not tied and not head:
        with pytest.raises(ModelError, match=r"lm_head\.weight is missing"):
            checkpoint.require(expected)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoint.require(expected, optional=["lm_head.weight"])
