"""Root-mean-square norm (Zhang and Sennrich 2019, equation 4), in the two forms that the supported families use."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, with the mean in fp32.

    x: `[..., D]` in any float type. weight: `[D]`. When the weight has x's type, the normalised row is rounded to that
    type before the product (Llama, Qwen, Mistral). A weight in fp32 beside a half-precision x is multiplied before
    rounding (Gemma). Returns `[..., D]` in x's type.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    normed = F.rms_norm(x.float(), (x.shape[-1],), None, eps)
    if weight.dtype == torch.float32:
        return (normed * weight).to(x.dtype)
    return normed.to(x.dtype) * weight
