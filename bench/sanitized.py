"""One short request by every kind of round, for compute-sanitizer: out of bounds, races in shared memory, barriers.

    compute-sanitizer --tool memcheck python bench/sanitized.py
    compute-sanitizer --tool racecheck python bench/sanitized.py

Races between kernels it does not see; the same request a thousand times does (tests/test_gpu_rounds.py).
"""

import argparse

import torch
from rig import Letters, random_ids
from shapes import random_decoder

from pad_engine import SamplingParams
from pad_engine.loader import make_engine
from pad_engine.models.loader import LoadedModel

TOKENS, PROMPT, LENGTH = 10, 24, 512
SELF = {"draft_model": "self:layers=0"}
ROUNDS = {
    "plain": {"drafter": "none"},
    "tree from the host": {"drafter": "ngram:min=1", "trees": "best-first", "budget": 64},
    "prompt lookup": {"drafter": "ngram:min=1"},
    "drafted chain": {"drafter": "draft-model:depth=4"} | SELF,
    "drafted tree": {"drafter": "draft-model:depth=4", "trees": "best-first"} | SELF,
    "margin": {"drafter": "draft-model:depth=4", "rule": "margin"} | SELF,
    "typical": {"drafter": "draft-model:depth=4", "rule": "typical"} | SELF,
    "rejection": {"drafter": "draft-model:depth=4", "rule": "rejection"} | SELF,
    "strict": {"drafter": "ngram:min=1", "strict": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", default="tiny", help="larger ones take minutes under the tool")
    parser.add_argument("--weights", default="auto")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    decoder = random_decoder(args.shape, device, dtype, LENGTH, 2, args.weights)
    loaded = LoadedModel(decoder, Letters(), {}, decoder.config.vocab_size, ())
    prompt = random_ids(PROMPT // 2, decoder.config.vocab_size) * 2
    for name, options in ROUNDS.items():
        engine = make_engine(loaded, fused=True, fixed_budget=True, **options)
        for temperature in (0.0, 0.8):
            params = SamplingParams(TOKENS, temperature=temperature, seed=1)
            first, second = (engine.generate(prompt, params).token_ids for _ in range(2))
            if first != second:
                raise SystemExit(f"{name} at temperature {temperature}: {first}, then {second}")
        print(f"{name}: {len(first)} tokens", flush=True)


if __name__ == "__main__":
    main()
