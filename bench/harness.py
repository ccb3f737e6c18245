"""What every benchmark shares: result files that name machine, versions and commit, the clock, and the read rate.

On a GPU everything is timed by events on replayed graphs. The read rate that shares of a limit refer to is measured in
the same run, and a kernel that is timed by itself never finds its weights in the card's L2 cache.
"""

import csv
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import transformers
import triton
import triton.language as tl

import pad_engine
from pad_engine.files import write_file

RESULTS = Path(__file__).parent / "results"
# elements of a step, steps and warps of a program of the reading kernel; which is fastest depends on the card
READERS = ((4096, 4, 4), (2048, 16, 4), (8192, 4, 8))


def processor() -> str:
    """The processor's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def git_commit() -> str:
    """The repository's commit, with `+` when the tree has changes."""
    folder = Path(__file__).parent
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
    if head.returncode:
        return "unknown"
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=folder, capture_output=True, text=True)
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def driver() -> str | None:
    """The version of NVIDIA's driver, or None where there is none."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer[0] if answer else None


def environment() -> dict[str, Any]:
    """Machine and versions."""
    cuda = torch.cuda.is_available()
    return {
        "card": torch.cuda.get_device_name() if cuda else None,
        "driver": driver() if cuda else None,
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "pad_engine": pad_engine.__version__,
        "commit": git_commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def command() -> str:
    """The command that is running, with the names of files and folders only."""
    return " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *(Path(word).name for word in sys.argv[1:] if word)])


def save(name: str, result: dict[str, Any], folder: str) -> Path:
    """Write `results/<folder>/<name>.json` and return its path. folder: a name, or a path of its own."""
    path = RESULTS / folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"command": command(), "environment": environment(), **result}
    write_file(path, (json.dumps(content, indent=1) + "\n").encode())  # not write_json: figures may be NaN
    return path


def save_csv(name: str, rows: Sequence[Mapping[str, Any]], folder: str) -> Path:
    """Write `results/<folder>/<name>.csv`, one line a row, each with what it was measured on; returns its path."""
    machine = environment()
    facts = {key: machine[key] for key in ("card", "driver", "torch", "triton", "commit", "date")}
    columns = dict.fromkeys(key for row in [*rows, facts] for key in row)
    path = RESULTS / folder / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **facts} for row in rows)
    return path


@dataclass(frozen=True)
class Times:
    """Milliseconds of one thing that was timed again and again: the median, and what a fifth of the runs stayed below
    and above."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Times":
        """From two runs at least."""
        low, *_, high = quantiles(values, n=5, method="inclusive")
        return cls(median(values), low, high)

    def over(self, count: float) -> "Times":
        """Of one of `count` that were timed together."""
        return Times(self.median / count, self.p20 / count, self.p80 / count)


def capture(queue: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what `queue` launches, after one run of it outside."""
    queue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        queue()
    return graph


def replayed(queue: Callable[[], object]) -> Callable[[], object]:
    """The same as a graph, captured here; without a GPU as it is, which is for tests."""
    return capture(queue).replay if torch.cuda.is_available() else queue


def synchronise() -> None:
    """Until the GPU, if there is one, has done all that was queued."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def graph_ms(queue: Callable[[], object], repeats: int = 5) -> float:
    """Median milliseconds of a replay of what `queue` launches."""
    graph = capture(queue)
    graph.replay()
    return median(replay_ms(graph) for _ in range(repeats))


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of one replay, by events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def runs(launch: Callable[[], object]) -> bool:
    """Compile kernels into the cache on disk, by launching them; False if the card cannot run them."""
    try:
        launch()
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory or too many registers, in several types of error
        if isinstance(error, (TypeError, AttributeError)) or "illegal" in str(error):
            raise
        return False
    return True


def busy_ms(queue: Callable[[], object], count: int, warm: int = 3) -> float:
    """Milliseconds of one of `count` rounds that the host queues without waiting for any of them, by two events;
    without a GPU by the host's clock, which is for tests.

    warm: rounds ahead of the first event, so that the host is ahead of the card when the clock starts.
    """
    for _ in range(warm):
        queue()
    if not torch.cuda.is_available():
        begun = time.perf_counter()
        for _ in range(count):
            queue()
        return 1000 * (time.perf_counter() - begun) / count
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        queue()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def cold_times(runs: Sequence[Callable[[], object]], repeats: int = 20) -> list[Times]:
    """Times of each of some runs (a graph's `replay`, say), which take turns.

    Before each a buffer of twice the L2 cache is written, outside of the events: nothing is found in the cache, and the
    card is busy while the host queues the run.
    """
    size = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    flush = torch.empty(size, dtype=torch.uint8, device="cuda")
    pairs: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, events in zip(runs, pairs, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.fill_(1)
            start.record()
            run()
            end.record()
            events.append((start, end))
    torch.cuda.synchronize()
    return [Times.of([start.elapsed_time(end) for start, end in events]) for events in pairs]


@triton.jit
def read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Each program reads STEPS blocks that follow one another, and leaves their sum, so that nothing is skipped."""
    first = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in tl.static_range(STEPS):
        total += tl.load(x_ptr + first + step * BLOCK, eviction_policy="evict_first")
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


def read_rate(gigabytes: int = 4, repeats: int = 5) -> float:
    """The best rate in TB/s at which this card is seen to read `gigabytes` GiB: torch's sum, or a kernel that does
    nothing else. Takes that memory for the while."""
    best = min(least_ms(queue, repeats) for queue in readers(torch.randn(gigabytes << 28, device="cuda")))
    torch.cuda.empty_cache()
    return (gigabytes << 30) / best / 1e9


def readers(x: torch.Tensor) -> list[Callable[[], object]]:
    """What may read all of x, fp32 of a power of two of elements, at the full rate."""
    out = torch.empty(len(x) // min(block * steps for block, steps, _ in READERS), device=x.device)

    def by_kernel(block: int, steps: int, warps: int) -> Callable[[], object]:
        return lambda: read_kernel[(len(x) // (block * steps),)](x, out, BLOCK=block, STEPS=steps, num_warps=warps)

    return [x.sum, *(by_kernel(*reader) for reader in READERS)]


def least_ms(queue: Callable[[], object], repeats: int) -> float:
    """The fewest milliseconds of a replay of what `queue` launches."""
    graph = capture(queue)
    return min(replay_ms(graph) for _ in range(repeats))
