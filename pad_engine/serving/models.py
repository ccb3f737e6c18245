"""`pad models`: the models with a short name, and which of them are here."""

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from pad_engine.serving.terminal import reported

# A table that is piped is not wrapped to the width of some terminal.
PIPED_WIDTH = 400


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead of a table.")] = False,
) -> None:
    """List the models that have a short name. Folders, .gguf files and hub ids work as well."""
    with reported():
        from pad_engine.models.sources import aliases

        if as_json:
            print(json.dumps([asdict(info) | {"path": str(info.path)} for info in aliases()]))
            return

        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table("name", "description", "licence", "size", "cached", "path", box=box.SIMPLE_HEAD)
        for info in aliases():
            size = f"{info.size / 1e6:.0f} MB"
            row = (info.name, info.description, info.licence, size, "yes" if info.cached else "no", str(info.path))
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)
