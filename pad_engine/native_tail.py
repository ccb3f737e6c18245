"""libpad's relaxed acceptance and its rejection sampling: contiguous CPU tensors in.

csrc/include/pad.h says what each function does. The engine's rules are rules/override.py and rules/rejection.py; these
bindings are for embedding, and hold the library to the same meaning.
"""

from collections.abc import Sequence
from ctypes import Structure, addressof, byref, c_float, c_int32, c_uint8, c_uint32, c_uint64, c_void_p, cast
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from pad_engine.kernels.row_stats import TOP, RowStats
from pad_engine.native import call
from pad_engine.native_accept import _address, _check_roots, _int32, _split


class Kind(IntEnum):
    """pad_rule_kind: which tokens that are not the target's own may pass."""

    BASE = 0
    MARGIN_PAPER = 1
    MARGIN_RATIO = 2
    MARGIN_GAP = 3
    PIVOT = 4
    TYPICAL = 5
    TOPK = 6
    FLY_PAPER = 7
    FLY_RELEASED = 8


class Rule(Structure):
    """pad_rule."""

    _fields_ = (
        ("kind", c_uint32),
        ("threshold", c_float * 4),
        ("log_floor", c_float),
        ("outer_floor", c_uint32),
        ("lookahead", c_uint32),
        ("reach", c_uint32),
        ("max_overrides", c_uint32),
        ("window", c_uint32),
    )


def make_rule(
    kind: Kind,
    *thresholds: float,
    log_floor: float = -float("inf"),
    outer_floor: bool = False,
    lookahead: int = 0,
    reach: int = 0,
    max_overrides: int = 0,
    window: int = 64,
) -> Rule:
    """A rule that nothing bounds, but for what is given."""
    return Rule(kind, (c_float * 4)(*thresholds), log_floor, outer_floor, lookahead, reach, max_overrides, window)


class Judged(NamedTuple):
    """pad_judged, for N nodes from the rows that judge them: top_id int32 and top_logit fp32 `[N, 3]`; lse, entropy,
    token_logit and pivot_prob fp32 `[N]`."""

    top_id: Tensor
    top_logit: Tensor
    lse: Tensor
    entropy: Tensor
    token_logit: Tensor
    pivot_prob: Tensor


class RelaxedPaths(NamedTuple):
    """For each sequence the rows of its path, root first, and the token after it; for each row whether it is on a path
    by an override. kept: rows as bits, before the cut."""

    paths: list[list[int]]
    ends: list[int]
    overridden: list[bool]
    kept: int


class _Judged(Structure):
    _fields_ = tuple((name, c_void_p) for name in Judged._fields)


_WEIGHTS = (
    *("hidden.weight", "hidden.bias", "scalars.weight", "scalars.bias"),
    *("layer1.weight", "layer1.bias", "layer2.weight", "layer2.bias"),
)


class _PivotWeights(Structure):
    _fields_ = (
        ("hidden_size", c_uint32),
        ("num_scalars", c_uint32),
        *((name.replace(".", "_"), c_void_p) for name in _WEIGHTS),
    )


def row_stats(logits: Tensor) -> RowStats:
    """logits: fp32 `[R, V]`, V at least 3, unit stride over V. A row that is not finite has NaN in its numbers and
    -1 in its ids."""
    rows, vocab = _check_rows("logits", logits)
    out = RowStats(
        torch.empty(rows, TOP, dtype=torch.int32), torch.empty(rows, TOP), *(torch.empty(rows) for _ in range(3))
    )
    call("pad_row_stats", logits.data_ptr(), rows, vocab, logits.stride(0), *(field.data_ptr() for field in out))
    return out


def gather_judged(stats: RowStats, logits: Tensor, token: Tensor, parent: Tensor) -> Judged:
    """What the row that judges a node says: that of its parent, or a root's own. stats: of the `[N, V]` logits; token
    and parent: int32 `[N]`. pivot_prob is 1."""
    n, vocab = _check_rows("logits", logits)
    inputs = (
        _address("top_id", stats.top_id, (n, TOP), torch.int32),
        _address("top_logit", stats.top_logit, (n, TOP), torch.float32),
        *(_address(name, getattr(stats, name), (n,), torch.float32) for name in ("lse", "entropy")),
    )
    lse, entropy, token_logit = (torch.empty(n) for _ in range(3))
    top_id, top_logit = torch.empty(n, TOP, dtype=torch.int32), torch.empty(n, TOP)
    out = Judged(top_id, top_logit, lse, entropy, token_logit, torch.ones(n))
    nodes = _int32("token", token, n), _int32("parent", parent, n)
    written = (field.data_ptr() for field in out[:-1])
    call("pad_gather_judged", *inputs, logits.data_ptr(), vocab, logits.stride(0), *nodes, n, *written)
    return out


def pivot_mlp(weights: dict[str, Tensor], hidden: Tensor, scalars: Tensor) -> Tensor:
    """pivot_prob fp32 `[N]`. weights: fp32, named as in a checkpoint. hidden: fp32 `[N, d]`, unit stride over d;
    scalars: fp32 `[N, S]`."""
    n, hidden_size = _check_rows("hidden", hidden)
    num_scalars = scalars.shape[-1]
    shapes = (
        *((64, hidden_size), (64,), (16, num_scalars), (16,)),
        *((128, 80), (128,), (2, 128), (2,)),
    )
    addresses = (
        _address(name, weights[name], shape, torch.float32) for name, shape in zip(_WEIGHTS, shapes, strict=True)
    )
    given = _PivotWeights(hidden_size, num_scalars, *addresses)
    x = _address("scalars", scalars, (n, num_scalars), torch.float32)
    out = torch.empty(n)
    call("pad_pivot_mlp", addressof(given), hidden.data_ptr(), hidden.stride(0), x, n, out.data_ptr())
    return out


def linear_judge(weight: Tensor, bias: float, hidden: Tensor) -> Tensor:
    """1 - sigmoid(weight . hidden + bias), fp32 `[N]`. weight: fp32 `[d]`; hidden: fp32 `[N, d]`, unit stride in d."""
    n, hidden_size = _check_rows("hidden", hidden)
    w = _address("weight", weight, (hidden_size,), torch.float32)
    out = torch.empty(n)
    call("pad_linear_judge", w, bias, hidden.data_ptr(), hidden_size, hidden.stride(0), n, out.data_ptr())
    return out


def relaxed_path(
    rule: Rule,
    token: Tensor,
    parent: Tensor,
    row_pick: Tensor,
    tree_mask_bits: Tensor,
    depth: Tensor,
    seq: Tensor,
    judged: Judged,
    num_roots: int,
    history: Sequence[int] = (),
) -> RelaxedPaths:
    """The accepted paths of a forest of N <= 64 rows: tree_mask_bits int64 `[N, 1]`, the other tensors int32 `[N]`.

    history: for each sequence 64 bits, bit b of the token emitted b tokens ago; nothing where none was overridden.
    """
    n = len(token)
    _check_roots(num_roots, n)
    if history and len(history) != num_roots:
        raise ValueError(f"history must have {num_roots} entries, got {len(history)}")
    inputs = (
        *(_int32("token", token, n), _int32("parent", parent, n), _int32("row_pick", row_pick, n)),
        _address("tree_mask_bits", tree_mask_bits, (n, (n + 63) // 64), torch.int64),
        *(_int32("depth", depth, n), _int32("seq", seq, n)),
    )
    shapes = ((n, TOP), (n, TOP), *[(n,)] * 4)
    columns = zip(Judged._fields, judged, shapes, strict=True)
    numbers = _Judged(*(_address(k, x, s, torch.int32 if k == "top_id" else torch.float32) for k, x, s in columns))
    past = cast((c_uint64 * num_roots)(*history), c_void_p) if history else None
    kept, out, flags = c_uint64(), (c_int32 * (n + 2 * num_roots))(), (c_uint8 * n)()
    path = addressof(out)
    ends = path + 4 * n, path + 4 * (n + num_roots)
    pointers = byref(kept), path, *ends, addressof(flags)
    call("pad_relaxed_path", byref(rule), *inputs, byref(numbers), n, num_roots, past, *pointers)
    paths = _split(out[:n], out[n : n + num_roots])
    return RelaxedPaths(paths, out[n + num_roots :], [flag != 0 for flag in flags], kept.value)


def rejection_path(
    logits: Tensor,
    q: Tensor | None,
    token: Tensor,
    parent: Tensor,
    temperature: float,
    seed: int,
    position: int,
    round_index: int,
) -> tuple[list[int], int]:
    """Speculative sampling along one tree: the accepted rows, root first, and the token after them, -1 where a row on
    the way is not finite.

    logits: processed, fp32 `[N, V]`; q: fp32 `[N, V']`, what each row's children were drawn from, or None; both with
    unit stride over tokens. token, parent: int32 `[N]`. position: of the token after the root.
    """
    n, vocab = _check_rows("logits", logits)
    q_rows, q_vocab = (n, 0) if q is None else _check_rows("q", q)
    if q_rows != n:
        raise ValueError(f"q must have {n} rows, got {q_rows}")
    q_given = (None, 0, 0) if q is None else (q.data_ptr(), q_vocab, q.stride(0))
    nodes = _int32("token", token, n), _int32("parent", parent, n)
    work = torch.empty(2 * max(vocab, q_vocab), dtype=torch.float64)
    out = (c_int32 * (n + 2))()
    path = addressof(out)
    draw = (temperature, seed % 2**64, position % 2**32, round_index % 2**32)
    pointers = path, path + 4 * n, path + 4 * (n + 1)
    call(
        *("pad_rejection_path", logits.data_ptr(), vocab, logits.stride(0), *q_given),
        *(*nodes, n, *draw, work.data_ptr(), *pointers),
    )
    return out[: out[n]], out[n + 1]


def _check_rows(name: str, rows: Tensor) -> tuple[int, int]:
    if rows.dim() != 2 or rows.dtype != torch.float32 or not rows.is_cpu or rows.stride(1) != 1:
        raise ValueError(
            f"{name} must be two-dimensional, float32, on the CPU and of unit stride in its rows, got "
            f"{list(rows.shape)} {rows.dtype} on {rows.device} with strides {rows.stride()}"
        )
    return rows.shape[0], rows.shape[1]
