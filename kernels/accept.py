"""From judgements of single nodes to the accepted path of each sequence."""

import math

import torch
from torch import Tensor


def accept_bits_ref(accept: Tensor, score: Tensor, parent: Tensor) -> Tensor:
    """Keep one accepted child a node: the best score, then the lowest index. Roots are always kept.

    accept: bool `[N]`; score: fp32 `[N]`, a NaN below any other; parent: int `[N]`, -1 at roots. Returns bool `[N]`.
    """
    kept = parent < 0
    best: dict[int, int] = {}
    # a pair, so that -inf and NaN stay two things
    scores = [(False, 0.0) if math.isnan(value) else (True, value) for value in score.tolist()]
    for node, (ok, p) in enumerate(zip(accept.tolist(), parent.tolist(), strict=True)):
        if p >= 0 and ok and (p not in best or scores[node] > scores[best[p]]):
            best[p] = node
    kept[list(best.values())] = True
    return kept


def accept_path_ref(kept: Tensor, depth: Tensor, seq: Tensor, tree_mask_bits: Tensor) -> list[list[int]]:
    """The deepest node of each sequence whose ancestors are all kept, and the path to it from the root.

    kept: bool `[N]`; depth, seq: int `[N]`; tree_mask_bits: int64 `[N, W]`. Returns, for each sequence in the
    order of the forest, its path as rows of the forest, root first. Node i is on the path iff
    `tree_mask_bits[i] & ~kept_bits == 0`, and since one child a node is kept at most, the deepest such node ends it.
    """
    words = tree_mask_bits.shape[1]
    padded = torch.zeros(words * 64, dtype=torch.int64)
    padded[: len(kept)] = kept.long()
    kept_bits = (padded.view(words, 64) << torch.arange(64)).sum(1)
    on_path = ((tree_mask_bits & ~kept_bits) == 0).all(1)
    paths: dict[int, list[int]] = {}
    for row in torch.nonzero(on_path).flatten().tolist():
        paths.setdefault(int(seq[row]), []).append(row)
    return [sorted(rows, key=lambda row: int(depth[row])) for rows in paths.values()]
