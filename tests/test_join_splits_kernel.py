"""Parts of splits put together: equal to the softmax over all, whatever number of parts a sequence's length makes, and
no part is read that no split has left, nor is padding written."""

import pytest
import torch
from launches import CLOSE, DEVICE, DTYPES, MODES, ints, nans, normal, repeat
from torch import Tensor

from pad_engine.kernels.attention_tiles import AttentionWorkspace
from pad_engine.kernels.join_splits import AT_ONCE, join_splits, join_splits_ref

SPLITS, CHUNK = 2 * AT_ONCE + 3, 16


def count_of(length: int, own: bool) -> int:
    """The parts of each row of a sequence."""
    return min(max(-(-length // CHUNK), 1), SPLITS) + own


def left_by(
    lengths: list[int], rows: list[int], heads: int, head_dim: int, own: bool, pad: int
) -> tuple[Tensor, Tensor]:
    """What the splits leave of sequences of these lengths and rows, NaN where there is none: parts `[S, N, H, D]` and
    sums `[S, N, H]`."""
    parts, sums = nans(SPLITS + 1, pad, heads, head_dim), nans(SPLITS + 1, pad, heads)
    first = 0
    for length, count in zip(lengths, rows, strict=True):
        splits, here = count_of(length, own), slice(first, first + count)
        parts[:splits, here] = normal(splits, count, heads, head_dim)
        sums[:splits, here] = 20 * normal(splits, count, heads)
        first += count
    return parts, sums


def join(parts: Tensor, sums: Tensor, lengths: list[int], rows: list[int], own: bool, dtype: torch.dtype) -> Tensor:
    _, n, heads, head_dim = parts.shape
    workspace = AttentionWorkspace(n, heads, head_dim, SPLITS, DEVICE)
    workspace.parts.copy_(parts.flatten())
    workspace.sums.copy_(sums.flatten())
    out = nans(n, heads * head_dim, dtype=dtype)
    seq = [s for s, count in enumerate(rows) for _ in range(count)]
    starts = [sum(rows[:s]) for s in range(len(rows) + 1)]
    arguments = (workspace, out, ints(seq + [0] * (n - len(seq))), ints(starts), ints(lengths))

    def launch() -> None:
        join_splits(
            *arguments, ring=10_000, chunk=CHUNK, heads=heads, head_dim=head_dim, splits=SPLITS, own=own, strict=False,
            pdl=MODES[n % len(MODES)],
        )  # fmt: skip

    repeat(launch, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (2, 12), (1, 128)])
def test_any_number_of_parts(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    for count in (1, 2, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 2 * AT_ONCE, SPLITS):
        parts, sums = left_by([count * CHUNK], [1], heads, head_dim, False, 1)
        out = join(parts, sums, [count * CHUNK], [1], False, dtype)
        expected = join_splits_ref(parts[:count], sums[:count]).view(1, -1)
        assert (out.float() - expected).norm() <= CLOSE[dtype] * expected.norm(), count


@pytest.mark.parametrize("own", [False, True])
def test_each_row_has_the_parts_of_its_sequence(own: bool) -> None:
    lengths, rows = [0, 3 * CHUNK + 1, 10_000, CHUNK], [2, 5, 1, 3]
    parts, sums = left_by(lengths, rows, 2, 16, own, 16)
    out, first = join(parts, sums, lengths, rows, own, torch.float32), 0
    for length, count in zip(lengths, rows, strict=True):
        splits, here = count_of(length, own), slice(first, first + count)
        expected = join_splits_ref(parts[:splits, here], sums[:splits, here]).view(count, -1)
        assert bool(((out[here] - expected).norm(dim=1) <= 1e-6 * expected.norm(dim=1)).all())
        first += count
    assert bool(out[first:].isnan().all()), "padding is not written"


def test_a_split_that_saw_nothing_weighs_nothing() -> None:
    """Its sum is -inf and its mean zero; the first splits of a window see nothing, and the others must not notice."""
    parts, sums = left_by([5 * CHUNK], [1], 2, 16, False, 1)
    parts[:2], sums[:2] = 0, -torch.inf
    out = join(parts, sums, [5 * CHUNK], [1], False, torch.float32)
    expected = join_splits_ref(parts[2:5], sums[2:5]).view(1, -1)
    assert (out - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("split", [0, 2])
def test_a_part_that_is_not_a_number_is_not_lost(split: int) -> None:
    parts, sums = left_by([3 * CHUNK], [1], 2, 16, False, 1)
    parts[split, 0, 1], sums[split, 0, 1] = torch.nan, torch.nan
    out = join(parts, sums, [3 * CHUNK], [1], False, torch.float32).view(2, 16)
    assert bool(out[0].isfinite().all()) and bool(out[1].isnan().all())
