"""The commit kernel moves what its reference moves, on a GPU or in Triton's interpreter."""

import random

import pytest
import torch
from launches import DEVICE, ints

from pad_engine.kernels import kv_commit
from pad_engine.kernels.kv_commit import kv_commit_ref
from pad_engine.tree import column

PDL = DEVICE.type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)


@pytest.mark.parametrize(
    ("layers", "heads", "head_dim", "scratch", "ring", "block_rows"),
    [(2, 3, 64, 16, 40, 16), (1, 1, 8, 5, 7, 4), (3, 2, 72, 64, 9, 64), (1, 2, 128, 32, 100, 32), (2, 1, 24, 1, 3, 1)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_commit_equals_the_reference(
    layers: int, heads: int, head_dim: int, scratch: int, ring: int, block_rows: int, dtype: torch.dtype
) -> None:
    rng, num_seqs = random.Random(ring), 3
    starts = [0, scratch, 2 * scratch, 3 * scratch]
    shape = (layers, 2, num_seqs, heads, scratch + ring, head_dim)
    for _ in range(4):
        buffer = torch.randn(shape, device=DEVICE).to(dtype)
        expected = buffer.cpu().clone()
        rows = [sorted(rng.sample(range(scratch), rng.randint(0, min(scratch, block_rows)))) for _ in range(num_seqs)]
        old_len = [rng.randint(0, 3 * ring) for _ in rows]
        path = torch.full((num_seqs, block_rows), 10**6, dtype=torch.int32)
        for seq, (kept, length) in enumerate(zip(rows, old_len, strict=True)):
            path[seq, : len(kept)] = column(kept) + starts[seq]
            moved = kept[-ring:]
            first = length + len(kept) - len(moved)
            targets = [scratch + (first + i) % ring for i in range(len(moved))]
            kv_commit_ref(expected[:, :, seq], [scratch - 1 - row for row in moved], targets)
        counts = ints([len(kept) for kept in rows])
        kv_commit.kv_commit(buffer, path.to(DEVICE), ints(starts), ints(old_len), counts, scratch, pdl=PDL)
        assert torch.equal(buffer.cpu(), expected)
