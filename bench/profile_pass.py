"""What Nsight Compute sees of each kernel of a round: time alone, bytes from memory, registers, and how full it is.

    python bench/profile_pass.py --shapes 135m 1b 8b --nodes 1 16 64 --out h100

`ncu` must be on the path and may read the card's counters. It runs kernels one by one, so what programmatic dependent
launch hides between them is in no number here: bench_step.py times the round. The clocks are left as they are, and so
is the L2 cache, which finds the activations and not the weights: enough layers are run for that.
"""

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import harness
import torch
from rig import Rig, random_chain

from pad_engine.graphs import PLAIN, TREE

# metric: the name that it has in results, and what its number is divided by
METRICS = {
    "gpu__time_duration.sum": ("us", 1e3),
    "dram__bytes_read.sum": ("read_mb", 1e6),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("memory_percent", 1),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("compute_percent", 1),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("warps_percent", 1),
    "launch__registers_per_thread": ("registers", 1),
    "launch__shared_mem_per_block": ("shared_kb", 1e3),
    "launch__grid_size": ("programs", 1),
    "launch__block_size": ("threads", 1),
}
# enough of them that weights do not stay in the cache
LAYERS = {"135m": 10, "1b": 3, "8b": 2}
CONTEXT, LENGTH = 256, 2048


def run_rounds(shape: str, nodes: Sequence[int]) -> None:
    """What ncu looks at: one round of each number of nodes, launched kernel by kernel."""
    rig = Rig(shape, length=LENGTH, device=torch.device("cuda"), num_layers=LAYERS.get(shape))
    for profiled in (False, True):
        for count in nodes:
            rig.begin(CONTEXT)
            if count > 1:
                rig.rounds.queue_tree([random_chain(count, rig.vocab)])
            torch.cuda.synchronize()
            if profiled:
                torch.cuda.profiler.start()
            rig.rounds.launch(PLAIN if count == 1 else TREE, count)
            torch.cuda.synchronize()
            if profiled:
                torch.cuda.profiler.stop()


def profile(shape: str, nodes: int) -> list[str]:
    """The lines that ncu prints of one round."""
    command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none", "--csv",
               "--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS), sys.executable, __file__,
               "--shapes", shape, "--nodes", str(nodes), "--inside"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"ncu failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()


def by_kernel(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The median of each metric over the launches of a kernel with one grid, in the order of their first launches.
    ValueError if there is no table in the lines."""
    kept = [line for line in lines if line.startswith('"')]
    if len(kept) < 3:
        raise ValueError("ncu printed no table")
    launches: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in list(csv.DictReader(kept))[1:]:  # the first one holds units
        launches.setdefault((row["Kernel Name"], row["launch__grid_size"]), []).append(row)
    found = []
    for (name, _), rows in launches.items():
        numbers = {
            short: round(median(float(row[metric].replace(",", "")) for row in rows) / unit, 3)
            for metric, (short, unit) in METRICS.items()
            if row.get(metric)
        }
        found.append({"kernel": name, "launches": len(rows), **numbers})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shapes", nargs="+", default=["135m", "1b", "8b"])
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--out", help="folder of results/ for this card, h100 for instance")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        return run_rounds(args.shapes[0], args.nodes)
    found = []
    for shape in args.shapes:
        for nodes in args.nodes:
            kernels = by_kernel(profile(shape, nodes))
            found.append({"shape": shape, "nodes": nodes, "layers": LAYERS.get(shape), "kernels": kernels})
            print(shape, nodes)
            for kernel in kernels:
                print("  ", *(f"{name} {value}" for name, value in kernel.items()), flush=True)
    if args.out:
        print(harness.save("profile", {"context": CONTEXT, "rounds": found}, args.out))


if __name__ == "__main__":
    main()
