"""What every result file holds beside its numbers: the machine, the versions and the commit."""

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

import pad_engine

RESULTS = Path(__file__).parent / "results"


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


def environment() -> dict[str, Any]:
    """Machine and versions."""
    cuda = torch.cuda.is_available()
    return {
        "card": torch.cuda.get_device_name() if cuda else None,
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "pad_engine": pad_engine.__version__,
        "commit": git_commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def command() -> str:
    """The command that is running, with the names of files and folders only."""
    return " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *(Path(word).name for word in sys.argv[1:] if word)])


def save(name: str, result: dict[str, Any], folder: str) -> Path:
    """Write `results/<folder>/<name>.json` and return its path."""
    path = RESULTS / folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"command": command(), "environment": environment(), **result}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def capture(queue: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of what `queue` launches, after one run of it outside."""
    queue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        queue()
    return graph


def graph_ms(queue: Callable[[], None], repeats: int = 5) -> float:
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
