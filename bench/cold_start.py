"""One start of a process up to its first token, timed from inside; bench_cold.py runs it.

    python bench/cold_start.py SECONDS MODEL

SECONDS: the time of day, as time.time() gives it, when the process was started. MODEL: a folder, or `shape:8b` for
random weights. Prints one JSON object: the seconds of each part, which together are the whole.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

PROMPT = "The owl left the barn at dusk, crossed the river, and"


class Clock:
    """Seconds of the parts of a start, each by its name, one after the other."""

    def __init__(self, started: float) -> None:
        self.last, self.parts = started, {}

    def lap(self, name: str) -> None:
        """End a part here."""
        now = time.time()
        self.parts[name] = round(self.parts.get(name, 0.0) + now - self.last, 4)
        self.last = now


def real_model(folder: str, clock: Clock) -> None:
    """The first token of a model on disk, by the way that users take."""
    from pad_engine import SamplingParams
    from pad_engine.loader import load_engine
    from pad_engine.models import loader

    load: Callable[..., Any] = loader.load_decoder

    def timed_load(*args: Any, **options: Any) -> Any:
        clock.lap("imports, config and tokenizer")
        decoder = load(*args, **options)
        clock.lap("weights")
        return decoder

    loader.load_decoder = timed_load
    engine = load_engine(folder, device="cuda")
    clock.lap("engine")
    for delta in engine.stream(PROMPT, SamplingParams(8, ignore_eos=True)):
        if delta.token_ids:
            clock.lap("first token")
            return


def random_model(shape: str, clock: Clock) -> None:
    """The same for random weights, without a tokenizer."""
    import torch
    from rig import Rig, random_ids

    clock.lap("imports, config and tokenizer")
    with torch.inference_mode():
        # making the weights takes the place of reading them
        rig = Rig(shape, length=2048, device=torch.device("cuda"))
        torch.cuda.synchronize()
        clock.lap("weights")
        rig.first_token(random_ids(16, rig.vocab))
    clock.lap("first token")


def main() -> None:
    clock = Clock(float(sys.argv[1]))
    clock.lap("interpreter")
    import torch

    clock.lap("torch")
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    clock.lap("CUDA context")
    kind, _, shape = sys.argv[2].partition("shape:")
    if shape and not kind:
        random_model(shape, clock)
    else:
        real_model(sys.argv[2], clock)
    print(json.dumps(clock.parts))


if __name__ == "__main__":
    main()
