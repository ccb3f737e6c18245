"""pad_engine: speculative decoding for one stream at the lowest latency. Next to read: engine.py."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pad_engine.config import SamplingParams
    from pad_engine.engine import Engine

__version__ = version("pad-engine")
__all__ = ["Engine", "SamplingParams", "__version__"]

_HOMES = {"Engine": "pad_engine.engine", "SamplingParams": "pad_engine.config"}


def __getattr__(name: str) -> Any:
    # importing torch takes a second or two, which `pad --help` should not wait for
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
