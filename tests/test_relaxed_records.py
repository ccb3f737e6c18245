"""Given as records, every relaxed rule has the same paths in torch, in the accept kernel and in libpad."""

import random
from dataclasses import replace

import pytest
import torch
from launches import CUDA, DEVICE
from test_accept_kernel import PDL, Round, fill_forest, some_tree
from torch import Tensor

from pad_engine import native, native_tail
from pad_engine.accept import relaxed_paths, relaxed_verdict
from pad_engine.device_round import MAX_ROWS
from pad_engine.integrations.chain import bounded
from pad_engine.kernels.accept import REPORT_HEADER, TRACE_START, Relaxation, accept_forest
from pad_engine.rules.classifier import PIVOT_MLP, Classifier
from pad_engine.rules.override import Judged, Override
from pad_engine.rules.pivot import not_pivotal, not_pivotal_kernel
from pad_engine.rules.select import make_fly, make_margin, make_topk, make_typical
from pad_engine.tree import Forest, to_int64

# the interpreter computes what the kernel then masks
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

RECORDS = 10_000 if CUDA else 40
VOCAB = 6
KIND = native_tail.Kind
# whose classifier is never asked: the records say what it says
PIVOT = Override(not_pivotal, not_pivotal_kernel, (0.3, 0.0), classifier=Classifier(PIVOT_MLP, 0, 1, (), {}))
RULES = {
    "margin-paper": (make_margin({"theta": "0.71"}, VOCAB), KIND.MARGIN_PAPER),
    "margin-ratio": (make_margin({"form": "ratio", "rho": "0.31"}, VOCAB), KIND.MARGIN_RATIO),
    "margin-gap": (make_margin({"form": "gap", "m": "0.333"}, VOCAB), KIND.MARGIN_GAP),
    "pivot": (PIVOT, KIND.PIVOT),
    "judge": (replace(PIVOT, thresholds=(0.61, 0.0)), KIND.PIVOT),
    "typical": (make_typical({"eps": "0.21", "delta": "0.4"}, VOCAB), KIND.TYPICAL),
    "topk": (make_topk({"k": "2"}, VOCAB), KIND.TOPK),
    "fly-paper": (make_fly({"theta": "0.41", "lookahead": "2"}, VOCAB), KIND.FLY_PAPER),
    "fly-released": (make_fly({"form": "released", "theta": "0.53", "lookahead": "2"}, VOCAB), KIND.FLY_RELEASED),
}  # fmt: skip
BOUNDS = [{}, {"log_floor": -2.017}, {"log_floor": -1.513, "outer_floor": True}, {"max_overrides": 2, "window": 5}]
BOUNDS += [{"max_overrides": 1, "window": 64}]


def some_judged(forest: Forest, gen: torch.Generator, by_classifier: bool) -> Judged:
    """Rows of few tokens, with equal logits, impossible tokens, and rows that are not finite."""
    n = len(forest.token)
    logits = torch.randint(-4, 9, (n, VOCAB), generator=gen) / 2 + torch.rand(n, 1, generator=gen)
    logits[torch.rand(n, VOCAB, generator=gen) < 0.1] = -torch.inf
    logits[torch.rand(n, generator=gen) < 0.03] = torch.nan
    logits[torch.rand(n, generator=gen) < 0.03, 2] = torch.inf
    order = logits.sort(dim=1, descending=True, stable=True)
    lse = logits.logsumexp(1)
    p = (logits - lse[:, None]).exp()
    entropy = -torch.where(p == 0, 0.0, p * p.log()).sum(1)
    pivot = torch.rand(n, generator=gen) if by_classifier else torch.ones(n)
    pivot[torch.rand(n, generator=gen) < 0.1] = 0.0 if by_classifier else 1.0
    own = logits.gather(1, forest.token.long()[:, None])[:, 0]
    return Judged(
        forest.token, order.indices[:, :3].int(), order.values[:, :3].contiguous(), lse, entropy, own, pivot
    )  # fmt: skip


def on_device(r: Round, forest: Forest, judged: Judged, override: Override, by_classifier: bool, history: list[int]):
    """The kernel's paths, ends, overrides by row, and what it makes of the histories."""
    rows = len(r["token"])
    values, ids = torch.zeros(7, rows), torch.full((3, rows), -1, dtype=torch.int32)
    fields = [*judged.top_logit.t(), judged.lse, judged.entropy, judged.token_logit, judged.pivot_prob]
    values[:, : len(forest.token)], ids[:, : len(forest.token)] = torch.stack(fields), judged.top_id.t()
    scalars = torch.tensor(override.scalars, dtype=torch.float32, device=DEVICE)
    kept = torch.tensor([to_int64(word) for word in history], device=DEVICE)
    relaxation = Relaxation(override.kernel, by_classifier, values.to(DEVICE), ids.to(DEVICE), scalars)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    accept_forest(**r.tensors, pdl=PDL, relaxation=relaxation, history=kept)
    after = r.copy()
    paths, flags = [], [False] * len(forest.token)
    for seq in range(len(history)):
        report = after["report"][0, seq]
        count = int(report[0])
        path = after["path"][seq, : int(report[1]) + 1].tolist()
        trace = report[TRACE_START : TRACE_START + MAX_ROWS]
        for place, row in enumerate(path[1:]):
            flags[row] = bool(trace[place])
        paths.append((path, int(report[REPORT_HEADER + count - 1]) if count else -1))
    return paths, flags, kept.tolist()


def fill_picks(r: Round, forest: Forest, gen: torch.Generator) -> Tensor:
    """The target's own tokens, which drafts often follow, -1 at rows that are not finite: int32 `[N]`, put into the
    round as one part, for requests that end nowhere."""
    n, seqs, drafted = len(forest.token), len(forest.starts), forest.parent >= 0
    pick = torch.randint(VOCAB, (n,), generator=gen, dtype=torch.int32)
    follows = drafted & (torch.rand(n, generator=gen) < 0.5)
    pick[forest.parent[follows].long()] = forest.token[follows]
    pick[torch.rand(n, generator=gen) < 0.02] = -1
    r["part_score"][:, :n] = torch.where(pick < 0, torch.inf, 0.0).to(DEVICE)
    r["part_id"][:, :n] = pick.clamp(min=0).to(DEVICE)
    r.set("limit", [10_000] * seqs)
    r.set("cache_len", [3] * seqs)
    r.set("done", [0] * seqs)
    r.set("end_ids", [-1, -1])
    r["round_index"].zero_()
    return pick


@pytest.mark.skipif(not native.available(), reason="compares with libpad")
@pytest.mark.parametrize("name", RULES)
def test_paths_are_the_same_everywhere(name: str) -> None:
    (override, kind), rng = RULES[name], random.Random(name)
    by_classifier, seqs, overrides, cut = name in ("pivot", "judge"), 2, 0, 0
    rounds = {rows: Round.make(seqs, rows, 1, 2, ring=1) for rows in (16, 32)}
    done = 0
    while done < RECORDS:
        bounds = rng.choice(BOUNDS)
        rule = replace(override, **bounds)
        rows = rng.choice([16, 16, 32])
        r = rounds[rows]
        trees = [some_tree(rng, rng.randint(1, rows // seqs)) for _ in range(seqs)]
        gen = torch.Generator().manual_seed(rng.getrandbits(60))
        for tree in trees:
            tree.tokens[:] = torch.randint(VOCAB, (len(tree),), generator=gen).tolist()
        forest = fill_forest(r, trees)
        n = len(forest.token)
        judged = some_judged(forest, gen, by_classifier)
        pick = fill_picks(r, forest, gen)
        drafted = forest.parent >= 0
        history = [rng.getrandbits(64) & rng.getrandbits(64) for _ in range(seqs)]
        parents = torch.where(drafted, forest.parent, 0).long()
        base, known = (forest.token == pick[parents]) & drafted, (pick[parents] >= 0) & drafted
        near = (judged.pivot_prob - rule.thresholds[0]).abs() < 1e-5
        if by_classifier and bool(near.any()):
            continue
        verdict = relaxed_verdict(base, known, judged, rule)
        paths = relaxed_paths(forest, verdict, rule, list(enumerate(history)))
        expected = [(path, int(pick[path[-1]])) for path in paths]
        flags = [bool(verdict.overridden[row]) and any(row in path for path in paths) for row in range(n)]
        got, got_flags, got_history = on_device(r, forest, judged, rule, by_classifier, history)
        for (path, end), (own, own_end), root in zip(expected, got, forest.starts, strict=True):
            # a path that ends where a row is not finite emits nothing, and reports no path
            assert own_end == end and (end < 0 or own == path), (name, bounds, root)
        if all(end >= 0 for _, end in expected):
            assert got_flags == flags
            for (path, _), past, now in zip(expected, history, got_history, strict=True):
                for flag in [*(flags[row] for row in path[1:]), False]:  # the token after the path is the target's
                    past = (past << 1 | flag) & (1 << 64) - 1
                assert to_int64(past) == now
        theirs = native_tail.relaxed_path(
            bounded(kind, rule), forest.token, forest.parent, pick, forest.tree_mask_bits, forest.depth, forest.seq,
            native_tail.Judged(*judged[1:]), seqs, history,
        )  # fmt: skip
        assert list(zip(theirs.paths, theirs.ends, strict=True)) == expected
        assert list(map(bool, theirs.overridden)) == flags
        done += seqs
        overrides += sum(flags)
        cut += paths != relaxed_paths(
            forest, verdict, replace(rule, lookahead=0, reach=0, max_overrides=0), list(enumerate(history))
        )
    assert overrides > RECORDS // 50 and (cut > 0 or not CUDA)
