"""Measure launch parameters on this card and write them to kernels/configs/<card>.json.

    python bench/tune.py --shapes 135m 1b 8b --rows 1 16 64
    python bench/tune.py --weights int8 fp8 --only products
    python bench/tune.py --shapes 135m 1b --rows 16 --only passes     # goes on from the table
    python bench/tune.py --shapes 8b --rows 1 --weights int8 fp8 --only passes --rounds 3

Every candidate of a product is launched in a chain over as many copies of its weights as overflow the card's cache,
with programmatic dependent launch where the card has it, and the chain is replayed as a graph. Candidates are compiled
in a pool of processes first, which is most of the work.
"""

import argparse
import json
import multiprocessing
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from harness import git_commit, graph_ms, runs
from torch import Tensor
from tune_attention import AttentionCase, Heads, attentions, time_attention
from tune_attention import candidates as attention_candidates
from tune_pass import Pass, compile_trials, tune_passes
from tune_products import Product, candidates, products, with_prefetch

from pad_engine.kernels import tuning
from pad_engine.kernels.linear_residual import linear_residual
from pad_engine.kernels.lm_head import lm_head, lm_head_programs
from pad_engine.kernels.norm_gated import norm_gated
from pad_engine.kernels.norm_linear import norm_linear
from pad_engine.kernels.quantise import QUANTISED
from pad_engine.kernels.tuning import AttentionConfig, TileConfig

L2_BYTES = 100_000_000  # copies of the weights beyond this are never in the cache
FINALISTS = 4  # candidates that are tried with a prefetch


class Case:
    """The buffers of one product, and its launch."""

    def __init__(self, product: Product, copies: int, pdl: bool) -> None:
        rows, m, k = product.rows, product.m, product.k
        cuda = torch.device("cuda")
        bf16 = partial(torch.randn, dtype=torch.bfloat16, device=cuda)
        self.product, self.pdl = product, pdl
        self.cores = torch.cuda.get_device_properties(cuda).multi_processor_count
        self.weights = [product.random_weight() for _ in range(copies)]
        self.row_scales = None if product.quantised is None else torch.ones(m, device=cuda)
        self.x, self.hidden, self.out = bf16(rows, k), bf16(rows, m), bf16(rows, m)
        self.norm, self.scale, self.half = bf16(m), bf16(k), bf16(rows, m // 2)
        self.squares = torch.rand(256 if rows == 1 else 64, rows, device=cuda)
        self.sums = torch.empty(m * rows, device=cuda)
        self.parts, self.tickets = (
            torch.empty(8 * m * rows, device=cuda),
            torch.zeros(m, dtype=torch.int32, device=cuda),
        )
        self.ints = torch.zeros(64, dtype=torch.int32, device=cuda)
        self.seed, self.temperature = torch.zeros(1, dtype=torch.int64, device=cuda), torch.zeros(1, device=cuda)

    def launch(self, config: TileConfig, weight: Tensor) -> None:
        """Queue the product once."""
        op, rows, m = self.product.op, self.product.rows, self.product.m
        if op == "qkv":
            norm_linear(
                self.x, self.scale, self.x, self.squares, weight, None, self.row_scales, self.out, self.parts,
                self.tickets, 1e-5, config, self.pdl,
            )  # fmt: skip
        elif op == "gate_up":
            norm_gated(
                self.x, self.scale, self.x, self.squares, weight, None, self.row_scales, self.half, 1e-5, "silu",
                config, self.pdl,
            )  # fmt: skip
        elif op == "lm_head":
            programs = lm_head_programs(m, config, self.cores)
            scores = self.sums[: programs * rows].view(programs, rows)
            lm_head(
                self.x, self.scale, self.x, self.squares, weight, self.row_scales, self.ints, self.ints, self.ints[:1],
                self.seed, self.temperature, scores, scores.view(torch.int32), None, num_tokens=m, eps=1e-5,
                softcap=None, config=config, pdl=self.pdl,
            )  # fmt: skip
        else:
            tiles = -(-m // config.block)
            linear_residual(
                self.x, weight, None, self.row_scales, self.hidden, self.norm, self.out,
                self.sums[: tiles * rows].view(tiles, rows), self.parts, self.tickets, config, self.pdl,
            )  # fmt: skip

    def chain(self, config: TileConfig) -> None:
        """Queue it once for every copy of the weights."""
        for weight in self.weights:
            self.launch(config, weight)


Job = tuple[Product, list[TileConfig], bool]
AttentionJob = tuple[Heads, list[AttentionConfig], bool]


def compile_some(jobs: list[Job]) -> list[tuple[Product, TileConfig]]:
    """Compile candidates of products; returns those that the card can run."""
    valid = []
    for product, configs, pdl in jobs:
        case = Case(product, 1, pdl)
        valid += [(product, config) for config in configs if runs(partial(case.chain, config))]
    return valid


def compile_attention(jobs: list[AttentionJob]) -> list[tuple[Heads, AttentionConfig]]:
    """The same for attentions."""
    valid = []
    for heads, configs, pdl in jobs:
        case = AttentionCase(heads, 1, pdl)
        valid += [(heads, config) for config in configs if runs(partial(case.queue, config))]
    return valid


class Tuner:
    """Compiles in a pool of processes, and times in this one."""

    def __init__(self, pdl: bool, workers: int) -> None:
        self.pdl, self.workers = pdl, workers
        self.pool = multiprocessing.get_context("spawn").Pool(workers)

    def timed(self, wanted: dict[Product, list[TileConfig]]) -> dict[Product, list[tuple[float, TileConfig]]]:
        """For each product its candidates with the milliseconds of one launch, fastest first."""
        jobs = [
            [(p, configs[w :: self.workers], self.pdl) for p, configs in wanted.items()] for w in range(self.workers)
        ]
        valid = [pair for part in self.pool.map(compile_some, jobs, chunksize=1) for pair in part]
        results = {}
        for product in wanted:
            case = Case(product, max(2, -(-L2_BYTES // product.nbytes)), self.pdl)
            times = [
                (graph_ms(partial(case.chain, config)) / len(case.weights), config)
                for p, config in valid
                if p == product
            ]
            results[product] = sorted(times, key=lambda pair: pair[0])
            del case
        return results


def tune_attention(wanted: list[Heads], tuner: Tuner, report: Callable[[str], None]) -> dict[str, dict[str, int]]:
    """The best parameters of every attention, by key: at both contexts together, and at the long one alone."""
    all_configs = {heads: list(attention_candidates(heads)) for heads in wanted}
    jobs = [[(h, c[w :: tuner.workers], tuner.pdl) for h, c in all_configs.items()] for w in range(tuner.workers)]
    valid = [pair for part in tuner.pool.map(compile_attention, jobs, chunksize=1) for pair in part]
    best = {}
    for heads in wanted:
        times = time_attention(heads, [config for h, config in valid if h == heads], tuner.pdl)
        best[heads.key] = asdict(times[0][2])
        best[heads.long_key] = asdict(min(times, key=lambda found: found[1])[2])
        for short, long, config in times:
            report(f"{heads.key}: {short:.2f} us, {long:.1f} us at a long context, {config}")
    return best


def tune(wanted: list[Product], tuner: Tuner, report: Callable[[str], None]) -> dict[str, dict[str, int]]:
    """The best candidate of every product, by key; those that do best without a prefetch are tried with one."""
    plain = tuner.timed({product: list(candidates(product)) for product in wanted})
    few = {p: [config for _, config in times[:FINALISTS]] for p, times in plain.items()}
    ahead = tuner.timed({p: [ahead for c in configs for ahead in with_prefetch(p, c)] for p, configs in few.items()})
    best: dict[str, dict[str, int]] = {}
    for product in wanted:
        times = sorted(plain[product] + ahead[product], key=lambda pair: pair[0])
        name = tuning.key(product.op, product.rows, product.m, product.k, product.quantised or torch.bfloat16)
        best[name] = asdict(times[0][1])
        for milliseconds, config in [*times[:2], plain[product][0]]:
            rate = product.nbytes / milliseconds / 1e9
            report(f"{name}: {milliseconds * 1000:.2f} us, {rate:.3f} TB/s, {config}")
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shapes", nargs="+", default=["135m", "1b", "8b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 32, 64])
    parser.add_argument(
        "--weights", nargs="+", choices=["bf16", *QUANTISED], default=["bf16"], help="of products and passes"
    )
    parts = ["products", "attention", "passes"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rounds", type=int, default=2, help="of the passes' descent")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--out", type=Path, default=tuning.CONFIGS)
    args = parser.parse_args()
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    pairs = [(shape, rows) for shape in args.shapes for rows in args.rows]
    card = tuning.card_name(torch.device("cuda"))
    path, best = args.out / f"{card}.json", dict(tuning.table(card))
    tuner, report = Tuner(pdl, args.workers), partial(print, flush=True)
    if "products" in args.only:
        named = [product for pair in pairs for weights in args.weights for product in products(*pair, weights)]
        best |= tune(list(dict.fromkeys(named)), tuner, report)
    if "attention" in args.only:
        best |= tune_attention(list(dict.fromkeys(attentions(*pair) for pair in pairs)), tuner, report)
    if "passes" in args.only:
        write(path, best)  # the passes begin with what is there
        tuning.table.cache_clear()
        compile_all = partial(tuner.pool.map, compile_trials, chunksize=1)
        passes = [Pass(*pair, weights) for weights in args.weights for pair in pairs]
        for found in tune_passes(passes, compile_all, args.workers, args.rounds, report):
            best |= found
            write(path, best)
    write(path, best)
    print(path)


def write(path: Path, best: dict[str, dict[str, int]]) -> None:
    """Write a table of parameters."""
    content = {"torch": torch.__version__, "commit": git_commit(), "parameters": dict(sorted(best.items()))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
