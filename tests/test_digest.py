"""Digests of models: what changes them, what does not, and how little is read of a large file."""

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_lora import write_adapter
from tiny import Make

from pad_engine.models import digest
from pad_engine.models.digest import adapter_digest, digest_of, model_digest, spans


def retrained(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] += 0.01
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def other_context(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))


def other_end(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')


@pytest.mark.parametrize("change", [retrained, other_context, other_end])
def test_a_models_digest_is_that_of_its_content(
    change: Callable[[Path], None], make_model: Make, tmp_path: Path
) -> None:
    model = make_model("llama")
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "README.md").write_text("not the model")
    (copy / "pivot.safetensors").write_bytes(b"not the model's")
    assert model_digest(copy) == model_digest(model) != model_digest(make_model("llama", noise=0.1))
    change(copy)
    assert model_digest(copy) != model_digest(model)


def test_an_adapters_digest_is_that_of_its_content(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one = write_adapter(tmp_path / "one")
    copy = shutil.copytree(one, tmp_path / "copy")
    assert adapter_digest(copy) == adapter_digest(one) != adapter_digest(write_adapter(tmp_path / "other"))
    before = adapter_digest(one)
    write_adapter(copy, load_file(one / "adapter_model.safetensors"), lora_alpha=9)
    assert adapter_digest(copy) != before


def test_of_a_large_file_spans_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first byte to its last, never beyond them; of 16 GB no more than a few megabytes."""
    for size in (digest.WHOLE + 1, 5_000_000_000, 16 << 30):
        (start, head), *rest = spans(size)
        assert (start, head, rest[0][0]) == (0, digest.HEAD, digest.HEAD) and sum(rest[-1]) == size
        gaps = {after[0] - before[0] for before, after in pairwise(rest)}
        assert len(rest) == 256 and max(gaps) - min(gaps) <= 1 and min(gaps) > digest.SPAN
        assert sum(length for _, length in spans(size)) == 2 << 20
    assert spans(digest.WHOLE) == [(0, digest.WHOLE)] and spans(0) == [(0, 0)]
    monkeypatch.setattr(digest, "WHOLE", 100)
    monkeypatch.setattr(digest, "HEAD", 10)
    monkeypatch.setattr(digest, "SPAN", 2)
    path, data = tmp_path / "w.safetensors", bytearray(2000)
    path.write_bytes(data)
    plain = digest_of([path])
    counted = [start for start, _ in spans(2000)]
    for place, told in ((0, True), (9, True), (counted[100], True), (1999, True), (counted[100] + 3, False)):
        data[place] ^= 1
        path.write_bytes(data)
        assert (digest_of([path]) != plain) == told
        data[place] ^= 1
    path.write_bytes(data + b"\0")
    assert digest_of([path]) != plain
