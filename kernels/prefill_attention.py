"""Causal attention of many rows that stand at the end of their own prefix: a prompt's chunk.

The library's flash attention does it. It takes no mask, so it needs the keys in the order of their positions.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pad_engine.kernels.tree_attention import tree_attention_ref

# All but cuDNN's, which torch prefers on newer cards: it plans anew for every length of a prompt, and keeps the plans.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def library_attention(device: torch.device) -> AbstractContextManager[None]:
    """Within it the library's attention is one of BACKENDS. To be entered once a pass: it takes ten microseconds."""
    return sdpa_kernel(BACKENDS) if device.type == "cuda" else nullcontext()


def prefill_attention_ref(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """The meaning: tree attention of a chain. Arguments and result as of `prefill_attention`."""
    n, m = q.shape[0], k.shape[1]
    hidden = seen_rows(n, m, q.device).logical_not_()
    mask = torch.zeros(n, m, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
    return tree_attention_ref(q, k, v, mask.repeat(q.shape[1] // k.shape[0], 1), scale, softcap)


def seen_rows(n: int, m: int, device: torch.device) -> Tensor:
    """Bool `[n, m]`: which of m keys each of the last n rows sees."""
    return torch.ones(n, m, dtype=torch.bool, device=device).tril_(m - n)


def lower_right(n: int, m: int) -> Tensor:
    """What tells the library that the triangle is at the lower right, without a mask."""
    # it imports torch's compiler, which takes seconds: not before a prompt's second chunk needs it
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(n, m)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """Softmax attention in which row i of N sees the first M - N + i + 1 keys: the rows are the last of them.

    q: `[N, H, D]`, the last dimension contiguous, any strides before it. k, v: `[H_kv, M, D]` likewise, H a multiple of
    H_kv, M >= N. softcap: as of tree_attention. Returns `[N, H * D]` in q's type.
    """
    if softcap is not None:
        return prefill_attention_ref(q, k, v, scale, softcap)  # flash has no soft cap: the scores are written out
    n, m = q.shape[0], k.shape[1]
    bias = None
    if 1 < n < m:
        # flash on a CPU takes a mask; on a GPU it has the triangle at the lower right built in, and takes none
        bias = lower_right(n, m) if q.is_cuda else seen_rows(n, m, q.device)
    grouped = True
    if q.is_cuda and q.dtype == torch.float32:
        # no flash in fp32: the kernel that is left does not write the scores out either, but knows no groups
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[0], 0) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=bias,
        is_causal=1 < n == m,
        scale=scale,
        enable_gqa=grouped,
    )
    # [1, H, N, D] -> [N, H * D], without a copy where flash wrote rows first
    return out.squeeze(0).transpose(0, 1).reshape(n, -1)
