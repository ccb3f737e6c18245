"""Modules of bench/, which are scripts beside one another and no package."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCH = Path(__file__).parent.parent / "bench"


def bench_module(name: str) -> ModuleType:
    """One of them by its name; at the end of the path, so that it hides nothing."""
    if str(BENCH) not in sys.path:
        sys.path.append(str(BENCH))
    return importlib.import_module(name)
