"""The operators over a prompt's many rows equal their references."""

import os

import pytest
import torch
from torch import Tensor

from pad_engine.kernels.gated_act import ACTIVATIONS, gated_act_ref, gated_act_triton
from pad_engine.kernels.prefill_attention import prefill_attention, prefill_attention_ref
from pad_engine.kernels.rms_norm import rms_norm_ref, rms_norm_triton
from pad_engine.kernels.rope import rope_ref, rope_triton
from pad_engine.models.rope import RopeTable, make_rope

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="no CUDA device, and Triton's interpreter is off",
)
HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 16), (6, 2, 12), (6, 1, 64)], ids=str)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 9), (7, 7), (5, 40), (40, 41)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_attention_equals_the_reference(
    n: int, m: int, heads: int, kv_heads: int, width: int, softcap: float | None, dtype: torch.dtype
) -> None:
    # as the decoder passes them: heads beside those of the keys, and part of a longer cache
    q = torch.randn(n, heads + kv_heads, width, dtype=dtype, device=DEVICE)[:, :heads]
    k, v = torch.randn(2, kv_heads, m + 9, width, dtype=dtype, device=DEVICE)[:, :, 3 : 3 + m]
    got = prefill_attention(q, k, v, 0.3, softcap)
    assert (got.shape, got.dtype) == ((n, heads * width), dtype)
    expected = prefill_attention_ref(q.float(), k.float(), v.float(), 0.3, softcap)
    # outputs stay below 4, so one rounding of bf16 is 2^-7 at most; probabilities are rounded as well
    torch.testing.assert_close(got.float(), expected, atol=1e-5 if dtype == torch.float32 else 2**-6, rtol=0)
    for row in range(n):
        alone = prefill_attention_ref(q[row : row + 1].float(), *(x[:, : m - n + row + 1].float() for x in (k, v)), 0.3)
        if softcap is None:
            torch.testing.assert_close(expected[row], alone[0], atol=1e-5, rtol=0)


def assert_nearly_equal(got: Tensor, expected: Tensor) -> None:
    """Half precision: all but a few elements are the same bits, and those differ in the last place. float32: sums in
    another order."""
    assert got.dtype == expected.dtype
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        return
    eps = torch.finfo(got.dtype).eps
    # values that were rounded twice may differ twice; a difference of larger ones keeps their error
    torch.testing.assert_close(got, expected, atol=4 * eps, rtol=2 * eps)
    # the interpreter cuts bf16 off where a GPU rounds it; gelu's far tail is a difference of nearly equal numbers
    if got.is_cuda or got.dtype == torch.float16:
        assert (got != expected).float().mean() < 0.2


@needs_triton
@pytest.mark.parametrize("fp32_weight", [False, True], ids=["weight-of-its-type", "weight-in-fp32"])
@pytest.mark.parametrize("shape", [(1, 48), (5, 576), (3, 4100), (7, 3, 16), (2, 5, 100)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_rms_norm_kernel(dtype: torch.dtype, shape: tuple[int, ...], fp32_weight: bool) -> None:
    wider = (*shape[:-2], shape[-2] + 2, shape[-1])
    x = (torch.randn(wider, device=DEVICE) * 3).to(dtype)[..., 1:-1, :]
    weight = torch.randn(shape[-1], device=DEVICE)
    weight = weight if fp32_weight else weight.to(dtype)
    expected = rms_norm_ref(x, weight, 1e-5)
    assert_nearly_equal(rms_norm_triton(x, weight, 1e-5), expected)
    assert rms_norm_triton(x, weight, 1e-5, out=x) is x
    assert_nearly_equal(x, expected)


@needs_triton
@pytest.mark.parametrize(("n", "heads", "width"), [(1, 1, 2), (5, 7, 12), (3, 40, 64), (2, 16, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_rope_kernel(dtype: torch.dtype, n: int, heads: int, width: int) -> None:
    config = make_rope({"rope_theta": 500.0}, width, 4096)
    positions = torch.randint(0, 4096, (n,), device=DEVICE)
    cos, sin = RopeTable(config, 4096, dtype, DEVICE).rows(positions, torch.zeros(n))
    rows = torch.randn(n, heads + 2, width, device=DEVICE).to(dtype)
    before, x = rows.clone(), rows[:, 1:-1]
    expected = rope_ref(x, cos, sin)
    assert rope_triton(x, cos, sin) is x
    assert_nearly_equal(x, expected)
    # the heads beside them are values, and stay as they are
    assert torch.equal(rows[:, 0], before[:, 0])
    assert torch.equal(rows[:, -1], before[:, -1])


@needs_triton
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 2), (3, 2 * 96), (2, 2 * 2100)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_gated_act_kernel(dtype: torch.dtype, shape: tuple[int, int], act: str) -> None:
    gate_up = (torch.randn(shape, device=DEVICE) * 4).to(dtype)
    assert_nearly_equal(gated_act_triton(gate_up, act), gated_act_ref(gate_up, act))
