"""A user's file of JSON objects, one a line."""

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pad_engine.errors import RequestError


def read_json_lines(path: Path, keys: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The objects of a file, gzipped where its name ends in .gz; each must have the keys, and text under them.

    RequestError names the file, and the line that is not such an object.
    """
    records = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise RequestError(f"{path}, line {number}: expected a JSON object, got {type(record).__name__}")
        for key in keys:
            if not isinstance(record.get(key), str):
                raise RequestError(f"{path}, line {number}: expected text under {key!r}, got {record.get(key)!r}")
        records.append(record)
    if not records:
        raise RequestError(f"{path} is empty: expected one JSON object a line")
    return records


def read_text(path: Path) -> str:
    """A file's text."""
    try:
        content = path.expanduser().read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from None
