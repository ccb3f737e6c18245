"""What a round costs by context, 128 to 32,768 tokens, and by nodes, 1 to 64, at one shape.

    python bench/bench_context.py --shape 8b --out h100

Chains that the host made once and none of which is kept, so that every round adds a token; one node is a plain step.
The limit of a context counts its keys and values once.
"""

import argparse
import os
from functools import partial
from statistics import median
from typing import Any

import harness
import torch
from bench_step import compile_all, rated
from rig import Rig, random_chain
from shapes import SHAPES

from pad_engine.graphs import PLAIN, TREE

CONTEXTS = (128, 512, 2048, 8192, 32768)
NODES = (1, 2, 4, 8, 16, 32, 64)
TURNS, WARM = 3, 3


def round_ms(rig: Rig, context: int, nodes: int, replays: int) -> float:
    """Milliseconds of a round over so many nodes at so many tokens of context."""
    kind = PLAIN if nodes == 1 else TREE
    if kind == TREE:
        rig.rounds.queue_tree([random_chain(nodes, rig.vocab)])
    queue = partial(rig.rounds.queue, kind, nodes)
    queue()  # captured here, and not while the clock runs
    found = []
    for _ in range(TURNS):
        rig.begin(context)
        found.append(harness.busy_ms(queue, replays, WARM))
        rig.check_running()
    return median(found)


def measure(rig: Rig, context: int, nodes: list[int], replays: int, read_rate: float) -> list[dict[str, Any]]:
    """One line for each number of nodes. read_rate: TB/s."""
    rows = []
    for count in nodes:
        milliseconds = round_ms(rig, context, count, replays)
        rows.append({"context": context, "nodes": count} | rated(milliseconds, rig.limit_ms(context, read_rate)))
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", default="8b", choices=list(SHAPES))
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS))
    parser.add_argument("--nodes", nargs="+", type=int, default=list(NODES))
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--workers", type=int, default=min(12, max(1, (os.cpu_count() or 2) - 2)), help="compilers")
    parser.add_argument("--out", required=True, help="folder of results/ for this card, h100 for instance")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    compile_all([args.shape], args.nodes, args.workers)
    with torch.inference_mode():
        read_rate = harness.read_rate()
        length = max(args.contexts) + 64 * (args.replays + WARM + 1)  # if every round were accepted whole
        rig = Rig(args.shape, length=length, device=torch.device("cuda"))
        rows: list[dict[str, Any]] = []
        for context in args.contexts:  # a run that is stopped leaves those that it came to
            rows += measure(rig, context, args.nodes, args.replays, read_rate)
            harness.save_csv(f"context-{args.shape}", rows, args.out)
            found = {"shape": args.shape, "read_tb_s": round(read_rate, 4), "rounds": rows}
            print(harness.save(f"context-{args.shape}", found, args.out), flush=True)


if __name__ == "__main__":
    main()
