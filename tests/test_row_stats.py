"""The statistics that the LM head leaves, and their combination, against a sort of the whole row."""

import pytest
import torch
from torch import Tensor

from pad_engine.kernels import row_tiles
from pad_engine.kernels.judge_nodes import empty_judged, judge_nodes
from pad_engine.kernels.lm_head import Judging, lm_head, lm_head_ref
from pad_engine.kernels.row_stats import RowStats, empty_parts, row_stats_ref
from pad_engine.kernels.tuning import TileConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
K = 32


def stats_of(h: Tensor, weight: Tensor, programs: int, block: int, softcap: float | None) -> tuple[RowStats, Tensor]:
    """The kernels' statistics of `h weight^T` under a norm, and the logits that the reference gives."""
    rows, vocab = len(h), len(weight)
    norm, ones = torch.ones(K, device=DEVICE), torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    squares = h.square().sum(1)[None, :].contiguous()
    scores, parts = torch.empty(programs, rows, device=DEVICE), empty_parts(programs, rows, DEVICE)
    ids = torch.empty_like(scores, dtype=torch.int32)
    token_logit = torch.full((rows,), 7.0, device=DEVICE)
    for tensor in parts:
        tensor.fill_(7)  # every element must be written
    # every node a root, whose token is judged in its own row
    token = torch.arange(rows, dtype=torch.int32, device=DEVICE) * 3 % vocab
    judging = Judging(parts, token, torch.full_like(token, -1), token_logit)
    lm_head(
        h, norm, h, squares, weight, None, ones, ones, ones[:1], torch.zeros(1, dtype=torch.int64, device=DEVICE),
        torch.zeros(1, device=DEVICE), scores, ids, None, judging,
        num_tokens=vocab, eps=0.0, softcap=softcap, config=TileConfig(block, 32), pdl=row_tiles.OFF,
    )  # fmt: skip
    judged, pick = empty_judged(rows, DEVICE), torch.empty(1, rows, device=DEVICE)
    for tensor in judged:
        tensor.fill_(7)
    judge_nodes(judging, scores, ids, None, judged, pick, torch.empty_like(pick, dtype=torch.int32), row_tiles.OFF)
    z, (lse, entropy, own_logit, _) = judged.values[:3], judged.values[3:]
    assert torch.equal(own_logit.nan_to_num(), token_logit.nan_to_num())
    out = RowStats(judged.ids.t(), z.t(), lse, entropy, z[0] - z[1])
    logits = lm_head_ref(h, norm, weight, None, 0.0, softcap)
    own = logits.gather(1, token.long()[:, None])[:, 0]
    torch.testing.assert_close(token_logit, own, rtol=1e-4, atol=1e-4, equal_nan=True)
    return out, logits


def assert_stats_equal(got: RowStats, expected: RowStats) -> None:
    assert torch.equal(got.top_id, expected.top_id)
    # entropy is a difference of two numbers as large as the logits, so that is what its roundings go by
    atol = 2e-6 * max(10.0, float(expected.top_logit.abs().nan_to_num().max()))
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=atol)


@pytest.mark.parametrize(("programs", "block"), [(1, 64), (3, 16), (5, 32)])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("rows", [1, 16, 32])
def test_statistics_equal_those_of_the_whole_row(rows: int, softcap: float | None, programs: int, block: int) -> None:
    h, weight = torch.randn(rows, K, device=DEVICE), torch.randn(301, K, device=DEVICE) / 3
    got, logits = stats_of(h, weight, programs, block, softcap)
    assert_stats_equal(got, row_stats_ref(logits))


def test_equal_logits_rank_by_id() -> None:
    # small whole numbers, whose sums are exact in any order
    h = torch.randint(-3, 4, (16, K), device=DEVICE).float()
    weight = torch.randint(-3, 4, (40, K), device=DEVICE).float().repeat(3, 1)[torch.randperm(120)]
    got, logits = stats_of(h, weight, 3, 16, None)
    assert torch.equal(got.top_id, row_stats_ref(logits).top_id)
    torch.testing.assert_close(got.margin, torch.zeros(16, device=DEVICE))


def test_far_and_near_logits() -> None:
    """One token that has all of the probability, all tokens alike, and logits of a size that exp overflows at."""
    h = torch.zeros(16, K, device=DEVICE)
    h[:, 0] = 1.0
    weight = torch.zeros(100, K, device=DEVICE)
    got, logits = stats_of(h, weight, 4, 16, None)
    assert_stats_equal(got, row_stats_ref(logits))
    torch.testing.assert_close(got.entropy, torch.full((16,), 100.0, device=DEVICE).log())
    weight[77, 0] = 300.0
    got, logits = stats_of(h, weight, 4, 16, None)
    assert_stats_equal(got, row_stats_ref(logits))
    assert got.top_id[:, 0].tolist() == [77] * 16
    torch.testing.assert_close(got.entropy, torch.zeros(16, device=DEVICE), rtol=0, atol=2e-4)


def test_a_row_that_is_not_finite_says_so() -> None:
    h, weight = torch.randn(16, K, device=DEVICE), torch.randn(64, K, device=DEVICE)
    h[3] = float("nan")
    got, logits = stats_of(h, weight, 2, 16, None)
    assert got.lse[3].isnan() and got.entropy[3].isnan()
    others = [row for row in range(16) if row != 3]
    assert_stats_equal(RowStats(*(field[others] for field in got)), row_stats_ref(logits[others]))
