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

WARPS = 4
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
def sum_units(part_ptr, node, live, UNITS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr):
    """fp32 `[UNITS]`: a node's share of TapProjection, its parts added in order."""
    unit = tl.arange(0, UNITS)
    units = tl.zeros((UNITS,), tl.float32)
    for part in tl.static_range(SPLIT):
        pointers = part_ptr + (part * UNITS + unit) * ROWS + node
        units += tl.load(pointers, mask=unit < tl.where(live, UNITS, 0), other=0.0)
    return units


@triton.jit
def store_judged(values_ptr, ids_ptr, stats, token_logit, pivot_prob, ROWS: tl.constexpr):
    """One node's JudgedRows."""
    lse, entropy, z1, id1, z2, id2, z3, id3 = stats
    tl.store(values_ptr, z1)
    tl.store(values_ptr + ROWS, z2)
    tl.store(values_ptr + 2 * ROWS, z3)
    tl.store(values_ptr + 3 * ROWS, lse)
    tl.store(values_ptr + 4 * ROWS, entropy)
    tl.store(values_ptr + 5 * ROWS, token_logit)
    tl.store(values_ptr + 6 * ROWS, pivot_prob)
    tl.store(ids_ptr, id1)
    tl.store(ids_ptr + ROWS, id2)
    tl.store(ids_ptr + 2 * ROWS, id3)


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
    passes,
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
    # As in the accept kernel: the first time it is run on nothing, so that the instructions are there for the second.
    for step in range(passes):
        live = step == passes - 1
        if PDL:  # noqa: SIM102 - known to the compiler, unlike the next
            if live:
                wait_for_inputs(PDL)
        token_logit = tl.load(token_logit_ptr + one, mask=one < tl.where(live, ROWS, 0), other=0.0)
        stats = whole_row(values_ptr, value_ids_ptr, row, live, ROWS, NUM_PARTS, BLOCK_P)
        lse, entropy, z1, z2 = stats[0], stats[1], stats[2], stats[4]
        pivot_prob = tl.full((1,), 1.0, tl.float32)
        if CLASSIFIER == _MLP:
            units = sum_units(unit_part_ptr, node, live, 64, ROWS, TAP_SPLIT)
            pivot_prob = pivot_of_units(units, entropy, tl.exp(token_logit - lse), z1 - z2, w)
        if CLASSIFIER == _LINEAR:
            bias = tl.load(unit_bias_ptr + tl.arange(0, 1))
            pivot_prob = tl.sigmoid(-bias - sum_units(unit_part_ptr, node, live, 1, ROWS, TAP_SPLIT))
        pick = best_of_parts(score_ptr + node, id_ptr + node, ROWS, live, NUM_PARTS, BLOCK_P, 1)
        if live:
            store_judged(judged_ptr + one, judged_id_ptr + one, stats, token_logit, pivot_prob, ROWS)
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
        passes=1 if pdl == OFF else 2,
        ROWS=rows,
        NUM_PARTS=programs,
        BLOCK_P=triton.next_power_of_2(programs),
        CLASSIFIER=kind,
        TAP_SPLIT=1 if tap is None else tap.parts.shape[0],
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl != OFF,
    )
