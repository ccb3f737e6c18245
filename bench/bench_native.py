"""Microseconds of a token's pick and of an accepted path on the CPU: libpad against the torch references.

python bench/bench_native.py
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import harness
import torch

from pad_engine import native, native_accept, sampling
from pad_engine.kernels.accept_path import accept_bits_ref, accept_path_ref
from pad_engine.kernels.gumbel import gumbel_pick_ref
from pad_engine.tree import DraftTree, make_forest

VOCAB, NODES = 49152, 16


def microseconds(run: Callable[[], object], repeats: int) -> float:
    """The median of some runs, after one that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - start))
    return round(median(times), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--out", default="cpu")
    args = parser.parse_args()
    assert native.available(), native.missing_reason()
    logits, position = torch.randn(1, VOCAB), torch.tensor([7])
    forest = make_forest([DraftTree.chain(range(NODES))], [0])
    picks = torch.arange(1, NODES + 1, dtype=torch.int32)
    accept, score = torch.ones(NODES, dtype=torch.bool), torch.zeros(NODES)
    tree = (forest.tree_mask_bits, forest.depth, forest.seq, 1)

    def path_by_torch() -> list[list[int]]:
        kept = accept_bits_ref(accept, score, forest.parent)
        return accept_path_ref(kept, forest.depth, forest.seq, forest.tree_mask_bits)

    def path_by_libpad() -> list[list[int]]:
        return native_accept.match_path(forest.token, forest.parent, picks, *tree)[0]

    assert path_by_libpad() == path_by_torch() == [list(range(NODES))]
    found = {
        f"pick of one sampled row of {VOCAB}": {
            "torch": microseconds(lambda: gumbel_pick_ref(logits, position, 1, 0.8), 10),
            "libpad": microseconds(lambda: sampling.gumbel_pick(logits, position, 1, 0.8), args.repeats),
        },
        f"path of a chain of {NODES}": {
            "torch": microseconds(path_by_torch, args.repeats),
            "libpad": microseconds(path_by_libpad, args.repeats),
        },
    }
    print(found)
    print(harness.save("native", {"microseconds": found}, args.out))


if __name__ == "__main__":
    main()
