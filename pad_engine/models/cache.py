"""The user's cache of models: one lock per model, work in a temporary folder, one atomic rename at the end.

A name is either absent or complete. Next file: `download.py`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from pad_engine.errors import ModelError
from pad_engine.files import take_lock

MARKER = "pad_model.json"


def cache_root() -> Path:
    """`$PAD_CACHE`, else `$XDG_CACHE_HOME/pad_engine`, else `~/.cache/pad_engine`; not created here."""
    if own := os.environ.get("PAD_CACHE"):
        return Path(own).expanduser().absolute()
    # the XDG specification has relative paths ignored
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "pad_engine"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def model_folder(name: str) -> Path:
    return cache_root() / "models" / name


def is_complete(folder: Path) -> bool:
    """Whether `folder` has its marker and every file that the marker lists, at the listed size. Reads no weights."""
    try:
        files = json.loads((folder / MARKER).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def build(name: str, label: str, need_bytes: int, work: Callable[[Path, Path], None]) -> Path:
    """The complete folder `name` of the cache; `work(out, scratch)` fills it where it is not there yet.

    Both folders are empty and vanish when `work` fails. A second process waits for the first and takes its result; on a
    disk that knows no locks both work, and the first to end wins. Messages call the model `label`.
    Raises ModelError when the cache cannot be written, when it has less than `need_bytes` free, or when `work` does.
    """
    final = model_folder(name)
    if is_complete(final):
        return final
    with _errors(label), _locked(final, label) as locked:
        if is_complete(final):
            return final
        if locked:
            _remove_stale(final.parent, name)
        free = shutil.disk_usage(final.parent).free
        if free < need_bytes:
            raise _no_space(label, f"{need_bytes / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")
        temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{name}@", dir=final.parent))
        try:
            out, scratch = temporary / "out", temporary / "scratch"
            out.mkdir()
            scratch.mkdir()
            work(out, scratch)
            _seal(out)
            if is_complete(final):  # by another process, on a disk that knows no locks
                return final
            if final.exists():
                # incomplete: a file was removed by hand, or the marker is of another version
                os.rename(final, temporary / "old")
            os.rename(out, final)
            _sync(final.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


def _no_space(label: str, detail: str) -> ModelError:
    return ModelError(
        f"{label}: no space left in the model cache {cache_root()} ({detail})",
        "free some space, or put the cache on another disk: PAD_CACHE=/path",
    )


@contextlib.contextmanager
def _errors(label: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        raise ModelError(f"{label}: interrupted, nothing was kept", "run the same command again") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(label, str(error)) from error
        if error.filename is not None and not Path(os.fsdecode(error.filename)).is_relative_to(cache_root()):
            raise ModelError(f"{label}: {error}") from error
        raise ModelError(
            f"{label}: cannot write to the model cache {cache_root()} ({error})", "choose another one: PAD_CACHE=/path"
        ) from error


def _lock_path(folder: Path, name: str) -> Path:
    return folder / f".lock-{name}"


@contextlib.contextmanager
def _locked(final: Path, label: str) -> Iterator[bool]:
    """Hold the lock of `final`. The kernel drops it when the process dies, so none is ever stale. False on a disk that
    knows no locks."""
    final.parent.mkdir(parents=True, exist_ok=True)
    with open(_lock_path(final.parent, final.name), "a") as file:
        try:
            locked = take_lock(file)
        except BlockingIOError:
            say(f"{label}: waiting for another process that is preparing it")
            locked = take_lock(file, wait=True)
        yield locked


def _remove_stale(folder: Path, own: str) -> None:
    """Remove the temporary folders of dead processes: those whose lock is free, or is `own`, which we hold."""
    for path in folder.glob(".tmp-*@*"):
        name = path.name.removeprefix(".tmp-").rpartition("@")[0]
        with contextlib.suppress(BlockingIOError), open(_lock_path(folder, name), "a") as file:
            if name != own:
                take_lock(file)
            shutil.rmtree(path, ignore_errors=True)


def _seal(out: Path) -> None:
    """Write the marker and bring every byte to the disk, so that the rename cannot overtake the data."""
    files = {str(path.relative_to(out)): path.stat().st_size for path in sorted(out.rglob("*")) if path.is_file()}
    (out / MARKER).write_text(json.dumps({"files": files}, indent=2) + "\n")
    for path in [*out.rglob("*"), out]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
