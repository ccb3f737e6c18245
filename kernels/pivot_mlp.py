"""A classifier of drafted tokens inside the verify pass: wide projection beside the LM head, the rest in the tail.

PAD's classifier (arXiv 2511.00351, "extended_v2") reads a token's own hidden state h behind some layer and scalars x of
the row that judges it: t = W_h h + b_h, s = W_s x + b_s, z = relu(W_z [t; s] + b_z), pivot_prob = softmax(W_o z +
b_o)[1]. A linear judge (arXiv 2501.19309) is w h + b alone. The product with h reads as much as all rows of h do, so
the LM head's programs share it: each takes a few units over a part of h, and leaves a sum that the tail adds in order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

UNITS, INNER = 64, 128
NO_CLASSIFIER, MLP, LINEAR = range(3)


class TapProjection(NamedTuple):
    """rows: `[N, K]`, the tapped states. weight: `[U, K]`, any float type, U = 64 or 1. parts: fp32 `[P, U, N]`,
    written: P parts of the product."""

    rows: Tensor
    weight: Tensor
    parts: Tensor


class TailWeights(NamedTuple):
    """What the tail needs beside the projection, fp32: unit_bias `[U]`; scalar_weight `[16, 3]`, for entropy,
    probability and margin, zero where a checkpoint has none; scalar_bias `[16]`; inner_weight `[128, 80]`; inner_bias
    `[128]`; out_weight `[128]` and out_bias `[1]`, the second class less the first. A linear judge has unit_bias
    alone."""

    unit_bias: Tensor
    scalar_weight: Tensor
    scalar_bias: Tensor
    inner_weight: Tensor
    inner_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor


def pivot_mlp_ref(units: Tensor, scalars: Tensor, w: TailWeights) -> Tensor:
    """fp32 `[N]`. units: W_h h `[N, 64]`, without the bias. scalars: `[N, 3]`, entropy, probability and margin."""
    used = torch.where(w.scalar_weight == 0, 0.0, w.scalar_weight[None] * scalars[:, None, :])  # an infinite one unused
    joined = torch.cat((units + w.unit_bias, used.sum(2) + w.scalar_bias), dim=1)
    z = (joined @ w.inner_weight.t() + w.inner_bias).relu()
    return torch.sigmoid(z @ w.out_weight + w.out_bias)


@triton.jit
def project_tap(
    rows_ptr,
    weight_ptr,
    part_ptr,
    program,
    programs,
    K,
    NUM_UNITS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """This program's share of TapProjection."""
    BLOCK: tl.constexpr = max(16, min(256, 4096 // ROWS))
    rows = tl.arange(0, ROWS)
    share = tl.cdiv(tl.cdiv(K, SPLIT), BLOCK) * BLOCK
    for item in range(program, NUM_UNITS * SPLIT, programs):
        unit, begin = item % NUM_UNITS, item // NUM_UNITS * share
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        for k in range(begin, tl.minimum(begin + share, K), BLOCK):
            columns = k + tl.arange(0, BLOCK)
            w = tl.load(weight_ptr + unit * K + columns, mask=columns < K, other=0.0).to(tl.float32)
            x = tl.load(rows_ptr + rows[:, None] * K + columns[None, :], mask=(columns < K)[None, :], other=0.0)
            sums += x.to(tl.float32) * w[None, :]
        tl.store(part_ptr + item * ROWS + rows, tl.sum(sums, 1))


@triton.jit
def load_tail(unit_bias_ptr, scalar_ptr, scalar_bias_ptr, inner_ptr, inner_bias_ptr, out_ptr, out_bias_ptr):
    """TailWeights in registers, the inner weights as those of the units and those of the scalars."""
    u, s, z = tl.arange(0, 64), tl.arange(0, 16), tl.arange(0, 128)
    return (
        tl.load(unit_bias_ptr + u),
        tl.load(scalar_ptr + s * 3),
        tl.load(scalar_ptr + s * 3 + 1),
        tl.load(scalar_ptr + s * 3 + 2),
        tl.load(scalar_bias_ptr + s),
        tl.load(inner_ptr + z[:, None] * 80 + u[None, :]),
        tl.load(inner_ptr + z[:, None] * 80 + 64 + s[None, :]),
        tl.load(inner_bias_ptr + z),
        tl.load(out_ptr + z),
        tl.load(out_bias_ptr),
    )


@triton.jit
def used(weight, x):
    """A scalar's share in the units; one that no weight uses may be infinite."""
    return tl.where(weight == 0.0, 0.0, weight * x)


@triton.jit
def pivot_of_units(units, entropy, probability, margin, w):
    """pivot_prob `[1]` of one node. units: `[64]`, without the bias; the scalars `[1]`; w: of load_tail."""
    unit_bias, w_entropy, w_probability, w_margin, scalar_bias, inner_u, inner_s, inner_bias, out, out_bias = w
    s = used(w_entropy, entropy) + used(w_probability, probability) + used(w_margin, margin) + scalar_bias
    z = tl.sum(inner_u * (units + unit_bias)[None, :], 1) + tl.sum(inner_s * s[None, :], 1) + inner_bias
    return tl.sigmoid(tl.sum(tl.where(z > 0.0, z, 0.0) * out, 0) + out_bias)
