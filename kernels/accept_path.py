"""The accepted path: its meaning, and how the accept kernel (accept.py) finds it, by picks from parts, judgements of
nodes, and the tokens of the path."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pad_engine.kernels.relaxed import cut_path, relax

# status of a sequence, in `done` and in reports
RUNNING, STOP, LENGTH, NOT_FINITE = range(4)
_RUNNING, _STOP, _LENGTH, _NOT_FINITE = map(tl.constexpr, range(4))
_INF_BITS = tl.constexpr(0x7F800000)


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


@triton.jit
def ordered(x):
    """int32 in the order of fp32 x; both zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def best_of_parts(
    score_ptr, id_ptr, stride, live, NUM_PARTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr
):
    """int32 `[BLOCK_R]`: for each row the id with the largest score, the lowest at ties; -1 if that is not finite.
    live: whether the parts are there; without it nothing is read."""
    parts = tl.where(live, NUM_PARTS, 0)
    row = tl.arange(0, BLOCK_R)
    best = tl.full([BLOCK_P, BLOCK_R], -0x8000000000000000, tl.int64)
    # unrolled, so that all loads are on their way before the first is used
    for first in tl.static_range(0, NUM_PARTS, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        offsets = part[:, None] * stride + row[None, :]
        score = tl.load(score_ptr + offsets, mask=(part < parts)[:, None], other=float("-inf"))
        token = tl.load(id_ptr + offsets, mask=(part < parts)[:, None], other=0)
        # one key, so that the maximum needs one reduction
        best = tl.maximum(best, (ordered(score).to(tl.int64) << 32) + (0x7FFFFFFF - token))
    best = tl.max(best, 0)
    high = (best >> 32).to(tl.int32)
    finite = (high < _INF_BITS) & (high > ~_INF_BITS)
    return tl.where(finite, 0x7FFFFFFF - (best & 0x7FFFFFFF), -1).to(tl.int32)


@triton.jit
def judge_pick(token, pick):
    """The rules greedy and match: what the judging row picked itself is accepted. Returns accept and fp32 score."""
    return token == pick, tl.zeros_like(token).to(tl.float32)


@triton.jit
def keep_best(accept, score, parent, row):
    """accept_bits_ref without its roots: of the accepted children of a node the best score, then the lowest row."""
    key = tl.where(score == score, ordered(score), -0x80000000)
    siblings = parent[:, None] == parent[None, :]
    # entry (i, j): j takes the place of i
    better = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (row[None, :] < row[:, None]))
    beaten = tl.max((siblings & better & accept[None, :]).to(tl.int32), 1)
    return accept & (beaten == 0)


@triton.jit
def kept_path(
    pick,
    token,
    parent,
    depth,
    mask_bits,
    row,
    start,
    mine,
    judged,
    scalars_ptr,
    history,
    JUDGE: tl.constexpr,
    OVERRIDE: tl.constexpr,
    BY_CLASSIFIER: tl.constexpr,
):
    """bool `[BLOCK_R]`: the rows of the accepted path, the root among them, and which of them an override kept. mine:
    the rows of the sequence."""
    drafted = mine & (row > start)
    judge = tl.where(drafted, parent, row)
    # a gather by compare and sum, which stays in registers
    judge_pick = tl.sum(tl.where(judge[:, None] == row[None, :], pick[None, :], 0), 1)
    accept, score = JUDGE(token, judge_pick)
    # nothing follows a row without a pick, so a path that leads there ends there, and has no last token
    known = drafted & (judge_pick >= 0)
    flag = row < 0
    if OVERRIDE is not None:
        accept, flag, score = relax(accept & known, token, judged, scalars_ptr, OVERRIDE, BY_CLASSIFIER)
        flag &= known
    kept = keep_best(accept & known, score, parent, row) | (row == start)
    kept_bits = tl.sum(tl.where(kept, tl.full([1], 1, tl.int64) << row, 0))
    on_path = mine & ((mask_bits & ~kept_bits) == 0)
    if OVERRIDE is not None:
        on_path = cut_path(on_path, flag, depth, mask_bits, row, mine, history, scalars_ptr)
    return on_path, on_path & flag


@triton.jit
def path_tokens(pick, token, depth, on_path, is_root):
    """What the path emits: int32 `[BLOCK_R]`, a token of each of its rows and the place of that among them; scalars,
    the last token, -1 if there is none, and their number.

    A root's own token is committed already, so its lane carries the token after the path.
    """
    # depths differ along a path, so one maximum finds both its length and its last row's pick
    deepest = tl.max(tl.where(on_path, (depth.to(tl.int64) << 32) + (pick + 1), 0))
    num_tokens, end_token = (deepest >> 32).to(tl.int32) + 1, (deepest & 0xFFFFFFFF).to(tl.int32) - 1
    return tl.where(is_root, end_token, token), tl.where(is_root, num_tokens, depth) - 1, end_token, num_tokens


@triton.jit
def cut_tokens(on_path, value, place, end_token, num_tokens, end_ids, held, limit, done):
    """How many of the path's tokens are emitted, and the status behind them: as State.commit. held: ids so far."""
    is_end = tl.max((value[:, None] == end_ids[None, :]).to(tl.int32), 1) > 0
    count = tl.where(end_token < 0, 0, tl.minimum(num_tokens, limit - held))
    first_end = tl.min(tl.where(on_path & is_end, place, count))
    emitted = tl.minimum(count, first_end + 1)
    status = tl.where(first_end < count, _STOP, tl.where(held + emitted >= limit, _LENGTH, _RUNNING))
    return emitted, tl.where(done != 0, done, tl.where(end_token < 0, _NOT_FINITE, status))
