"""The gated activation of the MLP, `act(gate) * up` (Shazeer 2020), on the two halves of one matrix product."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
BLOCK = 2048


def gated_act_ref(gate_up: Tensor, act: str) -> Tensor:
    """gate_up: `[N, 2 * I]`, gates first. act: a name of ACTIVATIONS. Returns `[N, I]` in gate_up's type.

    The activation is rounded to that type before the product.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[act](gate).mul_(up)


@triton.jit
def activation(x, ACT: tl.constexpr):
    """A function of ACTIVATIONS, on fp32."""
    if ACT == "silu":
        return x * tl.sigmoid(x)
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # 0.5 (1 + tanh(u)) = sigmoid(2 u), with 2 sqrt(2 / pi) as the factor of u
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def gated_act_kernel(
    gate_up_ptr,
    out_ptr,
    I,  # noqa: E741
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < I
    gate = tl.load(gate_up_ptr + row * 2 * I + column, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * I + I + column, mask=mask, other=0.0)
    activated = activation(gate.to(tl.float32), ACT)
    out = activated.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * I + column, out.to(gate.dtype), mask=mask)


def gated_act_triton(gate_up: Tensor, act: str) -> Tensor:
    """Launch the kernel; arguments and result as of `gated_act`."""
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(n, width)
    if n:
        gated_act_kernel[(n, triton.cdiv(width, BLOCK))](
            gate_up_ptr=gate_up,
            out_ptr=out,
            I=width,
            ACT=act,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out


def gated_act(gate_up: Tensor, act: str) -> Tensor:
    """gated_act_ref by the kernel on a GPU. gate_up must be contiguous."""
    return gated_act_triton(gate_up, act) if gate_up.is_cuda else gated_act_ref(gate_up, act)
