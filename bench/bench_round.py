"""A whole round on a GPU and its parts: drafting by a second model, verifying, deciding, and what the host adds.

    python bench/bench_round.py --pairs 8b+1b 1b+1b:4 --out h100      # 1b:4 is the 1b shape with 4 layers

Random weights, and a draft model that agrees with the target as often as --force-tokens-per-round says (forced.py); the
rounds are those of real use. docs/performance.md defines each figure. What a stopped run has measured, the next one
does not measure again (resume.py).
"""

import argparse
import gc
import multiprocessing
import os
from itertools import product
from typing import Any

import harness
import torch
from bench_step import CONTEXT, CUDA, rated
from forced import pair
from resume import Parts, measure_parts
from rig import Rig
from round_parts import Size, budget_row, draft_loop, drafted, few_tokens, fresh_ms, plain_request, prompt

from pad_engine.models.fused import row_pad

LENGTH = 4096
BUDGETS = (1, 4, 8, 16, 32, 64)
TEMPERATURES = (0.0, 1.0)
FORCED = {"1b+1b:4": 3.77}  # tokens a round, where nothing else is asked for
OTHERS = 3.5
# of the request at 3.5 tokens a round: 500 rounds
SIZES = {False: Size(replays=30, rounds=50, tokens=1750), True: Size(replays=10, rounds=20, tokens=200)}
ONCE = Size(replays=1, rounds=1, tokens=1)


def parse_pair(text: str) -> tuple[str, str, int | None]:
    """Target's shape, draft model's shape, and its layers if not all of them: "8b+1b", "1b+1b:4"."""
    target, plus, draft = text.partition("+")
    draft, _, layers = draft.partition(":")
    if not plus or (layers and not layers.isdigit()):
        raise ValueError(f"a pair is TARGET+DRAFT or TARGET+DRAFT:LAYERS, got {text!r}")
    return target, draft, int(layers) if layers else None


def parts_of(
    text: str, asked: float, depths: list[int], budgets: list[int], size: Size, device: torch.device,
    dtype: torch.dtype = torch.bfloat16, read_rate: float | None = None, draft_vocab: int | None = None,
) -> Parts:  # fmt: skip
    """All figures of a pair, those that requests are judged by first. read_rate: TB/s; None where there is no limit to
    compare with. draft_vocab: tokens of an LM head of some alone, with which the draft model is measured too."""
    names = parse_pair(text)
    target, draft, lengths = pair(*names, asked, min(depths), LENGTH, device, dtype)
    rig, small = (Rig(names[i], length=LENGTH, device=device, decoder=d) for i, d in enumerate((target, draft)))
    runs = list(product(depths, TEMPERATURES))
    few: Parts = {}
    if draft_vocab:
        few = {("few_tokens",): lambda _: show(few_tokens(rig, small.decoder, draft_vocab, depths, size))}
    return {
        ("plain",): lambda _: {name: plain(r, size, read_rate) for name, r in (("target", rig), ("draft", small))},
        ("draft",): lambda _: draft_loop(rig, small, depths, size),
        **few,
        ("drafted",): lambda _: [show(drafted(rig, draft, depth, lengths, t, size)) for depth, t in runs],
        ("budgets",): lambda _: [show(budget_row(rig, nodes, t, size)) for nodes in budgets for t in TEMPERATURES],
        ("plain_requests",): lambda _: [show(plain_request(rig, t, size)) for t in TEMPERATURES],
    }


def plain(rig: Rig, size: Size, read_rate: float | None) -> dict[str, float]:
    """A plain step."""
    milliseconds = fresh_ms(rig, rig.rounds.queue_plain, size.replays)
    if read_rate is None:
        return show({"ms": round(milliseconds, 5)})
    limit = rig.limit_ms(CONTEXT, read_rate)
    return show(rated(milliseconds, limit) | {"limit_ms": round(limit, 5), "read_tb_s": round(read_rate, 4)})


def show(row: dict[str, Any]) -> dict[str, Any]:
    """The row, printed as soon as it is measured."""
    print(row, flush=True)
    return row


def compile_part(job: tuple[str, int, list[int], int | None]) -> None:
    """In a process of its own: compile what a shape's rounds of so many nodes need, or, of none, its steps as a draft
    model. One layer is measured once, so nothing that the measurement launches is left out."""
    shape, nodes, depths, draft_vocab = job
    with torch.inference_mode():
        rig = Rig(shape, length=LENGTH, device=CUDA, num_layers=1)
        if not nodes:
            draft_loop(rig, rig, depths, ONCE)
            if draft_vocab:
                few_tokens(rig, rig.decoder, draft_vocab, depths, ONCE)
            return
        if nodes == 1:
            rig.first_token(prompt(rig.vocab))
        budget_row(rig, nodes, 0.0, ONCE)


def compile_all(
    pairs: list[str], depths: list[int], budgets: list[int], workers: int, draft_vocab: int | None = None
) -> None:
    """All that the pairs need, several kernels at a time."""
    parsed = [parse_pair(text) for text in pairs]
    drafting = dict.fromkeys((draft, 0) for _, draft, _ in parsed)
    nodes = {row_pad(count): count for count in (1, max(depths) + 1, *budgets)}.values()
    verifying = dict.fromkeys((target, count) for target, _, _ in parsed for count in nodes)
    jobs = [(*job, depths, draft_vocab) for job in (*drafting, *verifying)]
    with multiprocessing.get_context("spawn").Pool(min(workers, len(jobs))) as pool:
        pool.map(compile_part, jobs, chunksize=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", nargs="+", default=["8b+1b", "1b+1b:4"], help="TARGET+DRAFT[:LAYERS]")
    parser.add_argument("--force-tokens-per-round", type=float, help="hundredths; by default 3.5, 3.77 for 1b+1b:4")
    parser.add_argument("--depths", nargs="+", type=int, default=[4], help="drafted tokens a round")
    parser.add_argument("--draft-vocab", type=int, metavar="N", help="draft also with an LM head of N tokens alone")
    parser.add_argument("--budgets", nargs="+", type=int, default=list(BUDGETS), help="nodes of undrafted chains")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, for a first look")
    parser.add_argument("--workers", type=int, default=min(12, max(1, (os.cpu_count() or 2) - 2)), help="compilers")
    parser.add_argument("--out", required=True, help="folder of results/ for this card, h100 for instance")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    compile_all(args.pairs, args.depths, args.budgets, args.workers, args.draft_vocab)
    with torch.inference_mode():
        read_rate = harness.read_rate()
        for text in args.pairs:
            gc.collect()
            torch.cuda.empty_cache()
            asked = args.force_tokens_per_round or FORCED.get(text, OTHERS)
            name = f"round-{text.replace('+', '-').replace(':', '-')}"
            facts = {"pair": text, "context": CONTEXT, "asked_tokens_per_round": asked}
            sizes = args.depths, args.budgets, SIZES[args.quick]
            more = {"read_rate": read_rate, "draft_vocab": args.draft_vocab}
            # the parts are held by nobody else: their models make room for the next pair's
            measure_parts(name, facts, parts_of(text, asked, *sizes, CUDA, **more), args.out)


if __name__ == "__main__":
    main()
