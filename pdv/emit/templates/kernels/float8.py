"""Products in float8: the factors of ``F.linear``, and of both products of its backward, are cast before they multiply.

Scales are dynamic: found anew for each cast from the largest magnitude, as powers of two, so that scaling rounds
nothing and only the cast does. Results, sums and everything else stay in bfloat16; in other types nothing is cast.

    float8_linear_by_rows  a scale for each row or column along which a product sums; all in e4m3 (torchao's "rowwise")
    float8_linear          a scale for each tensor; factors in e4m3, gradients in e5m2 (torchao's "tensorwise"). Ranks
                           that hold parts of the same rows use one scale, by an all-reduce of the largest magnitudes

Where a device has no such kernel, casts are multiplied in float32: the same factors, other speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.functional import ScalingType

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-12  # of a magnitude; torchao's
ALIGNED = 16  # elements of a row that tensor cores read
# A largest magnitude of at most 1.75 x 2^e is scaled by 2^(m - e) to at most 1.75 x 2^m, the most that either float8
# has; one above that by half as much.
MOST = {E4M3: 8, E5M2: 15}
BITS = {4: (torch.int32, 23), 8: (torch.int64, 52)}  # by bytes of a float: an integer as wide, digits of the fraction


class Axis(Protocol):
    """What is read of an axis of the mesh."""

    @property
    def size(self) -> int:
        """How many ranks it has."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Through which they talk."""


class Cast(NamedTuple):
    """A matrix over what it was scaled by: ``values * inverse`` is what was cast; inverse: [], [m, 1] or [1, n]."""

    values: Tensor
    inverse: Tensor


def float8_linear_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, scaled by rows; of a row that is cut, each rank's part by itself.

    x: [..., k], weight: [n, k] -> [..., n]
    """
    return _linear(x, weight, bias, rows=True)


def float8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, inner: Sequence[Axis] = (), outer: Sequence[Axis] = ()
) -> Tensor:
    """``F.linear``, scaled by tensors; inner, outer: axes that cut k, and n.

    x: [..., k], weight: [n, k] -> [..., n]
    """
    return _linear(x, weight, bias, inner, outer, rows=False)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inner: Sequence[Axis] = (),
    outer: Sequence[Axis] = (),
    *,
    rows: bool,
) -> Tensor:
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return F.linear(x, weight, bias)
    kernel = all(has_kernel(x.device, dtype, E4M3, rows) for dtype in ((E4M3,) if rows else (E4M3, E5M2)))
    how = kernel, rows, inner, outer
    y: Tensor = _Product.apply(x.reshape(-1, x.size(-1)), weight, *how)  # type: ignore[no-untyped-call]
    y = y.reshape(*x.shape[:-1], weight.size(0))
    return y if bias is None else y + bias


class _Product(torch.autograd.Function):
    """x wᵀ, and its gradients: x [m, k], weight [n, k] -> [m, n]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, kernel: bool, rows: bool, inner: Sequence[Axis], outer: Sequence[Axis]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = kernel, rows, inner, outer
        dim = 1 if rows else None
        return multiply(cast(x, E4M3, dim, inner), transpose(cast(weight, E4M3, dim, (*inner, *outer))), kernel)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        kernel, rows, inner, outer = ctx.how
        first, second = (1, 0) if rows else (None, None)
        by_rows = cast(grad, E4M3 if rows else E5M2, first, outer)
        by_columns = cast(grad, E4M3, second) if rows else by_rows
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = multiply(by_rows, cast(weight, E4M3, second, (*inner, *outer)), kernel)
        if ctx.needs_input_grad[1]:
            of_weight = multiply(transpose(by_columns), cast(x, E4M3, second, inner), kernel)
        return of_x, of_weight, None, None, None, None


def cast(x: Tensor, dtype: torch.dtype, dim: int | None = None, axes: Sequence[Axis] = ()) -> Cast:
    """x [m, n] in ``dtype``, by one scale, or by one for all elements along ``dim``.

    axes: that cut the tensor, over which its largest magnitude is looked for where it has one scale.
    """
    largest = torch.linalg.vector_norm(x, torch.inf, dim, keepdim=dim is not None, dtype=torch.float32)
    for axis in axes if dim is None else ():
        if axis.size > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=axis.group)
    # a power of two is its exponent: arithmetic with integers takes the fewest calls, of which a host issues hundreds
    kind, digits = BITS[largest.element_size()]
    bits = largest.clamp_(min=LEAST).view(kind).add_((1 << digits - 2) - 1).bitwise_and_(-1 << digits)
    inverse = bits.sub_(MOST[dtype] << digits).view(largest.dtype)
    scale = inverse.reciprocal()
    return Cast((x * (scale if dim is None else scale.to(x.dtype))).to(dtype), inverse)  # a number has no type


def transpose(x: Cast) -> Cast:
    """[m, n] -> [n, m]."""
    return Cast(x.values.t(), x.inverse.t() if x.inverse.dim() else x.inverse)


def multiply(left: Cast, right: Cast, kernel: bool) -> Tensor:
    """Their product in bfloat16, by a kernel for such factors if there is one: [m, k], [k, n] -> [m, n]."""
    rows = left.inverse.dim() > 0
    aligned = left.values.is_cpu or not (left.values.size(1) % ALIGNED or right.values.size(1) % ALIGNED)
    if aligned and kernel:
        return _scaled_mm(left, right, rows)
    product = (left.values.float() * left.inverse) @ (right.values.float() * right.inverse)
    return product.bfloat16()


def _scaled_mm(left: Cast, right: Cast, rows: bool) -> Tensor:
    """As the kernels take them: the first row-major, the second by columns."""
    recipe = ScalingType.RowWise if rows else ScalingType.TensorWise
    values = left.values.contiguous(), right.values.t().contiguous().t()
    scales = left.inverse, right.inverse
    if rows:  # strides of dims of size one count
        scales = left.inverse.flatten().unsqueeze(1), right.inverse.flatten().unsqueeze(0)
    return F.scaled_mm(values[0], values[1], scales[0], recipe, scales[1], recipe, output_dtype=torch.bfloat16)


_tried: dict[tuple[torch.device, torch.dtype, torch.dtype, bool], bool] = {}


def has_kernel(device: torch.device, left: torch.dtype, right: torch.dtype, rows: bool) -> bool:
    """Whether a device multiplies such factors; it is tried once, before a program is compiled or as it is."""
    key = device, left, right, rows
    if key not in _tried:
        _tried[key] = _try(*key)
    return _tried[key]


def _try(device: torch.device, left: torch.dtype, right: torch.dtype, rows: bool) -> bool:
    inverse = torch.ones((ALIGNED, 1) if rows else (), device=device)
    values = torch.zeros((ALIGNED, ALIGNED), device=device)
    try:
        _scaled_mm(Cast(values.to(left), inverse), transpose(Cast(values.to(right), inverse)), rows)
    except (RuntimeError, ValueError):  # NotImplementedError is one
        return False
    return True
