"""Trees that a draft model grows on the device are those of the host's builder, and every path of theirs is right.

On a GPU the rounds are captured; elsewhere their kernels are interpreted, so models and answers are small.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launches import CUDA, DEVICE, MODES, ints, repeat
from tiny import Make, some_ids
from torch import Tensor

from pad_engine import Engine, SamplingParams
from pad_engine.drafters.draft_model import DraftModel
from pad_engine.drafters.draft_model_device import DeviceDraftModel
from pad_engine.drafters.draft_recipes import WIDTH, Reading, Tree
from pad_engine.kernels.draft_tree import best_ref, candidate_count, empty_candidates, rank_level, rank_level_ref
from pad_engine.kernels.keep_nodes import keep_nodes, keep_nodes_ref
from pad_engine.kernels.row_stats import RowStats, StatParts, row_stats_ref
from pad_engine.loader import load_engine
from pad_engine.tree import DraftTree, make_forest
from pad_engine.trees.best_first import BestFirst
from pad_engine.trees.builder import Candidate, tree_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPT = some_ids(9)


def parts_of(logits: Tensor, programs: int) -> StatParts:
    """What an LM head of so many programs would leave, `[., ., N]`."""
    values, ids, first = [], [], 0
    for chunk in logits.chunk(programs, dim=1):
        stats, peak = row_stats_ref(chunk), chunk.max(1, keepdim=True).values
        weight = (chunk - peak).exp()
        sums = [peak[:, 0], weight.sum(1), (chunk * weight).sum(1)]
        values.append(torch.stack([*sums, *stats.top_logit.t()]))
        ids.append(stats.top_id.t() + first)
        first += chunk.shape[1]
    return StatParts(torch.stack(values).to(DEVICE), torch.stack(ids).int().to(DEVICE))


class Growth:
    """The candidates of a tree, level by level, by the kernels and by their reference."""

    def __init__(self, levels: int, limit: int = 99, done: int = 0) -> None:
        self.levels, self.held, self.limit, self.done = levels, 10, limit, done
        self.candidates = empty_candidates(candidate_count(levels, WIDTH), 64, DEVICE)
        self.row_token, self.row_depth, self.row_start = ints([-7] * 64), ints([-7] * 64), ints([0, -7])
        self.row_mask, self.draft_len = ints([0] * 64, torch.int64), ints([-7])
        self.token, self.parent = torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
        self.log_prob, self.rows = torch.zeros(0), [-1]

    def grow(self, logits: Tensor, level: int) -> None:
        """One level more. logits: `[16, V]` of a pass whose new rows' places the kernels know."""
        c, ticket, first = self.candidates, ints([0]), len(self.token)
        passed, scalars = ints([0, 2]), [ints([value]) for value in (self.held - 1, self.limit, self.done)]
        stats = parts_of(logits, 5)

        def launch() -> None:
            rank_level(
                stats, passed, *scalars, self.draft_len, c, self.row_token, self.row_depth, self.row_mask,
                self.row_start, ticket, level=level, width=WIDTH, last=level == self.levels, max_len=40, pdl=MODES[0],
            )  # fmt: skip

        repeat(launch, *c, self.row_token, self.row_depth, self.row_mask, self.row_start, self.draft_len, ticket)
        rows = [1] if level == 1 else list(range((level - 2) * WIDTH, (level - 1) * WIDTH))
        before = torch.tensor([0.0]) if level == 1 else self.log_prob[self.rows]
        stats_of_rows = RowStats(*(field[rows] for field in row_stats_ref(logits)))
        token, parent, log_prob = rank_level_ref(stats_of_rows, torch.tensor(self.rows), before)
        if self.done or self.held + level >= self.limit:
            token, log_prob = token * 0, torch.full_like(log_prob, -torch.inf)
        self.token, self.parent = torch.cat([self.token, token]), torch.cat([self.parent, parent])
        count = len(self.token)
        assert c.token[:count].tolist() == self.token.tolist() and c.parent[:count].tolist() == self.parent.tolist()
        torch.testing.assert_close(c.log_prob[first:count].cpu(), log_prob, rtol=0, atol=1e-5)
        # from here on by the kernel's own sums, so that no rounding makes another order
        self.log_prob = c.log_prob[:count].cpu()
        self.rows = [first + place for place in best_ref(self.log_prob[first:], WIDTH)]
        if level < self.levels:
            self.check_rows(level)

    def check_rows(self, level: int) -> None:
        """The rows of the next pass are the best of this level, behind all rows before, each seeing its own path."""
        start, stop = (level - 1) * WIDTH, level * WIDTH
        row_of = {candidate: row for row, candidate in enumerate(self.candidates.row[:stop].tolist())}
        assert self.candidates.row[start:stop].tolist() == self.rows
        assert self.row_token[start:stop].tolist() == self.token[self.rows].tolist()
        assert self.row_depth[start:stop].tolist() == [level - 1] * WIDTH
        assert self.row_start.tolist() == [0, stop] and int(self.draft_len) == self.held
        for row, candidate in enumerate(self.rows, start):
            path = {row}
            while (candidate := int(self.parent[candidate])) >= 0:
                path.add(row_of[candidate])
            assert int(self.row_mask[row]) == sum(1 << place for place in path)


@pytest.mark.parametrize("seed", range(4))
def test_levels_and_the_nodes_that_stay(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    levels, nodes = rng.choice([1, 2, 4, 5]), rng.choice([2, 9, 16, 60])
    growth = Growth(levels, limit=rng.choice([99, 13]), done=int(seed == 3))
    for level in range(1, levels + 1):
        logits = (torch.randn(16, 50) * 3).mul(4).round().div(4)  # with ties
        if seed == 2 and level == 2:
            logits[1, 7] = torch.nan
        growth.grow(logits, level)
    ids = torch.arange(100, dtype=torch.int32, device=DEVICE)[None]
    out = [ints([-7] * 64) for _ in range(3)]
    mask, start, length = ints([0] * 64, torch.int64), ints([-7, -7]), ints([9])

    def launch() -> None:
        keep_nodes(growth.candidates, ids, length, *out, mask, start, levels=levels, width=WIDTH, nodes=nodes)

    repeat(launch, *out, mask, start)
    tokens, parents = keep_nodes_ref(growth.token, growth.parent, growth.log_prob, nodes)
    forest = make_forest([DraftTree([9, *tokens[1:]], parents)], [0])
    count = len(tokens)
    assert start.tolist() == [0, count]
    assert [field[:count].tolist() for field in out] == [
        field.tolist() for field in (forest.token, forest.parent, forest.depth)
    ]
    assert mask[:count].tolist() == forest.tree_mask_bits[:, 0].tolist()
    assert set(out[0][count:].tolist()) <= {9} and (count > 1 or growth.done or growth.limit == 13)
    # and that is what the host's builder keeps
    candidates, depth = [], {-1: 0}
    for index, (token, parent, log_prob) in enumerate(zip(growth.token, growth.parent, growth.log_prob, strict=True)):
        depth[index] = depth[int(parent)] + 1
        candidates.append(Candidate(int(token), int(parent), float(log_prob), depth[index]))
    kept = [c for c in BestFirst().select(candidates, nodes - 1) if candidates[c].log_prob > -torch.inf]
    assert tree_of(9, candidates, kept) == DraftTree([9, *tokens[1:]], parents)


@pytest.fixture
def engine_of(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    # the kernels read weights as they are, not as a CPU's library packs them
    monkeypatch.setattr("pad_engine.kernels.linear.can_pack", lambda weight: False)

    def make(draft: str | None, *, depth: int = 3, budget: int = 8, **options: Any) -> Engine:
        drafter = f"draft-model:depth={depth}" if draft else "none"
        trees = {"trees": "best-first"} if draft else {}
        options = {"dtype": "float32", "fixed_budget": True, "max_length": 128, "fused": draft is not None} | options
        folder = make_model("llama", **SMALL)
        return load_engine(
            folder, drafter=drafter, draft_model=draft, device=DEVICE, budget=budget, **trees, **options
        )  # fmt: skip

    return make


# an interpreted answer takes long, so one temperature of two is a slow test there
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=() if CUDA else pytest.mark.slow), 0.8])
def test_answers_are_plain_ones_and_trees_are_the_hosts(engine_of: Callable[..., Engine], temperature: float) -> None:
    params = SamplingParams(48 if CUDA else 6, temperature, 3, ignore_eos=True)
    plain = engine_of(None).generate(PROMPT, params).token_ids
    device, host = engine_of("self:layers=0"), engine_of("self:layers=0", fused=False)
    assert isinstance(device.drafter, DeviceDraftModel) and type(host.drafter) is DraftModel
    host.drafter.builder.branches = host.drafter.builder.width = WIDTH
    ours, theirs = device.generate(PROMPT, params), host.generate(PROMPT, params)
    assert ours.token_ids == theirs.token_ids == plain
    assert (ours.stats.rounds, ours.stats.accepted_tokens) == (theirs.stats.rounds, theirs.stats.accepted_tokens)
    assert ours.stats.draft_tokens == theirs.stats.draft_tokens
    assert device.rounds is not None and (Tree(device.drafter, 3, 8), 16) in device.rounds.replays


def test_a_copy_of_the_target_is_never_wrong(engine_of: Callable[..., Engine]) -> None:
    """Its likeliest path is accepted to the end, also behind plain rounds: no key of the draft model's is missing."""
    engine = engine_of("self:layers=0,1", depth=2)
    plans = iter([1, 8, 1, 1, 8, 8] * 9)
    decide = engine.controller.decide
    engine.controller.decide = lambda *_: decide(0 if next(plans) > 1 else -1, 99)  # type: ignore[method-assign]
    params = SamplingParams(12, ignore_eos=True)
    out = engine.generate(PROMPT, params)
    assert out.token_ids == engine_of(None).generate(PROMPT, params).token_ids
    # 1 + 3 + 1 + 1 + 3 + 3
    assert out.stats.rounds == 6 and out.stats.accepted_tokens == 6
    assert engine.rounds is not None and any(isinstance(kind, Reading) for kind, _ in engine.rounds.replays)
