"""Two Triton kernels of our own, forward only: what fusion gains over the library. Needs Triton, and a GPU for speed.

bias_gelu(x, bias) == gelu(x + bias), tanh approximation; rms_norm(x, weight) == x / rms(x) * weight. Both compute in
float32 whatever the operands' type, and read and write each element once. `TRITON_INTERPRET=1`, set before this file is
imported, runs them on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements a program of bias_gelu handles: four for each of 256 threads


@triton.jit
def _bias_gelu(x, bias, out, size, width, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < size
    value = tl.load(x + at, mask=inside).to(tl.float32) + tl.load(bias + at % width, mask=inside).to(tl.float32)
    # 0.5 (1 + tanh(u)) == sigmoid(2 u), u = sqrt(2 / pi) (v + 0.044715 v^3): Hendrycks and Gimpel 2016, section 2
    gate = tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    tl.store(out + at, (value * gate).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm(x, weight, out, width, eps, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    column = tl.arange(0, block)
    inside = column < width
    at = tl.program_id(0) * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
    scaled = value * inverse * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)


def bias_gelu(x_BSH: Tensor, bias_H: Tensor) -> Tensor:
    """gelu(x + bias), tanh approximation; x: [..., h] row-major, bias: [h] -> [..., h]."""
    out = torch.empty_like(x_BSH)
    _bias_gelu[(triton.cdiv(x_BSH.numel(), BLOCK),)](x_BSH, bias_H, out, x_BSH.numel(), bias_H.numel(), block=BLOCK)
    return out


def rms_norm(x_BSD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dim; x: [..., d] row-major, weight: [d] -> [..., d]."""
    out = torch.empty_like(x_BSD)
    width = weight_D.numel()
    _rms_norm[(x_BSD.numel() // width,)](x_BSD, weight_D, out, width, eps, block=triton.next_power_of_2(width))
    return out
