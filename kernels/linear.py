"""Matrix product of a few rows with a weight matrix: `y = x W^T + b`.

At one to sixteen rows the product costs the reading of the weights and nothing more, if the library lets it. On a CPU
torch's own `linear` does not: MKL's small-row products of fp32 cost up to three times one row. oneDNN with weights
packed once does (docs/performance.md), so the weights are packed at load and the plain copy is dropped.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pad_engine.kernels.quantise import dequantise

# Rows that oneDNN is told to expect when it chooses the packed layout. Layouts chosen for one row are slow at many.
PACK_ROWS = 16
# oneDNN compiles a product for each number of rows, and keeps a thousand of them, about a megabyte for each length of a
# prompt. Above so many rows they are padded to a multiple of ROW_STEP.
EXACT_ROWS, ROW_STEP = 64, 16


def linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """The meaning, in float32. x: `[N, K]`, weight: `[M, K]`, bias: `[M]` or None, scale: fp32 `[M]`, of quantised
    weights, or None; returns `[N, M]` fp32."""
    y = x.float() @ weight.float().t()
    y = y if scale is None else y * scale
    return y if bias is None else y + bias.float()


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can pack this weight: a CPU build that has it, in fp32, or bf16 on a CPU with bf16 products."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class Linear:
    """A weight matrix kept in the layout that its device reads fastest.

    weight: `[out_features, in_features]` in fp32, bf16 or fp16, or quantised, with scale: fp32 `[out_features]`
    (quantise.py). bias: `[out_features]` of the model's type, or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.bias, self.scale = bias, scale
        self.packed = can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: `[N, in_features]` of the model's type; returns `[N, out_features]` of it."""
        if self.packed:
            n = x.shape[0]
            padding = -n % ROW_STEP if n > EXACT_ROWS else 0
            if padding:
                x = F.pad(x, (0, 0, 0, padding))
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return out[:n] if padding else out
        return F.linear(x, self.plain(x.dtype), self.bias)

    def rows(self, index: slice | Tensor) -> "Linear":
        """The product with these rows alone: views of them for a slice of what is not packed, else copies."""
        weight = self.weight.to_dense() if self.packed else self.weight
        return Linear(weight[index], *(None if part is None else part[index] for part in (self.bias, self.scale)))

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The weights `[out_features, in_features]` as they are multiplied with. dtype: the model's.

        Quantised ones are written out anew each time. At a prompt's many rows that is little beside the product; at a
        few it costs more than was saved, so on a GPU those rows are the fused kernels'. A CPU saves memory, not time.
        """
        if self.scale is not None:
            return dequantise(self.weight, self.scale, dtype)
        return self.weight.to_dense() if self.packed else self.weight
