"""libpad's accepted path and commit list: contiguous CPU tensors in, lists out, a few microseconds a call.

csrc/include/pad.h says what each function does; kernels/accept_path.py is the same in torch.
"""

from collections.abc import Sequence
from ctypes import addressof, c_int32, c_int64
from itertools import accumulate

import torch
from torch import Tensor

from pad_engine.native import call


def accept_match(token: Tensor, parent: Tensor, row_pick: Tensor) -> Tensor:
    """Whether each node's token is its parent's pick; roots always. All int32 `[N]`; returns bool `[N]`."""
    n = len(token)
    accept = torch.empty(n, dtype=torch.bool)
    inputs = _int32("token", token, n), _int32("parent", parent, n), _int32("row_pick", row_pick, n)
    call("pad_accept_match", *inputs, n, accept.data_ptr())
    return accept


def accept_bits(accept: Tensor, score: Tensor, parent: Tensor) -> Tensor:
    """Keep one accepted child a node: the best score, then the lowest row. NaN is worse than any number.

    accept: bool or uint8 `[N]`; score: fp32 `[N]`; parent: int32 `[N]`. Returns int64 `[W]`, the kept rows as bits.
    """
    n = len(parent)
    kept = torch.empty((n + 63) // 64, dtype=torch.int64)
    judged = _address("accept", accept, (n,), torch.uint8 if accept.dtype == torch.uint8 else torch.bool)
    scores = _address("score", score, (n,), torch.float32)
    call("pad_accept_bits", judged, scores, _int32("parent", parent, n), n, kept.data_ptr())
    return kept


def accept_path(tree_mask_bits: Tensor, kept: Tensor, depth: Tensor, seq: Tensor, num_roots: int) -> list[list[int]]:
    """For each sequence the rows whose ancestors are all kept, root first.

    tree_mask_bits: int64 `[N, W]`; kept: int64 `[W]`; depth, seq: int32 `[N]`.
    """
    n = len(depth)
    words = (n + 63) // 64
    _check_roots(num_roots, n)
    inputs = (
        _address("tree_mask_bits", tree_mask_bits, (n, words), torch.int64),
        _address("kept", kept, (words,), torch.int64),
        *(_int32("depth", depth, n), _int32("seq", seq, n)),
    )
    out = (c_int32 * (n + num_roots))()
    path = addressof(out)
    call("pad_accept_path", *inputs, n, num_roots, path, path + 4 * n)
    return _split(out[:n], out[n:])


def match_path(
    token: Tensor,
    parent: Tensor,
    row_pick: Tensor,
    tree_mask_bits: Tensor,
    depth: Tensor,
    seq: Tensor,
    num_roots: int,
) -> tuple[list[list[int]], list[int]]:
    """accept_match, then accept_bits with equal scores, then accept_path: the paths, and row_pick at their ends.

    tree_mask_bits: int64 `[N, W]`; the other tensors int32 `[N]`.
    """
    n = len(token)
    words = (n + 63) // 64
    _check_roots(num_roots, n)
    inputs = (
        *(_int32("token", token, n), _int32("parent", parent, n), _int32("row_pick", row_pick, n)),
        _address("tree_mask_bits", tree_mask_bits, (n, words), torch.int64),
        *(_int32("depth", depth, n), _int32("seq", seq, n)),
    )
    kept = (c_int64 * words)()
    out = (c_int32 * (n + 2 * num_roots))()
    path = addressof(out)
    lengths, ends = path + 4 * n, path + 4 * (n + num_roots)
    call("pad_match_path", *inputs, n, num_roots, addressof(kept), path, lengths, ends)
    return _split(out[:n], out[n : n + num_roots]), out[n + num_roots :]


def commit_list(rows: Sequence[int], length: int, scratch: int, ring: int) -> tuple[list[int], list[int]]:
    """The slots to copy from and to when scratch rows join a prefix of `length` tokens in `ring` slots."""
    for name, value in (("length", length), ("scratch", scratch), ("ring", ring)):
        if not 0 <= value < 2**31:
            raise ValueError(f"{name} must be in [0, 2^31), got {value}")
    if not all(0 <= row < scratch for row in rows):
        raise ValueError(f"rows must be in [0, {scratch}), got {list(rows)}")
    moved = min(len(rows), ring)
    given = (c_int32 * len(rows))(*rows)
    out = (c_int32 * (2 * moved))()
    source = addressof(out)
    call("pad_commit_list", addressof(given), len(rows), length, scratch, ring, source, source + 4 * moved)
    return out[:moved], out[moved:]


def _int32(name: str, tensor: Tensor, n: int) -> int:
    return _address(name, tensor, (n,), torch.int32)


def _address(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_cpu or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be {list(shape)} {dtype}, contiguous and on the CPU, got {list(tensor.shape)} "
            f"{tensor.dtype} on {tensor.device} with strides {tensor.stride()}"
        )
    return tensor.data_ptr()


def _check_roots(num_roots: int, n: int) -> None:
    if not 0 <= num_roots <= n:
        raise ValueError(f"num_roots must be in [0, {n}], got {num_roots}")


def _split(path: list[int], lengths: list[int]) -> list[list[int]]:
    ends = list(accumulate(lengths))
    return [path[end - length : end] for length, end in zip(lengths, ends, strict=True)]
