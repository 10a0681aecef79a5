"""A product with its epilogue in one kernel: act(x wᵀ + bias). Accumulates in float32, without TF32.

`TRITON_INTERPRET=1`, set before this file is imported, runs it on a CPU; bfloat16 products are wrong there.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

Activation = Literal["none", "relu", "gelu"]
# of a tile; the accumulator takes 32 registers of each of 128 threads, which every GPU has
ROWS, COLUMNS, DEPTH = tl.constexpr(64), tl.constexpr(64), tl.constexpr(32)


@triton.jit  # type: ignore[untyped-decorator]
def _linear(x, w, bias, out, m, n, k, act: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, k, DEPTH):
        at = start + inner
        left = tl.load(x + row[:, None] * k + at[None, :], mask=(row[:, None] < m) & (at[None, :] < k), other=0.0)
        reach = (column[None, :] < n) & (at[:, None] < k)
        right = tl.load(w + column[None, :] * k + at[:, None], mask=reach, other=0.0)
        total += tl.dot(left, right, input_precision="ieee")
    total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    if act == "relu":
        total = tl.maximum(total, 0.0)
    if act == "gelu":  # tanh approximation, as in bias_gelu
        total = total * tl.sigmoid(1.5957691216057308 * (total + 0.044715 * total * total * total))
    inside = (row[:, None] < m) & (column[None, :] < n)
    tl.store(out + row[:, None] * n + column[None, :], total.to(out.dtype.element_ty), mask=inside)


def linear_act(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor, activation: Activation) -> Tensor:
    """act(x wᵀ + bias); x: [m, k], w: [n, k], bias: [n], row-major -> [m, n]."""
    m, k = x_MK.shape
    n = w_NK.shape[0]
    out = torch.empty((m, n), dtype=x_MK.dtype, device=x_MK.device)
    grid = (triton.cdiv(m, ROWS.value), triton.cdiv(n, COLUMNS.value))
    _linear[grid](x_MK, w_NK, bias_N, out, m, n, k, act=activation)
    return out
