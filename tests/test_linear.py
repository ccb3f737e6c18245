"""The packed product equals its definition, for any number of rows, odd sizes and both types, with and without bias."""

import pytest
import torch

from pad_engine.kernels.linear import Linear, linear_ref


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 576, 960), (3, 37, 1), (16, 1536, 576), (65, 64, 301)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(dtype: torch.dtype, rows: int, inputs: int, outputs: int, biased: bool) -> None:
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    with torch.inference_mode():
        out = Linear(weight, bias)(x)
    expected = linear_ref(x, weight, bias)
    assert out.dtype == dtype and out.shape == (rows, outputs)
    # fp32: a rounding for each of the terms that are added up. bf16: one rounding of the sum, whose size is the root of
    # their number
    bound = 2.0**-23 * (inputs + 1) if dtype == torch.float32 else 2e-2 * (inputs + 1) ** 0.5
    assert (out.float() - expected).abs().max() < bound


def test_prompts_of_many_lengths_are_products_of_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size that oneDNN meets is compiled and kept; those of verified trees are met as they are."""
    linear, x, sizes = Linear(torch.randn(8, 8)), torch.randn(512, 8), set()
    if not linear.packed:
        pytest.skip("torch was built without oneDNN")
    product = torch.ops.mkldnn._linear_pointwise

    def counted(rows: torch.Tensor, *rest: object) -> torch.Tensor:
        sizes.add(len(rows))
        return product(rows, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    with torch.inference_mode():
        whole = linear(x)
        for n in range(1, 513):
            torch.testing.assert_close(linear(x[:n]), whole[:n])
    assert sizes == {*range(1, 65), *range(80, 513, 16)}
