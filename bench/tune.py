"""Measure launch parameters on this card and write them to kernels/configs/<card>.json.

    python bench/tune.py --shapes 135m 1b 8b --rows 1 16 64

Every candidate of a product is launched in a chain over as many copies of its weights as overflow the card's cache,
with programmatic dependent launch where the card has it, and the chain is replayed as a graph. Candidates are compiled
in a pool of processes first, which is most of the work.
"""

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from harness import git_commit, graph_ms
from shapes import shape_config
from torch import Tensor
from tune_attention import AttentionCase, Heads, attentions, finalists, time_attention
from tune_attention import candidates as attention_candidates
from tune_pass import best_passes, compile_variant, variants

from pad_engine.kernels import tuning
from pad_engine.kernels.linear_residual import linear_residual
from pad_engine.kernels.lm_head import lm_head, lm_head_programs
from pad_engine.kernels.norm_gated import norm_gated
from pad_engine.kernels.norm_linear import norm_linear
from pad_engine.kernels.tuning import AttentionConfig, TileConfig

OPS = ("qkv", "out", "gate_up", "down", "lm_head")
L2_BYTES = 100_000_000  # copies of the weights beyond this are never in the cache
FINALISTS = 4  # candidates that are tried with a prefetch
SHARED = 227 * 1024  # bytes of a multiprocessor's shared memory that a program may have


@dataclass(frozen=True)
class Product:
    """One product of a pass: weights `[m, k]`, `rows` rows."""

    op: str
    rows: int
    m: int
    k: int


def products(shape: str, rows: int) -> list[Product]:
    """The five products of a shape."""
    c = shape_config(shape, 4096)
    heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    sizes = {
        "qkv": (heads, c.hidden_size),
        "out": (c.hidden_size, c.num_heads * c.head_dim),
        "gate_up": (2 * c.intermediate_size, c.hidden_size),
        "down": (c.hidden_size, c.intermediate_size),
        "lm_head": (c.vocab_size, c.hidden_size),
    }
    return [Product(op, rows, *sizes[op]) for op in OPS]


def candidates(product: Product) -> Iterator[TileConfig]:
    """Parameters that may be good: enough bytes in flight, enough programs, and not too many registers."""
    return one_row(product) if product.rows == 1 else many_rows(product)


def one_row(product: Product) -> Iterator[TileConfig]:
    halves = 2 if product.op == "gate_up" else 1
    persistent = (4, 8, 16) if product.op == "lm_head" else (1,)
    for block, block_k, warps, unroll, per_core in itertools.product(
        (1, 2, 4, 8, 16), (256, 512, 1024, 2048), (1, 2, 4, 8), (1, 4), persistent
    ):
        per_thread = halves * block * block_k // (32 * warps)
        steps = -(-product.k // block_k)
        # in registers: the LM head has running bests besides
        fits = (32 if product.op == "lm_head" else 16) <= per_thread <= 64 and per_thread * unroll <= 128
        useful = block_k < 2 * tuning.next_power(product.k) and (unroll == 1 or steps > unroll // 2)
        if fits and useful and per_core * warps <= 48:
            yield TileConfig(block, block_k, stages=unroll, warps=warps, per_core=per_core)


def many_rows(product: Product) -> Iterator[TileConfig]:
    halves = 2 if product.op == "gate_up" else 1
    persistent = (1, 2) if product.op == "lm_head" else (1,)
    for block, block_k, split_k, stages, warps, per_core in itertools.product(
        (16, 32, 64, 128), (64, 128, 256, 512), (1, 2, 4, 8), (2, 3, 4, 6), (4, 8), persistent
    ):
        tile_rows = halves * block
        shared = (tile_rows + product.rows) * block_k * 2 * (stages - 1)
        programs = product.m // tile_rows * split_k
        steps = -(-product.k // (block_k * split_k))
        # a short reduction lies in the pipeline whole; a long one needs it deep
        deep = shared >= 32 * 1024 and stages > 2 if product.k > 2048 else shared >= 16 * 1024 and stages <= 4
        fits = deep and shared <= SHARED // per_core
        enough = product.op == "lm_head" or 60 <= programs <= 600
        whole = product.op not in ("gate_up", "lm_head") or split_k == 1
        if fits and enough and whole and stages <= steps + 1 and (warps == 4 or tile_rows >= 128) and tile_rows <= 128:
            yield TileConfig(block, block_k, split_k, stages, warps, per_core)


def with_prefetch(product: Product, config: TileConfig) -> Iterator[TileConfig]:
    """The same with weights asked for ahead of the wait."""
    for columns in (256, 512, 1024, 2048, 4096):
        if columns < 2 * product.k // config.split_k and columns * 32 >= 8 * 32 * config.warps:
            yield replace(config, prefetch=columns)


class Case:
    """The buffers of one product, and its launch."""

    def __init__(self, product: Product, copies: int, pdl: bool) -> None:
        rows, m, k = product.rows, product.m, product.k
        cuda = torch.device("cuda")
        bf16 = partial(torch.randn, dtype=torch.bfloat16, device=cuda)
        self.product, self.pdl = product, pdl
        self.cores = torch.cuda.get_device_properties(cuda).multi_processor_count
        self.weights = [bf16(m, k) for _ in range(copies)]
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
                self.x, self.scale, self.x, self.squares, weight, None, None, self.out, self.parts, self.tickets, 1e-5,
                config, self.pdl,
            )  # fmt: skip
        elif op == "gate_up":
            norm_gated(
                self.x, self.scale, self.x, self.squares, weight, None, None, self.half, 1e-5, "silu", config, self.pdl
            )
        elif op == "lm_head":
            programs = lm_head_programs(m, config, self.cores)
            scores = self.sums[: programs * rows].view(programs, rows)
            lm_head(
                self.x, self.scale, self.x, self.squares, weight, None, self.ints, self.ints, self.ints[:1], self.seed,
                self.temperature, scores, scores.view(torch.int32), None, num_tokens=m, eps=1e-5, softcap=None,
                config=config, pdl=self.pdl,
            )  # fmt: skip
        else:
            tiles = -(-m // config.block)
            linear_residual(
                self.x, weight, None, None, self.hidden, self.norm, self.out,
                self.sums[: tiles * rows].view(tiles, rows), self.parts, self.tickets, config, self.pdl,
            )  # fmt: skip

    def chain(self, config: TileConfig) -> None:
        """Queue it once for every copy of the weights."""
        for weight in self.weights:
            self.launch(config, weight)


Job = tuple[Product, list[TileConfig], bool]
AttentionJob = tuple[Heads, list[AttentionConfig], bool]


def runs(launch: Callable[[], None]) -> bool:
    """Compile a candidate into the cache on disk, by launching it; False if the card cannot run it."""
    try:
        launch()
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory or too many registers, in several types of error
        if "illegal" in str(error):
            raise
        return False
    return True


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
            case = Case(product, max(2, -(-L2_BYTES // (product.m * product.k * 2))), self.pdl)
            times = [
                (graph_ms(partial(case.chain, config)) / len(case.weights), config)
                for p, config in valid
                if p == product
            ]
            results[product] = sorted(times, key=lambda pair: pair[0])
            del case
        return results


def tune_attention(
    wanted: list[Heads], tuner: Tuner, report: Callable[[str], None]
) -> dict[Heads, list[AttentionConfig]]:
    """The parameters of every attention, best first."""
    all_configs = {heads: list(attention_candidates(heads)) for heads in wanted}
    jobs = [[(h, c[w :: tuner.workers], tuner.pdl) for h, c in all_configs.items()] for w in range(tuner.workers)]
    valid = [pair for part in tuner.pool.map(compile_attention, jobs, chunksize=1) for pair in part]
    best = {}
    for heads in wanted:
        times = time_attention(heads, [config for h, config in valid if h == heads], tuner.pdl)
        best[heads] = [config for _, _, config in times]
        for short, long, config in times[:2]:
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
        name = tuning.key(product.op, product.rows, product.m, product.k)
        best[name] = asdict(times[0][1])
        for milliseconds, config in [*times[:2], plain[product][0]]:
            rate = product.m * product.k * 2 / milliseconds / 1e9
            report(f"{name}: {milliseconds * 1000:.2f} us, {rate:.3f} TB/s, {config}")
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shapes", nargs="+", default=["135m", "1b", "8b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 32, 64])
    parser.add_argument("--only", nargs="+", choices=["products", "attention"], default=["products", "attention"])
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--out", type=Path, default=tuning.CONFIGS)
    args = parser.parse_args()
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    pairs = [(shape, rows) for shape in args.shapes for rows in args.rows]
    path = args.out / f"{tuning.card_name(torch.device('cuda'))}.json"
    best = json.loads(path.read_text())["parameters"] if path.is_file() else {}
    tuner, report = Tuner(pdl, args.workers), partial(print, flush=True)
    if "products" in args.only:
        best |= tune(list(dict.fromkeys(product for pair in pairs for product in products(*pair))), tuner, report)
    if "attention" in args.only:
        ranked = tune_attention(list(dict.fromkeys(attentions(*pair) for pair in pairs)), tuner, report)
        best |= {heads.key: asdict(configs[0]) for heads, configs in ranked.items()}
        wanted = [variant for pair in pairs for variant in variants(*pair, finalists(ranked[attentions(*pair)]))]
        write(path, best)  # the passes take their products from there
        tuner.pool.map(compile_variant, wanted, chunksize=1)
        tuning.table.cache_clear()
        best |= best_passes(wanted, report)
    write(path, best)
    print(path)


def write(path: Path, best: dict[str, dict[str, int]]) -> None:
    """Write a table of parameters."""
    content = {"torch": torch.__version__, "commit": git_commit(), "parameters": dict(sorted(best.items()))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
