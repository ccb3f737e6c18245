"""pad_engine: speculative decoding for one stream at the lowest latency. Next to read: engine.py."""

from importlib.metadata import version

from pad_engine.config import SamplingParams
from pad_engine.engine import Engine

__version__ = version("pad-engine")
__all__ = ["Engine", "SamplingParams", "__version__"]
