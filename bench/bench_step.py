"""A decoding step on a GPU at the shapes of three models: what it costs, against the limit that memory sets.

    python bench/bench_step.py --shapes 135m 1b 8b --out h100
    python bench/bench_step.py --shapes 8b --weights int8 --nodes 16 --out h100

For each shape, at 256 tokens of context: a plain step, and the verification of 4 to 64 nodes; what a round costs beyond
its pass (the tail); how much of the time the card waits for the host; and the memory beyond weights and cache. With the
8b shape also how fast attention reads 32,000 tokens of keys and values. docs/performance.md defines each figure.
"""

import argparse
import gc
import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import harness
import torch
from harness import Times, busy_ms
from rig import Rig, launch_mode, random_chain, random_tree
from shapes import SHAPES
from tune_attention import LONG, AttentionCase, attentions

from pad_engine.device_round import MAX_ROWS
from pad_engine.graphs import LOGITS, PLAIN, TREE, Rounds
from pad_engine.kernels.quantise import QUANTISED
from pad_engine.kernels.tuning import attention_config
from pad_engine.models.fused import row_pad
from pad_engine.models.quantise import AS_STORED

CONTEXT, LENGTH = 256, 2048
TAIL_NODES = 16
KV_LAYERS = 8  # each holds more keys and values than the L2 cache does, so none is found there
CUDA = torch.device("cuda")


def write_logits(rounds: Rounds) -> None:
    """Let passes that leave their logits leave them in bf16, as an LM head does that is an ordinary product."""
    rounds.logits = torch.empty(MAX_ROWS, rounds.fused.num_tokens, dtype=torch.bfloat16, device=rounds.device)


def compile_rounds(job: tuple[str, int, str]) -> None:
    """In a process of its own: compile the kernels of a shape's rounds of so many rows, into the cache on disk."""
    shape, rows, weights = job
    with torch.inference_mode():
        rounds = Rig(shape, length=LENGTH, device=CUDA, num_layers=1, weights=weights).rounds
        rounds.make(PLAIN if rows == 1 else TREE, rows)
        if rows == row_pad(TAIL_NODES):
            write_logits(rounds)
            rounds.make(LOGITS, rows)
        torch.cuda.synchronize()


def compile_all(shapes: list[str], nodes: list[int], workers: int, weights: str = AS_STORED) -> None:
    """What the measurements need, several kernels at a time."""
    rows = dict.fromkeys([1, row_pad(TAIL_NODES), *(max(16, row_pad(count)) for count in nodes)])
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(compile_rounds, [(shape, count, weights) for shape in shapes for count in rows], chunksize=1)


def rated(milliseconds: float, limit: float) -> dict[str, float]:
    """A time, and what it is of its limit."""
    return {
        "ms": round(milliseconds, 5),
        "over_limit": round(milliseconds / limit, 4),
        "share_of_limit": round(limit / milliseconds, 4),
    }


def round_ms(rig: Rig, queue: Callable[[], object], replays: int, temperature: float = 0.0) -> float:
    """Milliseconds of one round of a fresh request, back to back."""
    rig.begin(CONTEXT, temperature)
    milliseconds = busy_ms(queue, replays)
    rig.check_running()
    return milliseconds


def memory(rig: Rig) -> dict[str, float]:
    """MB that torch holds beyond weights and cache, with a plain round and those of 16 and 64 rows captured: as it is,
    and after unused blocks have gone back."""
    for kind, rows in ((PLAIN, 1), (TREE, 16), (TREE, 64)):
        rig.rounds.queue(kind, rows)
    torch.cuda.synchronize()
    known = rig.weight_bytes + rig.cache.nbytes
    found = {"weights": rig.weight_bytes, "kv_cache": rig.cache.nbytes}
    found["reserved_beyond"] = torch.cuda.memory_reserved() - known
    found["allocated_beyond"] = torch.cuda.memory_allocated() - known
    torch.cuda.empty_cache()
    found["reserved_beyond_when_trimmed"] = torch.cuda.memory_reserved() - known
    return {name: round(count / 1e6, 1) for name, count in found.items()}


def plain_step(rig: Rig, limit: float, replays: int, rounds: int) -> dict[str, Any]:
    """One token a pass: back to back on the card, and by the host's clock while it reads every round."""
    busy = median(round_ms(rig, rig.rounds.queue_plain, replays) for _ in range(3))
    rig.begin(CONTEXT)
    polled = 1000 * rig.run_ahead(PLAIN, 1, rounds) / rounds
    rig.check_running()
    return rated(busy, limit) | {"polled_ms": round(polled, 5)}


def verification(rig: Rig, limit: float, nodes: list[int], replays: int) -> list[dict[str, Any]]:
    """Rounds over chains and random trees."""
    found = []
    for count in nodes:
        for name, make in (("chain", random_chain), ("tree", random_tree)):
            rig.rounds.queue_tree([make(count, rig.vocab)])
            queue = partial(rig.rounds.queue, TREE, count)
            milliseconds = median(round_ms(rig, queue, replays) for _ in range(3))
            found.append({"nodes": count, "form": name} | rated(milliseconds, limit))
    return found


def tail(rig: Rig, replays: int, turns: int) -> dict[str, Any]:
    """Microseconds of a round of 16 nodes beyond a pass whose LM head only writes bf16 logits, by turns of all three.

    The pass alone commits nothing, so its context is put where the rounds' is on average.
    """
    rig.rounds.queue_tree([random_chain(TAIL_NODES, rig.vocab)])
    whole = partial(rig.rounds.queue, TREE, TAIL_NODES)
    write_logits(rig.rounds)
    alone = partial(rig.rounds.replay, LOGITS, row_pad(TAIL_NODES))
    alone()  # captured here, and not while the clock runs
    beyond: dict[str, list[float]] = {"greedy": [], "match": []}
    for _ in range(turns):
        rig.begin(CONTEXT + replays // 2)
        base = busy_ms(alone, replays)
        for name, temperature in (("greedy", 0.0), ("match", 1.0)):
            beyond[name].append(1000 * (round_ms(rig, whole, replays, temperature) - base))
    times = {name: Times.of(values) for name, values in beyond.items()}
    return {
        name: {"us": round(t.median, 2), "p20": round(t.p20, 2), "p80": round(t.p80, 2)} for name, t in times.items()
    }


def host_share(rig: Rig, rounds: int) -> dict[str, Any]:
    """1 - busy / wall over so many rounds. busy: the same rounds at the same contexts, queued back to back with nobody
    reading them, by events. wall: the host's clock until it has read the last round. The card's own gaps between two
    graphs are in both."""
    tree = random_chain(TAIL_NODES, rig.vocab)
    rig.rounds.queue_tree([tree])
    kinds: dict[str, tuple[Callable[[], object], Callable[[], float]]] = {
        "plain, run ahead": (rig.rounds.queue_plain, partial(rig.run_ahead, PLAIN, 1, rounds)),
        "tree, run ahead": (
            partial(rig.rounds.queue, TREE, TAIL_NODES),
            partial(rig.run_ahead, TREE, TAIL_NODES, rounds),
        ),
        "tree, from the host": (
            partial(rig.rounds.queue, TREE, TAIL_NODES),
            partial(rig.one_by_one, tree, rounds),
        ),
    }
    found = {}
    for name, (queue, run) in kinds.items():
        rig.begin(CONTEXT)
        busy = busy_ms(queue, rounds, warm=0) * rounds
        rig.begin(CONTEXT)
        torch.cuda.synchronize()
        wall = 1000 * run()
        rig.check_running()
        found[name] = {"busy_ms": round(busy, 3), "wall_ms": round(wall, 3), "share": round(1 - busy / wall, 5)}
    return found


def kv_reading(read_rate: float) -> list[dict[str, Any]]:
    """The attention kernel alone over layers of the 8b shape, each with 32,000 committed tokens: bytes of keys and
    values, counted once, over time, against the read rate."""
    found = []
    for rows in (1, 16, 64):
        heads = attentions("8b", rows)
        case = AttentionCase(heads, KV_LAYERS, launch_mode("8b", rows, CUDA))
        case.length.fill_(LONG)
        config = attention_config(rows, heads.heads, heads.kv_heads, heads.head_dim, CUDA, capacity=LONG)
        milliseconds = harness.graph_ms(partial(case.queue, config), repeats=15)
        size = KV_LAYERS * 2 * heads.kv_heads * heads.head_dim * LONG * case.cache.element_size()
        rate = size / milliseconds / 1e9
        found.append(
            {"nodes": rows, "tokens": LONG, "us_a_layer": round(1000 * milliseconds / KV_LAYERS, 2),
             "tb_s": round(rate, 4), "share": round(rate / read_rate, 4)}
        )  # fmt: skip
        print("kv", found[-1], flush=True)
    return found


def measure(shape: str, weights: str, read_rate: float, nodes: list[int], quick: bool) -> dict[str, Any]:
    """All figures of one shape."""
    replays, rounds, turns = (20, 100, 5) if quick else (50, 500, 15)
    gc.collect()
    torch.cuda.empty_cache()  # what earlier measurements left would count as this one's memory
    rig = Rig(shape, length=LENGTH, device=CUDA, weights=weights)
    limit = rig.limit_ms(CONTEXT, read_rate)
    found: dict[str, Any] = {"shape": shape, "weights": weights, "context": CONTEXT, "read_tb_s": round(read_rate, 4)}
    found |= {"limit_ms": round(limit, 5), "streamed_gb": round(limit * read_rate, 4), "rounds": rounds}
    steps: dict[str, Callable[[], Any]] = {
        "memory_mb": lambda: memory(rig),
        "plain": lambda: plain_step(rig, limit, replays, rounds),
        "verify": lambda: verification(rig, limit, nodes, replays),
        "tail_us": lambda: tail(rig, replays, turns),
        "host_share": lambda: host_share(rig, rounds),
    }
    for name, step in steps.items():
        found[name] = step()
        print(shape, name, found[name], flush=True)
    return found


def as_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """A shape's passes as lines of a table."""
    passes = [{"nodes": 1, "form": "plain"} | found["plain"], *found["verify"]]
    return [{"shape": found["shape"], "limit_ms": found["limit_ms"]} | row for row in passes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--nodes", nargs="+", type=int, default=[4, 16, 32, 64], help="of the trees, 2 to 64")
    parser.add_argument("--weights", default=AS_STORED, choices=[AS_STORED, *QUANTISED], help="types of one byte")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, for a first look")
    parser.add_argument("--workers", type=int, default=min(12, max(1, (os.cpu_count() or 2) - 2)), help="compilers")
    parser.add_argument("--out", required=True, help="folder of results/ for this card, h100 for instance")
    args = parser.parse_args()
    compile_all(args.shapes, args.nodes, args.workers, args.weights)
    with torch.inference_mode():
        read_rate = harness.read_rate()
        print(f"read rate {read_rate:.3f} TB/s", flush=True)
        for shape in args.shapes:
            found = measure(shape, args.weights, read_rate, args.nodes, args.quick)
            name = f"step-{shape}" if args.weights == AS_STORED else f"step-{shape}-{args.weights}"
            harness.save_csv(name, as_rows(found), args.out)
            print(harness.save(name, found, args.out))
        if "8b" in args.shapes and args.weights == AS_STORED:
            torch.cuda.empty_cache()
            kv = {"read_tb_s": round(read_rate, 4), "layers": KV_LAYERS, "kv": kv_reading(read_rate)}
            print(harness.save("kv", kv, args.out))


if __name__ == "__main__":
    main()
