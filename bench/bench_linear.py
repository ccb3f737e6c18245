"""Milliseconds to multiply 1 to 64 rows with all matrices of a SmolLM2-135M, on a CPU: torch's own linear against the
packed oneDNN product of kernels/linear.py.

    python bench/bench_linear.py
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import harness
import torch
import torch.nn.functional as F

from pad_engine.kernels.linear import Linear

# (rows, columns) of qkv, o, gate and up, down, thirty times, and of the LM head
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49152, 576)]
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """The median of some runs, after one that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - start))
    return round(median(times), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", default="cpu")
    args = parser.parse_args()
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        weights = [torch.randn(shape, dtype=dtype) * 0.02 for shape in SHAPES]
        linears = [Linear(weight) for weight in weights]
        name = str(dtype).removeprefix("torch.")
        results[name] = {"packed": linears[0].packed, "rows": {}}
        for rows in ROWS:
            inputs = {columns: torch.randn(rows, columns, dtype=dtype) for columns in (576, 1536)}
            with torch.inference_mode():
                torch.testing.assert_close(
                    linears[0](inputs[576]), F.linear(inputs[576], weights[0]), rtol=2e-2, atol=2e-2
                )
                both = {
                    "torch": milliseconds(
                        lambda x=inputs, ws=weights: [F.linear(x[w.shape[1]], w) for w in ws], args.repeats
                    ),
                    "ours": milliseconds(
                        lambda x=inputs, ls=linears: [linear(x[linear.in_features]) for linear in ls], args.repeats
                    ),
                }
            results[name]["rows"][rows] = both
            print(name, rows, both, flush=True)
    print(harness.save("linear", {"milliseconds": results}, args.out))


if __name__ == "__main__":
    main()
