"""Files that are written whole or not at all, and refused before the work if their place is none."""

import json
import os
from pathlib import Path
from typing import Any

from pad_engine.errors import RequestError


def check_place(path: Path) -> None:
    """RequestError unless a file can be written there."""
    folder = path.parent
    if path.is_dir():
        raise RequestError(f"{path} is a folder, expected a file")
    if not folder.is_dir():
        raise RequestError(f"{path} cannot be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RequestError(f"{path} cannot be written: nothing may be written in {folder}")


def write_file(path: Path, content: bytes) -> None:
    """Write a file beside the path, which then takes its place. RequestError if that cannot be done."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """The same with JSON."""
    write_file(path, (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def remove_file(path: Path) -> None:
    """Remove a file, if there is one. RequestError if that cannot be done."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise RequestError(f"{path} cannot be removed: {error.strerror}") from error
