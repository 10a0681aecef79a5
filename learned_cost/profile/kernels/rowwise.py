"""Fused row functions: bias_gelu, add_norm (layer or RMS), masked_softmax.

They compute in float32 whatever the operands are, and read and write each element once. `TRITON_INTERPRET=1`, set
before this file is imported, runs them on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements a program of bias_gelu handles: four for each of 256 threads


@triton.jit  # type: ignore[untyped-decorator]
def _bias_gelu(x, bias, out, size, width, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < size
    value = tl.load(x + at, mask=inside).to(tl.float32) + tl.load(bias + at % width, mask=inside).to(tl.float32)
    # 0.5 (1 + tanh(u)) == sigmoid(2 u), u = sqrt(2 / pi) (v + 0.044715 v^3): Hendrycks and Gimpel 2016, section 2
    gate = tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    tl.store(out + at, (value * gate).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(x, other, weight, bias, total, out, width, eps, centred: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    column = tl.arange(0, block)
    inside = column < width
    at = tl.program_id(0) * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)
    if centred:
        mean = tl.sum(value, axis=0) / width
        value = tl.where(inside, value - mean, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
    scaled = value * inverse * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if centred:
        scaled += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _masked_softmax(x, mask, out, width, rows, scale, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    row = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32) * scale
    value += tl.load(mask + (row % rows) * width + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(inside, value, float("-inf"))
    power = tl.exp(value - tl.max(value, axis=0))
    share = power / tl.sum(power, axis=0)
    tl.store(out + row * width + column, share.to(out.dtype.element_ty), mask=inside)


def bias_gelu(x_BSH: Tensor, bias_H: Tensor) -> Tensor:
    """gelu(x + bias), tanh approximation; x: [..., h] row-major, bias: [h] -> [..., h]."""
    out = torch.empty_like(x_BSH)
    _bias_gelu[(triton.cdiv(x_BSH.numel(), BLOCK),)](x_BSH, bias_H, out, x_BSH.numel(), bias_H.numel(), block=BLOCK)
    return out


def add_norm(
    x_BSD: Tensor, other_BSD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """s = x + other, and layer_norm(s) (with a bias) or rms_norm(s) (without); all [..., d] -> (s, norm of s)."""
    total, out = torch.empty_like(x_BSD), torch.empty_like(x_BSD)
    width = weight_D.numel()
    _add_norm[(x_BSD.numel() // width,)](
        x_BSD,
        other_BSD,
        weight_D,
        weight_D if bias_D is None else bias_D,
        total,
        out,
        width,
        eps,
        centred=bias_D is not None,
        block=triton.next_power_of_2(width),
    )
    return total, out


def masked_softmax(x_BST: Tensor, mask_ST: Tensor, scale: float) -> Tensor:
    """softmax(scale · x + mask) over the last dim; x: [..., s, t], mask: [s, t] (0 or -inf) -> [..., s, t]."""
    out = torch.empty_like(x_BST)
    rows, width = mask_ST.shape
    _masked_softmax[(x_BST.numel() // width,)](
        x_BST, mask_ST, out, width, rows, scale, block=triton.next_power_of_2(width)
    )
    return out
