"""The end of a tree that a draft model grows on the device (draft_tree.py): the most likely candidates of all levels,
written as the forest that the target verifies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pad_engine.kernels.draft_tree import Candidates, best_ref, candidate_count, places_before


def keep_nodes_ref(token: Tensor, parent: Tensor, log_prob: Tensor, nodes: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of the tree that is left of candidates `[C]`: at most `nodes` with its root, whose token is
    given as -1. A path's probability never exceeds that of its beginning, so the best always form a tree."""
    kept = [place for place in best_ref(log_prob, nodes - 1) if log_prob[place] > -torch.inf]
    node_of = {-1: 0} | {place: node for node, place in enumerate(kept, 1)}
    return [-1, *(int(token[place]) for place in kept)], [-1, *(node_of[int(parent[place])] for place in kept)]


@triton.jit
def keep_nodes_kernel(
    cand_token_ptr,
    cand_parent_ptr,
    cand_depth_ptr,
    log_prob_ptr,
    node_ptr,
    ids_ptr,
    cache_len_ptr,
    token_ptr,
    parent_ptr,
    depth_ptr,
    mask_bits_ptr,
    seq_start_ptr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    place, row = tl.arange(0, BLOCK), tl.arange(0, triton.next_power_of_2(ROWS))
    ok = place < COUNT
    log_prob = tl.load(log_prob_ptr + place, mask=ok, other=float("-inf"))
    kept = (log_prob > float("-inf")) & (places_before(log_prob, place) < NODES - 1)
    node = tl.cumsum(kept.to(tl.int32), 0)
    tl.store(node_ptr + place, tl.where(kept, node, 0), mask=ok)
    root = tl.load(ids_ptr + tl.load(cache_len_ptr))
    tl.store(token_ptr + row, root + row * 0, mask=row < ROWS)
    tl.store(parent_ptr + row, row * 0 - 1, mask=row < ROWS)
    tl.store(depth_ptr + row, row * 0, mask=row < ROWS)
    tl.store(mask_bits_ptr + row, (row * 0 + 1).to(tl.int64), mask=row < ROWS)
    tl.debug_barrier()  # every candidate's node is there, and nothing of a row comes after its node's
    one = tl.full([1], 1, tl.int64)
    parent = tl.load(cand_parent_ptr + place, mask=kept, other=-1)
    bits = (one << node.to(tl.int64)) | one
    ancestor = parent
    for _ in range(DEPTH - 1):
        bits |= one << tl.load(node_ptr + ancestor, mask=ancestor >= 0, other=0).to(tl.int64)
        ancestor = tl.load(cand_parent_ptr + ancestor, mask=ancestor >= 0, other=-1)
    tl.store(token_ptr + node, tl.load(cand_token_ptr + place, mask=kept, other=0), mask=kept)
    tl.store(parent_ptr + node, tl.load(node_ptr + parent, mask=parent >= 0, other=0), mask=kept)
    tl.store(depth_ptr + node, tl.load(cand_depth_ptr + place, mask=kept, other=0), mask=kept)
    tl.store(mask_bits_ptr + node, bits, mask=kept)
    tl.store(seq_start_ptr, 0)
    tl.store(seq_start_ptr + 1, 1 + tl.sum(kept.to(tl.int32)))


def keep_nodes(
    candidates: Candidates,
    ids: Tensor,
    cache_len: Tensor,
    token: Tensor,
    parent: Tensor,
    depth: Tensor,
    mask_bits: Tensor,
    seq_start: Tensor,
    *,
    levels: int,
    width: int,
    nodes: int,
) -> None:
    """Launch: the forest of the best candidates of all levels (keep_nodes_ref), for one sequence.

    Read: ids int32 `[1, .]` of which cache_len `[1]` + 1 are held, the last being the root. Written: token, parent and
    depth int32 `[N]`, mask_bits int64 `[N]` and seq_start `[2]`, as in a Forest of at most `nodes` <= N rows; the rows
    behind it are roots.
    """
    count = candidate_count(levels, width)
    keep_nodes_kernel[(1,)](
        cand_token_ptr=candidates.token,
        cand_parent_ptr=candidates.parent,
        cand_depth_ptr=candidates.depth,
        log_prob_ptr=candidates.log_prob,
        node_ptr=candidates.node,
        ids_ptr=ids,
        cache_len_ptr=cache_len,
        token_ptr=token,
        parent_ptr=parent,
        depth_ptr=depth,
        mask_bits_ptr=mask_bits,
        seq_start_ptr=seq_start,
        COUNT=count,
        BLOCK=triton.next_power_of_2(count),
        NODES=nodes,
        ROWS=len(token),
        DEPTH=levels,
        num_warps=8,
    )
