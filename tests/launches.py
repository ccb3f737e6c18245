"""What the tests of kernels share: the device they run on, inputs and outputs, and launches that must repeat.

They run on a GPU where there is one, and in Triton's interpreter elsewhere.
"""

import importlib
import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from pad_engine.kernels.row_tiles import EARLY, LATE, OFF

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# programmatic dependent launch, where the card has it
MODES = [EARLY, LATE] if CUDA and torch.cuda.get_device_capability() >= (9, 0) else [OFF]
REPEATS = 100 if CUDA else 1
ROWS = [1, 16, 32, 64]  # that a pass is padded to
# Triton's interpreter cannot multiply matrices of bf16
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
# error of a row over its length: some roundings of the type, or the order of fp32 sums
CLOSE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
EPS = 1e-5


def cases(shapes: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """(rows, dtype, shape, one of each other axis): every number of rows with every shape, in two types; the other axes
    by lot, since each case takes its time to compile, or to be interpreted."""
    lot, picked = random.Random(0), []
    for rows, shape in product(ROWS, shapes):
        for dtype in (DTYPES[-1], lot.choice(DTYPES[:-1])):
            picked.append((rows, dtype, shape, *map(lot.choice, others)))
    return picked


def bits(x: Tensor) -> Tensor:
    return x.view(WORDS[x.dtype.itemsize])


def host_bits(x: Tensor) -> Tensor:
    return bits(x.cpu())


def nans(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An output that nobody has written."""
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def ints(values, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.as_tensor(values, dtype=dtype).to(DEVICE)


def repeat(launch: Callable[[], None], *written: Tensor) -> None:
    """Launch from the same state, on a GPU many times; what it writes has the same bits each time."""
    if CUDA:
        torch.cuda.synchronize()  # what a pass does not write is read ahead of the wait, and must be there
    before = [tensor.clone() for tensor in written]
    launch()
    first = [tensor.clone() for tensor in written]
    for _ in range(REPEATS - 1):
        for tensor, start in zip(written, before, strict=True):
            tensor.copy_(start)
        launch()
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(written, first, strict=True))


def dots_by_element(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter sum each element of a product in the same order. The library's products, unlike a tensor
    core's, round an element by its place in the matrix."""
    if CUDA:
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        x, y = (operand.data.astype(d.data.dtype) for operand in (a, b))
        return interpreter.TensorHandle((x[:, :, None] * y[None]).sum(1) + d.data, d.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def assert_rows_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Each row by its own length, so that none hides behind the others; NaN is never close."""
    assert actual.shape == expected.shape
    error = (actual.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    assert bool((error <= CLOSE[dtype]).all()), f"row errors {error.tolist()}"


def normed_input(rows: int, k: int, dtype: torch.dtype, norm_dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A hidden state, a norm's weight, and what the kernel before leaves of them: for one row, nothing."""
    h, norm = normal(rows, k, dtype=dtype) * 3, (torch.rand(k) + 0.5).to(DEVICE, norm_dtype)
    if rows == 1:
        return h, norm, nans(1, k, dtype=dtype), nans(5, 1)
    # uneven tiles, and one that is empty
    squares = torch.stack([part.float().square().sum(1) for part in h.tensor_split([3, 7, 7, k // 2], dim=1)])
    return h, norm, (h.float() * norm.float()).to(dtype), squares
