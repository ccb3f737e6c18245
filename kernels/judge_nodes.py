"""The first half of a relaxed rule's tail: from what the LM head left to a few numbers for each node.

A program a node: it puts together the statistics of the row that judges the node (its parent's), runs the classifier,
and picks the token of the node's own row. The accept kernel (accept.py) decides from that.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pad_engine.kernels.accept_path import best_of_parts
from pad_engine.kernels.lm_head import Judging
from pad_engine.kernels.pivot_mlp import LINEAR, MLP, NO_CLASSIFIER, TailWeights, load_tail, pivot_of_units
from pad_engine.kernels.row_stats import whole_row
from pad_engine.kernels.row_tiles import OFF, release_dependents, wait_for_inputs

_NONE, _MLP, _LINEAR = tl.constexpr(NO_CLASSIFIER), tl.constexpr(MLP), tl.constexpr(LINEAR)


class JudgedRows(NamedTuple):
    """Of N nodes: values fp32 `[7, N]`, which are the judging row's three largest logits, lse and entropy, the logit of
    the node's token there, and pivot_prob (1 without a classifier); ids int32 `[3, N]` of the three."""

    values: Tensor
    ids: Tensor


def empty_judged(rows: int, device: torch.device) -> JudgedRows:
    """Room for N nodes."""
    return JudgedRows(torch.zeros(7, rows, device=device), torch.zeros(3, rows, dtype=torch.int32, device=device))


@triton.jit
def judge_nodes_kernel(
    values_ptr,
    value_ids_ptr,
    score_ptr,
    id_ptr,
    parent_ptr,
    token_logit_ptr,
    unit_part_ptr,
    unit_bias_ptr,
    scalar_ptr,
    scalar_bias_ptr,
    inner_ptr,
    inner_bias_ptr,
    out_ptr,
    out_bias_ptr,
    judged_ptr,
    judged_id_ptr,
    pick_score_ptr,
    pick_id_ptr,
    ROWS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CLASSIFIER: tl.constexpr,
    TAP_SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    node = tl.program_id(0)
    one = node + tl.arange(0, 1)
    parent = tl.load(parent_ptr + node)
    row = tl.where(parent < 0, node, parent) + tl.arange(0, 1)
    # the weights depend on nothing
    if CLASSIFIER == _MLP:
        w = load_tail(unit_bias_ptr, scalar_ptr, scalar_bias_ptr, inner_ptr, inner_bias_ptr, out_ptr, out_bias_ptr)
    wait_for_inputs(PDL)
    token_logit = tl.load(token_logit_ptr + one)
    lse, entropy, z1, id1, z2, id2, z3, id3 = whole_row(values_ptr, value_ids_ptr, row, ROWS, NUM_PARTS, BLOCK_P)
    pivot_prob = tl.full((1,), 1.0, tl.float32)
    if CLASSIFIER == _MLP:
        unit = tl.arange(0, 64)
        units = tl.zeros((64,), tl.float32)
        for part in tl.static_range(TAP_SPLIT):
            units += tl.load(unit_part_ptr + (part * 64 + unit) * ROWS + node)
        pivot_prob = pivot_of_units(units, entropy, tl.exp(token_logit - lse), z1 - z2, w)
    if CLASSIFIER == _LINEAR:
        total = tl.load(unit_bias_ptr + tl.arange(0, 1))
        for part in tl.static_range(TAP_SPLIT):
            total += tl.load(unit_part_ptr + part * ROWS + one)
        pivot_prob = tl.sigmoid(-total)
    tl.store(judged_ptr + one, z1)
    tl.store(judged_ptr + ROWS + one, z2)
    tl.store(judged_ptr + 2 * ROWS + one, z3)
    tl.store(judged_ptr + 3 * ROWS + one, lse)
    tl.store(judged_ptr + 4 * ROWS + one, entropy)
    tl.store(judged_ptr + 5 * ROWS + one, token_logit)
    tl.store(judged_ptr + 6 * ROWS + one, pivot_prob)
    tl.store(judged_id_ptr + one, id1)
    tl.store(judged_id_ptr + ROWS + one, id2)
    tl.store(judged_id_ptr + 2 * ROWS + one, id3)
    pick = best_of_parts(score_ptr + node, id_ptr + node, ROWS, True, NUM_PARTS, BLOCK_P, 1)
    tl.store(pick_score_ptr + one, tl.where(pick < 0, float("inf"), 0.0))
    tl.store(pick_id_ptr + one, tl.maximum(pick, 0))  # ids are not negative in a part


def judge_nodes(
    judging: Judging,
    scores: Tensor,
    ids: Tensor,
    weights: TailWeights | None,
    judged: JudgedRows,
    pick_score: Tensor,
    pick_id: Tensor,
    pdl: int,
) -> None:
    """Launch, behind lm_head with the same judging, scores and ids. weights: of the classifier, None without one.

    Written: judged of N nodes; pick_score fp32 and pick_id int32 `[1, N]`, the best of all parts, as one part that the
    accept kernel takes.
    """
    programs, rows = scores.shape
    tap = judging.tap
    kind = NO_CLASSIFIER if tap is None else (LINEAR if tap.weight.shape[0] == 1 else MLP)
    w = weights or TailWeights(*[None] * 7)  # type: ignore[arg-type]
    judge_nodes_kernel[(rows,)](
        values_ptr=judging.stats.values,
        value_ids_ptr=judging.stats.ids,
        score_ptr=scores,
        id_ptr=ids,
        parent_ptr=judging.parent,
        token_logit_ptr=judging.token_logit,
        unit_part_ptr=None if tap is None else tap.parts,
        unit_bias_ptr=w.unit_bias,
        scalar_ptr=w.scalar_weight,
        scalar_bias_ptr=w.scalar_bias,
        inner_ptr=w.inner_weight,
        inner_bias_ptr=w.inner_bias,
        out_ptr=w.out_weight,
        out_bias_ptr=w.out_bias,
        judged_ptr=judged.values,
        judged_id_ptr=judged.ids,
        pick_score_ptr=pick_score,
        pick_id_ptr=pick_id,
        ROWS=rows,
        NUM_PARTS=programs,
        BLOCK_P=triton.next_power_of_2(programs),
        CLASSIFIER=kind,
        TAP_SPLIT=1 if tap is None else tap.parts.shape[0],
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl != OFF,
    )
