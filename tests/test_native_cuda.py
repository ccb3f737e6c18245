"""libpad's kernels against its own functions for the CPU, on random records. They are there only if it was built with
PAD_CUDA=1."""

import ctypes
import random
from ctypes import byref, c_double, c_float, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

import pytest
import torch
from random_forests import (
    INF,
    THRESHOLDS,
    VOCAB,
    parents_of,
    random_forest,
    random_judged,
    random_logits,
    random_rule,
)
from torch import Tensor

from pad_engine import native, native_accept
from pad_engine import native_tail as tail
from pad_engine.kernels.row_stats import RowStats
from pad_engine.native_tail import Judged, Kind

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
FLOAT32, BFLOAT16 = range(2)  # pad_dtype
P, N = c_void_p, c_size_t
SIGNATURES = {
    "pad_cuda_row_stats": [P, c_int, N, N, N, *[P] * 6, N, P],
    "pad_cuda_gumbel_pick": [P, N, N, N, P, c_uint64, c_float, P, P, N, P],
    "pad_cuda_gather_judged": [*[P] * 5, c_int, N, N, P, P, N, *[P] * 6],
    "pad_cuda_pivot_mlp": [P, P, c_int, N, P, N, P, P],
    "pad_cuda_relaxed_path": [*[P] * 8, N, N, *[P] * 7],
    "pad_cuda_rejection_path": [P, N, N, P, N, N, P, N, c_double, c_uint64, *[P] * 6],
    "pad_cuda_commit_list": [P, P, N, P, N, N, *[P] * 3],
}


@pytest.fixture(autouse=True)
def built() -> None:
    library = native._load()[0]
    if library is None or not hasattr(library, "pad_cuda_workspace_size"):
        pytest.skip("libpad was built without PAD_CUDA=1")
    library.pad_cuda_workspace_size.argtypes, library.pad_cuda_workspace_size.restype = [N, N], N
    for name, argtypes in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = argtypes, c_int


def launch(name: str, *arguments: Any) -> None:
    """A call on the current stream; tensors by their addresses."""
    stream = torch.cuda.current_stream().cuda_stream if DEVICE.type == "cuda" else 0
    native.call(name, *(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments), stream)


def workspace(rows: int, vocab: int) -> tuple[Tensor, int]:
    library = native._load()[0]
    assert library is not None
    size = library.pad_cuda_workspace_size(rows, vocab)
    return torch.empty(size, dtype=torch.uint8, device=DEVICE), size


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def device_bytes(structure: ctypes.Structure) -> Tensor:
    return torch.frombuffer(bytearray(structure), dtype=torch.uint8).to(DEVICE)


def odd_rows(rows: int, vocab: int) -> Tensor:
    """Ties, masks, one row with everything in one token, and three that are not finite."""
    logits = torch.randn(rows, vocab) * 3
    logits[0].round_()
    logits[1][torch.rand(vocab) < 0.6] = -INF
    logits[1, vocab - 1] = 0.0
    logits[2, vocab // 2] = 400.0
    logits[3] = 2.5
    logits[4, vocab - 1], logits[5, 0], logits[6] = float("nan"), INF, -INF
    logits[7] = -INF
    logits[7, vocab // 3] = -5.0
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(8, 3), (9, 100), (12, 4097), (17, 32000), (64, 151936), (8, 300001)])
def test_row_stats(rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = odd_rows(rows, vocab).to(dtype)
    expected = tail.row_stats(logits.float())
    wide = torch.zeros(rows, vocab + 3, dtype=dtype, device=DEVICE)
    wide[:, :vocab] = logits
    got = RowStats(
        torch.full((rows, 3), 7, dtype=torch.int32, device=DEVICE),
        torch.full((rows, 3), 7.0, device=DEVICE),
        *(torch.full((rows,), 7.0, device=DEVICE) for _ in range(3)),
    )
    kind = FLOAT32 if dtype == torch.float32 else BFLOAT16
    launch("pad_cuda_row_stats", wide, kind, rows, vocab, vocab + 3, *got, *workspace(rows, vocab))
    assert torch.equal(got.top_id.cpu(), expected.top_id)
    for name in ("top_logit", "margin"):
        torch.testing.assert_close(getattr(got, name).cpu(), getattr(expected, name), rtol=0, atol=0, equal_nan=True)
    for name in ("lse", "entropy"):
        torch.testing.assert_close(
            getattr(got, name).cpu(), getattr(expected, name), rtol=2e-6, atol=1e-5, equal_nan=True
        )


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 0.7, 1.0, 50.0])
@pytest.mark.parametrize(("rows", "vocab"), [(8, 3), (9, 100), (33, 49152), (8, 300001)])
def test_gumbel_pick(rows: int, vocab: int, temperature: float) -> None:
    logits, positions = odd_rows(rows, vocab), torch.arange(rows) // 2 + 2**31 - 2
    expected = native.gumbel_pick(logits, positions, 2**63 + 5, temperature)
    got = torch.full((rows,), 7, dtype=torch.int32, device=DEVICE)
    inputs = on_device(logits, positions.to(torch.uint32).view(torch.int32))
    space = workspace(rows, vocab)
    launch(
        "pad_cuda_gumbel_pick", inputs[0], rows, vocab, vocab, inputs[1], 2**63 + 5, temperature, got, *space
    )  # fmt: skip
    assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_judged(dtype: torch.dtype) -> None:
    rng = random.Random(2)
    for _ in range(50):
        forest, _ = random_forest(rng)
        n, token = len(forest.token), forest.token.clone()
        token[rng.randrange(n)] = rng.choice([-1, VOCAB, 2**31 - 1])
        logits = random_logits(n, rng).to(dtype)
        stats = tail.row_stats(logits.float())
        expected = tail.gather_judged(stats, logits.float(), token, forest.parent)
        got = [torch.empty_like(field, device=DEVICE) for field in expected[:-1]]
        rows, given = on_device(*stats[:4]), on_device(logits, token, forest.parent)
        kind = FLOAT32 if dtype == torch.float32 else BFLOAT16
        launch(
            "pad_cuda_gather_judged", *rows, given[0], kind, VOCAB, VOCAB, given[1], given[2], n, *got
        )  # fmt: skip
        for ours, theirs in zip(got, expected[:-1], strict=True):
            assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_scalars", [0, 2, 3])
@pytest.mark.parametrize("hidden_size", [1, 33, 576, 4096])
def test_pivot_mlp(hidden_size: int, num_scalars: int, dtype: torch.dtype) -> None:
    shapes = {"hidden": (64, hidden_size), "scalars": (16, num_scalars), "layer1": (128, 80), "layer2": (2, 128)}
    weights = {f"{k}.weight": torch.randn(shape) / max(1, shape[1]) ** 0.5 for k, shape in shapes.items()}
    weights |= {f"{k}.bias": torch.randn(shape[0]) for k, shape in shapes.items()}
    hidden, scalars = torch.randn(21, hidden_size).to(dtype), torch.rand(21, num_scalars)
    expected = tail.pivot_mlp(weights, hidden.float(), scalars)
    held = {name: weight.to(DEVICE) for name, weight in weights.items()}
    addresses = [held[name].data_ptr() for name in tail._WEIGHTS]
    given = tail._PivotWeights(hidden_size, num_scalars, *addresses)
    got, (h, x) = torch.empty(21, device=DEVICE), on_device(hidden, scalars)
    kind = FLOAT32 if dtype == torch.float32 else BFLOAT16
    launch("pad_cuda_pivot_mlp", byref(given), h, kind, hidden_size, x, 21, got)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", Kind)
def test_relaxed_path(kind: Kind) -> None:
    rng = random.Random(100 + int(kind))
    assert kind in THRESHOLDS
    for _ in range(200):
        forest, trees = random_forest(rng)
        judged, pick = random_judged(forest, rng)
        rule, n, roots = random_rule(kind, rng), len(forest.token), len(trees)
        history = [rng.choice([0, rng.randrange(2**63)]) for _ in trees]
        columns = (forest.token, forest.parent, pick, forest.tree_mask_bits, forest.depth, forest.seq)
        expected = tail.relaxed_path(rule, *columns, judged, roots, history)
        numbers, given = on_device(*judged), on_device(*columns, torch.tensor(history))
        held, rule_bytes = tail._Judged(*(field.data_ptr() for field in numbers)), device_bytes(rule)
        kept = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        path, length, end = (torch.full((size,), 7, dtype=torch.int32, device=DEVICE) for size in (n, roots, roots))
        flags = torch.full((n,), 7, dtype=torch.uint8, device=DEVICE)
        launch(
            "pad_cuda_relaxed_path", rule_bytes, *given[:6], byref(held), n, roots, given[6], kept, path, length, end,
            flags,
        )  # fmt: skip
        lengths = length.tolist()
        assert native_accept._split(path.tolist(), lengths) == expected.paths
        assert path.tolist()[sum(lengths) :] == [-1] * (n - sum(lengths))
        assert end.tolist() == expected.ends
        assert [flag == 1 for flag in flags.tolist()] == expected.overridden
        assert int(kept) % 2**64 == expected.kept


def test_a_full_chain_and_a_full_star() -> None:
    for shape in ("chain", "star"):
        rng = random.Random(1)
        parents = parents_of(shape, 64, rng)
        depth = [min(i, 1) for i in range(64)] if shape == "star" else list(range(64))
        bits = [0] * 64
        for i, p in enumerate(parents):
            bits[i] = 1 << i | (bits[p] if p >= 0 else 0)
        mask = torch.tensor([b - 2**64 if b >= 2**63 else b for b in bits])[:, None]
        ints = [torch.tensor(x, dtype=torch.int32) for x in ([3] * 64, parents, [3] * 64, depth, [0] * 64)]
        zeros = torch.zeros(64)
        judged = Judged(torch.zeros(64, 3, dtype=torch.int32), torch.zeros(64, 3), zeros, zeros, zeros, zeros)
        columns = (ints[0], ints[1], ints[2], mask, ints[3], ints[4])
        expected = tail.relaxed_path(tail.make_rule(Kind.BASE), *columns, judged, 1)
        numbers, given, rule = on_device(*judged), on_device(*columns), device_bytes(tail.make_rule(Kind.BASE))
        held = tail._Judged(*(field.data_ptr() for field in numbers))
        kept, path = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(66, dtype=torch.int32, device=DEVICE)
        flags = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
        ends = (path.data_ptr() + 4 * 64, path.data_ptr() + 4 * 65)
        launch("pad_cuda_relaxed_path", rule, *given, byref(held), 64, 1, None, kept, path, *ends, flags)
        assert path[: int(path[64])].tolist() == expected.paths[0]
        assert int(kept) % 2**64 == expected.kept


def test_rejection_path() -> None:
    rng, lengths = random.Random(6), set()
    for trial in range(300):
        n, draft_vocab = rng.randint(1, 8), rng.choice([VOCAB - 3, VOCAB, VOCAB + 4])
        logits = random_logits(n, rng)
        if trial % 10 == 0:
            logits[rng.randrange(n), 1] = float("nan")
        q = torch.randn(n, draft_vocab).softmax(-1) if rng.random() < 0.6 else None
        token = torch.tensor([rng.randrange(VOCAB + 2) for _ in range(n)], dtype=torch.int32)
        parent, temperature = torch.arange(-1, n - 1, dtype=torch.int32), rng.choice([0.0, 0.3, 1.0])
        expected = tail.rejection_path(logits, q, token, parent, temperature, trial, 40 + trial, trial)
        given = on_device(logits, token, *(torch.tensor([x], dtype=torch.int32) for x in (40 + trial, trial)))
        q_given = (None, 0, 0) if q is None else (q.to(DEVICE), draft_vocab, draft_vocab)
        path = torch.full((n,), 7, dtype=torch.int32, device=DEVICE)
        out = torch.zeros(2, dtype=torch.int32, device=DEVICE)
        launch(
            "pad_cuda_rejection_path", given[0], VOCAB, VOCAB, *q_given, given[1], n, temperature, trial, *given[2:],
            path, out[:1], out[1:],
        )  # fmt: skip
        length, end = out.tolist()
        assert (path[:length].tolist(), end) == expected
        lengths.add(length)
    assert len(lengths) > 3


def test_commit_list() -> None:
    rng = random.Random(8)
    for _ in range(200):
        scratch, ring, length = rng.randint(1, 64), rng.choice([1, 3, 50, 1000]), rng.randrange(2000)
        rows = rng.sample(range(scratch), rng.randint(0, scratch))
        expected = native_accept.commit_list(rows, length, scratch, ring)
        padded = torch.tensor(rows + [0] * (scratch - len(rows)), dtype=torch.int32)
        given = on_device(padded, *(torch.tensor([x], dtype=torch.int32) for x in (len(rows), length)))
        source, target = (torch.full((scratch,), 7, dtype=torch.int32, device=DEVICE) for _ in range(2))
        launch("pad_cuda_commit_list", *given[:2], scratch, given[2], scratch, ring, source, target)
        moved = len(expected[0])
        assert (source[:moved].tolist(), target[:moved].tolist()) == tuple(map(list, expected))
        assert source[moved:].tolist() == target[moved:].tolist() == [-1] * (scratch - moved)


def test_a_graph_sees_changed_thresholds() -> None:
    if DEVICE.type != "cuda":
        pytest.skip("a graph needs a GPU")
    int32 = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 5], [-1, 0], [4, 9], [0, 1], [0, 0])]
    mask = torch.tensor([[1], [3]], device=DEVICE)
    top = (
        torch.tensor([[4, 5, 6]] * 2, dtype=torch.int32, device=DEVICE),
        torch.tensor([[3.0, 2.9, 0.0]] * 2).to(DEVICE),
    )
    ones = torch.ones(2, device=DEVICE)
    held = tail._Judged(top[0].data_ptr(), top[1].data_ptr(), *[ones.data_ptr()] * 4)
    rule = device_bytes(tail.make_rule(Kind.MARGIN_PAPER, 1.0))
    kept = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    out, flags = torch.zeros(4, dtype=torch.int32, device=DEVICE), torch.zeros(2, dtype=torch.uint8, device=DEVICE)
    columns = (*int32[:3], mask, *int32[3:], byref(held), 2, 1, None, kept, out, out[2:], out[3:], flags)
    # loads the kernels
    launch("pad_cuda_relaxed_path", rule, *columns)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch("pad_cuda_relaxed_path", rule, *columns)
    graph.replay()
    assert out.tolist() == [0, -1, 1, 4]
    rule.copy_(device_bytes(tail.make_rule(Kind.MARGIN_PAPER, 0.9)))
    graph.replay()
    assert out.tolist() == [0, 1, 2, 9]


def test_refusals() -> None:
    x = torch.zeros(64, device=DEVICE)
    with pytest.raises(native.NativeError, match="workspace_size must be at least"):
        launch("pad_cuda_row_stats", x, FLOAT32, 1, 8, 8, x, x, x, x, x, x, 8)
    with pytest.raises(native.NativeError, match="dtype must be"):
        launch("pad_cuda_row_stats", x, 2, 1, 8, 8, x, x, x, x, x, x, 256)
    with pytest.raises(native.NativeError, match="no pointer may be null"):
        launch("pad_cuda_commit_list", None, x, 1, x, 1, 1, x, x)
    with pytest.raises(native.NativeError, match="at most 64"):
        launch("pad_cuda_relaxed_path", *[x] * 8, 65, 1, *[x] * 6)
