"""Commit of accepted rows: copy their keys and values from the scratch into the prefix, over all layers at once."""

from collections.abc import Sequence

import torch
from torch import Tensor


def kv_commit_ref(buffer: Tensor, source: Sequence[int], target: Sequence[int]) -> None:
    """Copy slots of `buffer` `[layers, 2, kv_heads, slots, head_dim]` in place: target[i] takes what source[i] held.

    Sources and targets must not overlap.
    """
    if not source:
        return
    moved = buffer.index_select(3, torch.tensor(source, device=buffer.device))
    buffer.index_copy_(3, torch.tensor(target, device=buffer.device), moved)
