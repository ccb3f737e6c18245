"""What acceptance costs behind a pass of 16 nodes on a GPU, by rule, and what torch makes of the same from logits.

    python bench/bench_tail.py --shapes 1b 8b --out h100

Each rule's captured round, less the same pass whose LM head only writes bf16 logits; by turns, so that the card's state
is the same for all. A floor that no token reaches keeps every path at the greedy one: with longer paths a rule would be
charged for the context that they add. The torch forms read those logits and the tapped states: one operator after
another in a graph, and compiled by Inductor. Rejection is the kernels alone, on logits that lie there. The classifier's
weights are random.
"""

import argparse
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import harness
import torch
from bench_step import CONTEXT, CUDA, LENGTH, TAIL_NODES, round_ms, write_logits
from harness import Times, busy_ms, graph_ms
from rig import SEED, Rig, random_chain
from torch import Tensor

from pad_engine.graphs import LOGITS, TREE, Rounds
from pad_engine.kernels.rejection import RejectionWorkspace, rejection_chain
from pad_engine.rules.classifier import PIVOT_MLP, Classifier, expected_shapes
from pad_engine.rules.override import Override
from pad_engine.rules.pivot import not_pivotal, not_pivotal_kernel
from pad_engine.rules.select import make_margin, make_typical

RULES = ("greedy", "match", "margin", "typical", "pivot")


def random_classifier(hidden: int, layers: int) -> Classifier:
    """PAD's classifier with random weights, behind the layer at 0.78 of the depth."""
    generator = torch.Generator().manual_seed(SEED)
    scalars = ("entropy", "probability")
    shapes = expected_shapes(PIVOT_MLP, hidden, len(scalars))
    weights = {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}
    return Classifier(PIVOT_MLP, round(0.78 * layers), hidden, scalars, weights).to(CUDA)


def overrides(rig: Rig) -> dict[str, Override | None]:
    """What each rule relaxes."""
    config = rig.decoder.config
    classifier = random_classifier(config.hidden_size, config.num_layers)
    pivot = Override(not_pivotal, not_pivotal_kernel, (0.3, 0.0), log_floor=-9.2, classifier=classifier)
    relaxed = {"margin": make_margin({}, rig.vocab), "typical": make_typical({}, rig.vocab), "pivot": pivot}
    return {name: replace(relaxed[name], log_floor=0.0) if name in relaxed else None for name in RULES}


def in_rounds(rig: Rig, replays: int, turns: int) -> dict[str, Any]:
    """Microseconds of each rule's tail, and beyond the greedy one's."""
    rules, tree = overrides(rig), random_chain(TAIL_NODES, rig.vocab)
    plain, kept = rig.rounds, {}
    for name, override in rules.items():
        rounds = plain
        if override is not None:
            rounds = Rounds(rig.decoder, rig.cache, num_tokens=rig.vocab, max_budget=64, override=override)
        rounds.queue_tree([tree])
        kept[name] = rounds
    write_logits(plain)
    alone = partial(plain.replay, LOGITS, TAIL_NODES)
    alone()
    beyond: dict[str, list[float]] = {name: [] for name in rules}
    over: dict[str, list[float]] = {name: [] for name in rules}
    for _ in range(turns):
        rig.rounds = plain
        rig.begin(CONTEXT + replays // 2)
        base = busy_ms(alone, replays)
        for name, rounds in kept.items():
            rig.rounds = rounds
            whole = partial(rounds.queue, TREE, TAIL_NODES)
            beyond[name].append(1000 * (round_ms(rig, whole, replays, 1.0 if name == "match" else 0.0) - base))
            over[name].append(beyond[name][-1] - beyond["greedy"][-1])
    rig.rounds = plain
    return {"tail_us": summed(beyond), "over_greedy_us": summed(over)}


def summed(values: dict[str, list[float]]) -> dict[str, Any]:
    """Median and percentiles by name."""
    times = {name: Times.of(found) for name, found in values.items()}
    return {
        name: {"us": round(t.median, 2), "p20": round(t.p20, 2), "p80": round(t.p80, 2)} for name, t in times.items()
    }


def torch_tail(
    logits: Tensor, hidden: Tensor, token: Tensor, w: dict[str, Tensor], theta: float, sigma: float
) -> tuple[Tensor, Tensor]:
    """Margin and pivot acceptance of a chain by tensor operators: how many tokens stay, and the one after them."""
    rows = logits.float()
    lse = rows.logsumexp(-1)
    p = (rows - lse[:, None]).exp()
    entropy = lse - (p * rows).sum(-1)
    top, ids = rows.topk(3, -1)
    judge, own = slice(0, -1), token[1:]
    chance = p[judge].gather(1, own[:, None])[:, 0]
    scalars = torch.stack((entropy[judge], chance), 1)
    units = hidden[1:].float() @ w["hidden.weight"].t() + w["hidden.bias"]
    x = torch.cat((units, scalars @ w["scalars.weight"].t() + w["scalars.bias"]), 1)
    z = (x @ w["layer1.weight"].t() + w["layer1.bias"]).relu()
    pivot = (z @ w["layer2.weight"].t() + w["layer2.bias"]).softmax(-1)[:, 1]
    close = (own == ids[judge, 1]) & (top[judge, 0] > 0) & (top[judge, 1] > theta * top[judge, 0])
    accept = (own == ids[judge, 0]) | close | ((pivot <= sigma) & (chance >= 1e-4))
    count = accept.int().cumprod(0).sum()
    return count, ids[:, 0].gather(0, count[None])


def by_torch(rig: Rig) -> dict[str, float]:
    """Microseconds of torch_tail, as it is and compiled."""
    config = rig.decoder.config
    weights = random_classifier(config.hidden_size, config.num_layers).weights
    generator = torch.Generator(CUDA).manual_seed(SEED)
    logits = torch.randn(TAIL_NODES, rig.vocab, dtype=torch.bfloat16, device=CUDA, generator=generator)
    hidden = torch.randn(TAIL_NODES, config.hidden_size, dtype=torch.bfloat16, device=CUDA, generator=generator)
    token = torch.arange(TAIL_NODES, device=CUDA)
    compiled: Callable[..., Any] = torch.compile(torch_tail, dynamic=False)
    found = {}
    for name, function in (("unfused", torch_tail), ("compiled", compiled)):
        call = partial(function, logits, hidden, token, weights, 0.9, 0.3)
        call()
        torch.cuda.synchronize()
        found[name] = round(1000 * graph_ms(call), 2)
    return found


def rejection_us(rig: Rig) -> float:
    """Microseconds of the kernels that decide a chain by rejection."""
    generator = torch.Generator(CUDA).manual_seed(SEED)
    logits = torch.randn(TAIL_NODES, rig.vocab, device=CUDA, generator=generator)
    q = (logits + 0.3 * torch.randn(logits.shape, device=CUDA, generator=generator)).softmax(-1)
    token = q.multinomial(1, generator=generator)[:, 0].roll(1).int()
    pick, workspace = token.clone(), RejectionWorkspace(TAIL_NODES, CUDA)
    call = partial(
        rejection_chain, logits, q, token, pick, workspace, temperature=1.0, position=300, seed=SEED, round_index=3
    )
    call()
    torch.cuda.synchronize()
    return round(1000 * graph_ms(call), 2)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shapes", nargs="+", default=["1b", "8b"])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--out", required=True, help="folder of results/ for this card, h100 for instance")
    args = parser.parse_args()
    found = []
    for shape in args.shapes:
        gc.collect()
        torch.cuda.empty_cache()
        rig = Rig(shape, length=LENGTH, device=CUDA)
        result: dict[str, Any] = {"shape": shape, "nodes": TAIL_NODES, "vocabulary": rig.vocab}
        result |= in_rounds(rig, args.replays, args.turns)
        print(shape, result, flush=True)
        result["rejection_us"] = rejection_us(rig)
        result["torch_us"] = by_torch(rig)
        print(shape, {name: result[name] for name in ("rejection_us", "torch_us")}, flush=True)
        found.append(result)
        print(harness.save("tail", {"tails": found}, args.out), flush=True)
        del rig


if __name__ == "__main__":
    main()
