"""Attention of a few rows over a prefix and the rows' own ancestors, with grouped key/value heads.

The mask says which keys a row sees: the whole prefix (or a window of it), and of the new rows its ancestors and itself.
Rows and the query heads of one key/value head are packed together, so each key is read once (Ainslie et al. 2023).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def tree_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None = None
) -> Tensor:
    """Softmax attention under an additive mask.

    q: `[N, H, D]`. k, v: `[H_kv, M, D]`, H a multiple of H_kv. mask: `[H / H_kv * N, M]` additive in q's type, rows
    ordered by query head within the group and then by N; None lets every row see every key. softcap: scores become
    `softcap * tanh(scores / softcap)` before the mask. Returns `[N, H * D]` in q's type.
    """
    n, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[0]
    # [N, H, D] -> [H_kv, G * N, D]
    packed = q.view(n, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    if softcap is None:
        out = F.scaled_dot_product_attention(
            packed.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), attn_mask=mask, scale=scale
        ).squeeze(0)
    else:
        scores = softcap * torch.tanh((packed @ k.transpose(1, 2)).float() * scale / softcap)
        if mask is not None:
            scores = scores + mask
        out = scores.softmax(-1).to(q.dtype) @ v
    # [H_kv, G * N, D] -> [N, H * D]
    return out.view(num_kv_heads, -1, n, head_dim).permute(2, 0, 1, 3).reshape(n, num_heads * head_dim)
