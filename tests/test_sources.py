"""Model sources: what a name may be, whose terms must be accepted, and what is said where nothing is found."""

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pad_engine.errors import ModelError
from pad_engine.models import cache, sources
from pad_engine.models.catalog import CATALOG, Entry
from pad_engine.models.sources import TermsError, aliases, resolve


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """An entry that needs no download; the cache is in tmp_path."""
    monkeypatch.setenv("PAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PAD_ACCEPT_TERMS", raising=False)
    entry = replace(CATALOG["smollm2-135m"], name="tiny", licence="MIT")
    monkeypatch.setitem(CATALOG, "tiny", entry)
    monkeypatch.setattr(sources, "_fetch", lambda entry, gguf, *rest: gguf.write_bytes(b"GGUF"))
    monkeypatch.setattr(sources, "_convert", lambda gguf, out, name: (out / "config.json").write_text("{}"))
    return entry


def test_terms_must_be_accepted_once(tiny: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOG, "tiny", replace(tiny, licence="Some Terms", terms="https://example.org/terms"))
    with pytest.raises(TermsError, match=r"Some Terms.*https://example\.org/terms") as caught:
        resolve("tiny")
    assert "PAD_ACCEPT_TERMS=1" in caught.value.hint and not (cache.cache_root() / "models").exists()
    resolve("tiny", accept_terms=True)
    assert resolve("tiny")
    shutil.rmtree(cache.cache_root() / "terms")
    with pytest.raises(TermsError):
        resolve("tiny")
    monkeypatch.setenv("PAD_ACCEPT_TERMS", "1")
    assert resolve("tiny")


def test_folders_files_and_names(tiny: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(folder)
    (folder / "config.json").write_text("{}")
    assert resolve(folder) == folder and resolve(str(folder)) == folder
    with pytest.raises(ModelError, match="neither a folder nor a GGUF file"):
        resolve(folder / "config.json")
    with pytest.raises(ModelError, match=r"no model 'smollm-135m'") as caught:
        resolve("smollm-135m")
    assert "did you mean smollm2-135m?" in caught.value.hint and "gemma3-270m" in caught.value.hint
    with pytest.raises(ModelError, match="no model"):
        resolve(tmp_path / "absent.gguf")
    # a folder that happens to have a short name, and is no model, does not hide it
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert resolve("tiny").parent == cache.cache_root() / "models"


def test_hub_takes_safetensors_only_and_explains(tiny: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    (tmp_path / "config.json").write_text("{}")
    asked: dict[str, Any] = {}

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    with pytest.raises(ModelError, match="has no safetensors"):
        resolve("org/name", offline=True)
    assert asked["local_files_only"] is True and not any("bin" in p or ".py" in p for p in asked["allow_patterns"])
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve("org/name") == tmp_path

    def fail(name: str, **options: Any) -> str:
        raise ConnectionError("no route to the hub\nmore")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=r"org/name is not a folder here.*no route to the hub$") as caught:
        resolve("org/name")
    assert "smollm2-135m" in caught.value.hint


def test_cache_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PAD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_root() == tmp_path / ".cache" / "pad_engine"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache.cache_root() == tmp_path / "x" / "pad_engine"
    monkeypatch.setenv("PAD_CACHE", "~/own")
    assert cache.cache_root() == tmp_path / "own"


def test_full_disk_while_weights_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    from pad_engine.models import gguf

    def full(*arguments: Any, **options: Any) -> None:
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        gguf._save({}, tmp_path / "x")
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.network
def test_default_model_is_really_fetched(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    folder = smollm2
    info = next(info for info in aliases() if info.name == "smollm2-135m")
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert info.cached and info.path == folder and abs(size - info.size) < 0.01 * size
    assert AutoTokenizer.from_pretrained(folder).tokenize("a 12") == ["a", "Ġ", "1", "2"]
