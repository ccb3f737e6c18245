"""Chains of many sequences that grow by a token at a time, all together, as a draft model reads what it has drafted.

The tokens stay on the device: the host neither knows nor waits for them before the last one. Next to read:
kv_forest.py, whose rows these are.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pad_engine.kv_cache import KVCache
from pad_engine.kv_forest import ForestPlacement, ForestView, make_view, prefix_read, slice_of, uploaded


@dataclass(frozen=True)
class Chains:
    """B sequences, each with an empty scratch. seq, length: int64 `[B]` on the device, their places in the cache and
    committed lengths. longest: of those. prompts: int64 `[B]` on the CPU, the lengths of their prompts."""

    seqs: list[int]
    seq: Tensor
    length: Tensor
    longest: int
    prompts: Tensor


def begin_chains(cache: KVCache, seqs: list[int]) -> Chains:
    """Chains behind what the cache holds of the sequences."""
    lengths = [cache.lengths[seq] for seq in seqs]
    seq, length = uploaded([np.array(seqs), np.array(lengths)], cache.device)
    return Chains(seqs, seq, length, max(lengths), torch.tensor([cache.prompt_lengths[seq] for seq in seqs]))


def place_level(cache: KVCache, chains: Chains, tokens: Tensor, level: int) -> ForestPlacement:
    """The next token of each chain, behind `level` others, without a word from the host: rows of place_forest that do
    not join the scratch, as it does not know yet which of them there are. tokens: integers `[B]`; what is below 0 is
    read as 0. Rows beyond the capacity stand at its end."""
    views = {window: level_view(cache, chains, window, level) for window in cache.buffers}
    positions = (chains.length + level).clamp_(max=cache.capacity - 1)
    return ForestPlacement(
        tokens.long().clamp_(min=0), positions, chains.prompts, chains.seq, slice_of(chains.seqs, chains.seq),
        rows=None, places=None, drafted=True, views=views,
    )  # fmt: skip


def level_view(cache: KVCache, chains: Chains, window: int | None, level: int) -> ForestView:
    """What the rows of a level see: the scratch rows before them, themselves, and the prefix."""
    filled = chains.length if window is None else chains.length.clamp(max=window)
    longest = chains.longest if window is None else min(chains.longest, window)
    bounds = [torch.full_like(filled, cache.scratch - 1 - level), filled]
    if window is not None:
        bounds += [chains.length - 1, filled.clamp(min=1), chains.length + (level - window)]
    own = torch.arange(level + 1, device=cache.device) < (window or level + 1)
    prefix = prefix_read(cache, window, longest, level + 1)
    return make_view(cache, window, own.expand(len(chains.seqs), -1), prefix, bounds, None, len(chains.seqs))
