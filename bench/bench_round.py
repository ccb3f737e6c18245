"""A whole round on a GPU and its parts: drafting by a second model, verifying, deciding, and what the host adds.

    python bench/bench_round.py --pairs 8b+1b 1b+1b:4 --out h100      # 1b:4 is the 1b shape with 4 layers

Random weights, and a draft model that agrees with the target as often as --force-tokens-per-round says (forced.py); the
rounds are those of real use. docs/performance.md defines each figure.
"""

import argparse
import gc
import os
from typing import Any

import harness
import torch
from bench_step import CONTEXT, compile_all, rated
from forced import pair
from rig import Rig
from round_parts import Size, budget_row, draft_loop, drafted, fresh_ms, plain_request

LENGTH = 4096
BUDGETS = (4, 8, 16, 32, 64)
TEMPERATURES = (0.0, 1.0)
FORCED = {"1b+1b:4": 3.77}  # tokens a round, where nothing else is asked for
OTHERS = 3.5
# of the request at 3.5 tokens a round: 500 rounds
SIZES = {False: Size(replays=50, rounds=200, tokens=1750), True: Size(replays=10, rounds=50, tokens=200)}


def parse_pair(text: str) -> tuple[str, str, int | None]:
    """Target's shape, draft model's shape, and its layers if not all of them: "8b+1b", "1b+1b:4"."""
    target, plus, draft = text.partition("+")
    draft, _, layers = draft.partition(":")
    if not plus or (layers and not layers.isdigit()):
        raise ValueError(f"a pair is TARGET+DRAFT or TARGET+DRAFT:LAYERS, got {text!r}")
    return target, draft, int(layers) if layers else None


def measure(
    text: str, asked: float, depths: list[int], budgets: list[int], size: Size, device: torch.device,
    dtype: torch.dtype = torch.bfloat16, read_rate: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """All figures of a pair. read_rate: TB/s; None where there is no limit to compare with."""
    names = parse_pair(text)
    target, draft, lengths = pair(*names, asked, min(depths), LENGTH, device, dtype)
    rig, small = (Rig(names[i], length=LENGTH, device=device, decoder=d) for i, d in enumerate((target, draft)))
    found: dict[str, Any] = {"pair": text, "context": CONTEXT, "asked_tokens_per_round": asked}
    steps = {name: fresh_ms(r, r.rounds.queue_plain, size.replays) for name, r in (("target", rig), ("draft", small))}
    found["plain"] = {name: {"ms": round(ms, 5)} for name, ms in steps.items()}
    if read_rate is not None:
        found["read_tb_s"] = round(read_rate, 4)
        limits = {"target": rig.limit_ms(CONTEXT, read_rate), "draft": small.limit_ms(CONTEXT, read_rate)}
        found["plain"] = {name: rated(ms, limits[name]) for name, ms in steps.items()}
        found["limit_ms"] = {name: round(limit, 5) for name, limit in limits.items()}
    show(text, found)
    found["draft"] = draft_loop(rig, draft, depths, size)
    found["draft"]["step_over_plain"] = round(found["draft"]["step_ms"] / steps["draft"], 4)
    show("draft", found["draft"])
    found["budgets"] = [budget_row(rig, nodes, t, size) for nodes in budgets for t in TEMPERATURES]
    show("budgets", found["budgets"])
    found["plain_requests"] = [plain_request(rig, t, size) for t in TEMPERATURES]
    show("plain requests", found["plain_requests"])
    found["drafted"] = [drafted(rig, draft, depth, lengths, t, size) for depth in depths for t in TEMPERATURES]
    show("drafted", found["drafted"])
    return found


def show(name: str, part: object) -> None:
    """A part as soon as it is measured."""
    print(name, part, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", nargs="+", default=["8b+1b", "1b+1b:4"], help="TARGET+DRAFT[:LAYERS]")
    parser.add_argument("--force-tokens-per-round", type=float, help="hundredths; by default 3.5, 3.77 for 1b+1b:4")
    parser.add_argument("--depths", nargs="+", type=int, default=[4], help="drafted tokens a round")
    parser.add_argument("--budgets", nargs="+", type=int, default=list(BUDGETS), help="nodes of undrafted chains")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, for a first look")
    parser.add_argument("--workers", type=int, default=min(12, max(1, (os.cpu_count() or 2) - 2)), help="compilers")
    parser.add_argument("--out", required=True, help="folder of results/ for this card, h100 for instance")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    shapes = list(dict.fromkeys(name for text in args.pairs for name in parse_pair(text)[:2]))
    compile_all(shapes, args.budgets, args.workers)
    with torch.inference_mode():
        read_rate = harness.read_rate()
        for text in args.pairs:
            gc.collect()
            torch.cuda.empty_cache()
            asked = args.force_tokens_per_round or FORCED.get(text, OTHERS)
            cuda = torch.device("cuda")
            found = measure(text, asked, args.depths, args.budgets, SIZES[args.quick], cuda, read_rate=read_rate)
            name = f"round-{text.replace('+', '-').replace(':', '-')}"
            print(harness.save(name, found, args.out))


if __name__ == "__main__":
    main()
