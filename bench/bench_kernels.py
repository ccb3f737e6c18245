"""Each kernel of a round by itself, at the shapes of three models: microseconds, and the rate at which it reads.

    python bench/bench_kernels.py --shapes 135m 1b 8b --rows 1 16 64 --out h100

Products run over as many copies of their weights as overflow the L2 cache, and the cache is flushed before every
replay. Beside each kernel stand the product alone by torch, and the same work by torch's operators one by one, both as
graphs in the same turns. Every kernel is compared with torch's result before it is timed. What stands behind the LM
head, or ahead of the pass, finds its input in the cache, as it does in a round.
"""

import argparse
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import torch
import torch.nn.functional as F
from harness import Times, capture, cold_times
from kernel_parts import PARTS, Part
from rig import launch_mode, random_chain
from shapes import SHAPES
from torch import Tensor
from tune import L2_BYTES, Case
from tune_attention import SCRATCH, AttentionCase, attentions
from tune_products import OPS, Product, products

from pad_engine.kernels.lm_head import lm_head, lm_head_programs
from pad_engine.kernels.rms_norm import rms_norm_ref
from pad_engine.kernels.rope import rope_ref
from pad_engine.kernels.tree_attention import tree_attention_ref
from pad_engine.kernels.tuning import TileConfig, attention_config, tile_config

CUDA = torch.device("cuda")
ATTENTION_LAYERS, CONTEXT = 8, 256
Baselines = dict[str, Callable[[], object]]


def rms(case: Case) -> Tensor:
    """fp32 `[N, 1]`: what the kernels of several rows are told, or what one row's is."""
    rows, k = case.product.rows, case.product.k
    squares = case.x.float().square().sum(-1) if rows == 1 else case.squares.sum(0)
    return torch.rsqrt(squares / k + 1e-5)[:, None]


def expected(case: Case, weight: Tensor) -> Tensor:
    """The product's result in fp32, on the case's own inputs."""
    x = case.x.float()
    if case.product.op in ("out", "down"):
        return x @ weight.float().t() + case.hidden.float()
    scaled = x * case.scale.float() if case.product.rows == 1 else x
    y = scaled @ weight.float().t() * rms(case)
    if case.product.op != "gate_up":
        return y
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def check_product(case: Case, config: TileConfig) -> None:
    """AssertionError when the kernel is not the product that torch has."""
    op, rows, weight = case.product.op, case.product.rows, case.weights[0]
    want = expected(case, weight)
    if op == "lm_head":
        got, want = best_scores(case, config, weight), want.amax(1)
    else:
        case.launch(config, weight)
        got = {"qkv": case.out, "gate_up": case.half}.get(op, case.hidden).float()
    error = ((got - want).norm() / want.norm()).item()
    assert error < 2e-2, f"{op} of {rows} rows is {error:.3g} away from torch's"


def best_scores(case: Case, config: TileConfig, weight: Tensor) -> Tensor:
    """fp32 `[N]`: each row's largest logit, by the LM head with scores and ids apart, which share memory in a case."""
    programs = lm_head_programs(case.product.m, config, case.cores)
    scores = torch.empty(programs, case.product.rows, device=weight.device)
    ids = torch.empty_like(scores, dtype=torch.int32)
    lm_head(
        case.x, case.scale, case.x, case.squares, weight, None, case.ints, case.ints, case.ints[:1], case.seed,
        case.temperature, scores, ids, None, num_tokens=case.product.m, eps=1e-5, softcap=None, config=config,
        pdl=case.pdl,
    )  # fmt: skip
    return scores.amax(0)


def product_baselines(case: Case) -> Baselines:
    """The product alone, and all of the work, by torch."""
    op, x, h, out = case.product.op, case.x, case.hidden, case.out

    def one(weight: Tensor) -> object:
        if op in ("out", "down"):
            return torch.add(h, F.linear(x, weight), out=out)
        y = F.linear(rms_norm_ref(x, case.scale, 1e-5), weight)
        if op == "lm_head":
            return y.argmax(-1)
        if op == "gate_up":
            gate, up = y.chunk(2, dim=-1)
            return F.silu(gate).mul_(up)
        return y

    return {
        "product": lambda: [F.linear(x, weight) for weight in case.weights],
        "unfused": lambda: [one(weight) for weight in case.weights],
    }


def check_attention(case: AttentionCase, reference: Callable[[Tensor], Tensor], queue: Callable[[], object]) -> None:
    """AssertionError when the kernel's last layer is not what torch has."""
    queue()
    want = reference(case.cache[-1]).float()
    error = ((case.out.float() - want).norm() / want.norm()).item()
    assert error < 4e-2, f"attention of {case.heads.rows} rows is {error:.3g} away from torch's"


def attention_by_torch(case: AttentionCase) -> Callable[[Tensor], Tensor]:
    """Rotation, append and attention of one layer `[2, 1, H_kv, slots, D]` by torch, for a chain."""
    heads, scratch = case.heads, SCRATCH
    rows, group = heads.rows, heads.heads // heads.kv_heads
    mask = torch.zeros(rows, rows + CONTEXT, device=CUDA)
    # slots run backwards: the last row has the lowest slot
    mask[:, :rows] = torch.full((rows, rows), -torch.inf, device=CUDA).triu_(1).flip(1)
    mask = mask.repeat(group, 1).to(case.qkv.dtype)
    place = slice(scratch - rows, scratch)
    cos, sin = (table[CONTEXT : CONTEXT + rows, None] for table in (case.cos, case.sin))
    # the kernel takes one angle a pair, from the table's second half
    cos = torch.cat([cos[..., heads.head_dim // 2 :]] * 2, -1)
    sin = torch.cat([-sin[..., heads.head_dim // 2 :], sin[..., heads.head_dim // 2 :]], -1)

    def run(layer: Tensor) -> Tensor:
        qkv = case.qkv.view(rows, heads.heads + 2 * heads.kv_heads, heads.head_dim)
        qk = rope_ref(qkv[:, : heads.heads + heads.kv_heads], cos, sin)
        layer[0, 0, :, place] = qk[:, heads.heads :].flip(0).transpose(0, 1)
        layer[1, 0, :, place] = qkv[:, heads.heads + heads.kv_heads :].flip(0).transpose(0, 1)
        keys, values = (layer[i, 0, :, scratch - rows : scratch + CONTEXT] for i in (0, 1))
        return tree_attention_ref(qk[:, : heads.heads], keys, values, mask, heads.head_dim**-0.5)

    return run


def row(shape: str, rows: int, name: str, times: list[Times], extra: dict[str, Any]) -> dict[str, Any]:
    """A line of the table: microseconds of ours, of the product alone and of the unfused form."""
    found: dict[str, Any] = {"shape": shape, "rows": rows, "kernel": name}
    for column, t in zip(("us", "product_us", "unfused_us"), times, strict=False):
        found |= {column: round(1000 * t.median, 2), f"{column}_p20": round(1000 * t.p20, 2)}
        found |= {f"{column}_p80": round(1000 * t.p80, 2)}
    return found | extra


def rates(size: int, t: Times, read_rate: float) -> dict[str, float]:
    """GB/s of the bytes that must be read, and their share of the read rate."""
    rate = size / t.median / 1e6
    return {"gb_s": round(rate, 1), "share": round(rate / 1000 / read_rate, 4)}


def time_product(shape: str, product: Product, pdl: int, read_rate: float, repeats: int) -> dict[str, Any]:
    """One product, cold, against torch."""
    size = 2 * product.m * product.k
    case = Case(product, max(2, -(-L2_BYTES // size)), pdl)
    config = tile_config(product.op, product.rows, product.m, product.k, CUDA, torch.bfloat16)
    check_product(case, config)
    baselines = product_baselines(case)
    graphs = [capture(partial(case.chain, config)), *(capture(run) for run in baselines.values())]
    times = [t.over(len(case.weights)) for t in cold_times([graph.replay for graph in graphs], repeats)]
    return row(shape, product.rows, product.op, times, rates(size, times[0], read_rate))


def time_attention(shape: str, rows: int, pdl: int, read_rate: float, repeats: int) -> dict[str, Any]:
    """Attention behind 256 committed tokens, cold, against torch."""
    heads = attentions(shape, rows)
    case = AttentionCase(heads, ATTENTION_LAYERS, pdl)
    case.length.fill_(CONTEXT)
    config = attention_config(rows, heads.heads, heads.kv_heads, heads.head_dim, CUDA)
    queue, run = partial(case.queue, config), attention_by_torch(case)
    check_attention(case, run, queue)
    graphs = [capture(queue), capture(lambda: [run(layer) for layer in case.cache])]
    ours, theirs = (t.over(ATTENTION_LAYERS) for t in cold_times([graph.replay for graph in graphs], repeats))
    size = 2 * heads.kv_heads * heads.head_dim * CONTEXT * case.cache.element_size()
    found = row(shape, rows, "attention", [ours], rates(size, ours, read_rate))
    return found | {"unfused_us": round(1000 * theirs.median, 2)}


def time_part(shape: str, rows: int, part: type[Part], repeats: int) -> dict[str, Any]:
    """A kernel behind the LM head or ahead of the pass, warm, against torch."""
    case = part(shape, random_chain(rows, SHAPES[shape]["vocab_size"]), CUDA)
    case.check()
    graphs = [capture(lambda: [case.queue() for _ in range(part.chain)])]
    graphs.append(capture(lambda: [case.by_torch() for _ in range(part.chain)]))
    lists: list[list[float]] = [[], []]
    for _ in range(repeats):
        for graph, values in zip(graphs, lists, strict=True):
            values.append(harness.replay_ms(graph) / part.chain)
    ours, theirs = Times.of(lists[0]), Times.of(lists[1])
    return row(shape, rows, part.name, [ours], {"unfused_us": round(1000 * theirs.median, 2)})


def lines(shape: str, rows: int, read_rate: float, repeats: int) -> Iterator[dict[str, Any]]:
    """Every kernel of a round of so many rows."""
    pdl = launch_mode(shape, rows, CUDA)
    for product in products(shape, rows):
        yield time_product(shape, product, pdl, read_rate, repeats)
        gc.collect()
        torch.cuda.empty_cache()
    yield time_attention(shape, rows, pdl, read_rate, repeats)
    for part in PARTS:
        if rows > 1 or not part.only_trees:
            yield time_part(shape, rows, part, repeats)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64], choices=[1, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", required=True, help="folder of results/ for this card, h100 for instance")
    args = parser.parse_args()
    read_rate = harness.read_rate()
    print(f"read rate {read_rate:.3f} TB/s; kernels of a pass: {', '.join(OPS)}", flush=True)
    found = []
    for shape in args.shapes:
        for rows in args.rows:
            for line in lines(shape, rows, read_rate, args.repeats):
                print(line, flush=True)
                found.append(line)
    result = {"read_tb_s": round(read_rate, 4), "kernels": found}
    print(harness.save("kernels", result, args.out), harness.save_csv("kernels", found, args.out), sep="\n")


if __name__ == "__main__":
    main()
