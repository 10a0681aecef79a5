"""An ir operator under local loops, as the kernels that run it.

Decides which column of a profile each size is. An operator that profiles know nothing of is described by its loop nest.
The gradient of a contraction is contractions again, so measured products answer for training too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from ir.cost_model import Query, Work, backward_work, forward_work
from ir.dims import Loops, Shape
from ir.operator import Attrs, Operator
from ir.types import DType, TensorType
from learned_cost.data.kernel import Kernel
from learned_cost.kernels.products import ACTIVATION_BYTES, WEIGHT_BYTES

RESULT_BYTES = 2.0  # of products in narrow formats: bfloat16
DTYPES = {DType.F64: "fp64", DType.F32: "fp32", DType.BF16: "bf16", DType.F16: "fp16", DType.I8: "int8"}


def forward_kernels(
    op: Operator, loops: Loops, operands: Sequence[TensorType], result: TensorType, attrs: Attrs
) -> tuple[Kernel, ...]:
    """What running ``op`` forward starts; ``loops`` are local. Views start nothing."""
    work = forward_work(op, loops, operands, result)
    if work.kernels == 0:
        return ()
    return (_kernel(op, loops, result, attrs, work, "forward"),)


def backward_kernels(
    op: Operator,
    loops: Loops,
    operands: Sequence[TensorType],
    result: TensorType,
    attrs: Attrs,
    wanted: Sequence[bool],
) -> tuple[Kernel, ...]:
    """What its backward starts; ``wanted[i]`` says whether operand ``i`` needs a gradient."""
    work = backward_work(op, loops, operands, result, wanted)
    if work.kernels == 0:
        return ()
    if op.kind == "contraction" and len(operands) == 2 and op.backward_factor is None:
        m, n, k, b = _product(loops)
        share = Work(work.flops / work.kernels, work.bytes_moved / work.kernels, 1)
        sizes = (m, k, n), (n, k, m) if is_transposed(loops) else (k, n, m)  # of x: dy w over n; of w: over m
        return tuple(_matmul(b, size, result.dtype, share) for size, want in zip(sizes, wanted, strict=True) if want)
    return (_kernel(op, loops, result, attrs, _eager_backward(op, loops, operands, wanted, work), "backward"),)


def kernels_of(queries: Iterable[Query]) -> list[Kernel]:
    """What a cost model is asked about, as kernels that do something, each once, in order."""
    found: dict[tuple[object, ...], Kernel] = {}
    for op, loops, operands, result, attrs, wanted, _ in queries:
        backward = () if wanted is None else backward_kernels(op, loops, operands, result, attrs, wanted)
        for kernel in (*forward_kernels(op, loops, operands, result, attrs), *backward):
            if kernel.bytes > 0:
                found.setdefault(kernel.key, kernel)
    return list(found.values())


def _eager_backward(
    op: Operator, loops: Loops, operands: Sequence[TensorType], wanted: Sequence[bool], work: Work
) -> Work:
    """What eager PyTorch does of a backward: it hands gradients on without touching them where it can, as a view or as
    they are, and writes an embedding's gradient whole, rows that nobody looked up too.
    """
    sizes = [loops.size_of(dims) for dims in loops.operands]
    whole = loops.size_of(loops.result)
    alike = all(size == whole for size, want in zip(sizes, wanted, strict=True) if want)
    if op.hands_on_gradient and (alike or not op.broadcasts):
        return Work(0.0, 0.0, 1)
    if op.looks_up_rows:
        return Work(work.flops, work.bytes_moved + sizes[0] * operands[0].dtype.itemsize, work.kernels)
    return work


def in_format(kernel: Kernel, number: str) -> Kernel:
    """A product whose factors are in a narrower format; its result is as wide as before."""
    m, n, k, b = (kernel.dims[name] for name in ("m", "n", "k", "b"))
    size = float(b) * (m * k * ACTIVATION_BYTES[number] + n * k * WEIGHT_BYTES[number] + m * n * RESULT_BYTES)
    return replace(kernel, dtype=number, bytes=size)


def _kernel(op: Operator, loops: Loops, result: TensorType, attrs: Attrs, work: Work, direction: str) -> Kernel:
    if op.kind == "contraction" and len(loops.operands) == 2:
        m, n, k, b = _product(loops)
        return _matmul(b, (m, n, k), result.dtype, work, direction)
    name, dims = _sizes(op, loops, attrs)
    dtype = DTYPES.get(result.dtype, "fp32")
    return Kernel(name, op.kind, dtype, dims, _extents(op, loops), work.flops, work.bytes_moved, direction)


def _matmul(b: int, size: tuple[int, int, int], dtype: DType, work: Work, direction: str = "forward") -> Kernel:
    """C[b, m, n] = A[b, m, k] · B[b, k, n]; one product is called linear."""
    m, n, k = size
    name = "linear" if b == 1 else "bmm"
    dims = {"b": b, "m": m, "n": n, "k": k}
    extents = (b * m * n, k, 1, 1)
    return Kernel(
        name, "contraction", DTYPES.get(dtype, "fp32"), dims, extents, work.flops, work.bytes_moved, direction
    )


def _product(loops: Loops) -> tuple[int, int, int, int]:
    """(m, n, k, b) of a product of two operands: loops of both and of the result are batch."""
    first, second = ({loop for group in dims for loop in group} for dims in loops.operands)
    out = {loop for group in loops.result for loop in group}
    extents = loops.extents

    def size(names: set[str]) -> int:
        return math.prod(extents[name] for name in names)

    return (
        size((first & out) - second),
        size((second & out) - first),
        size((first & second) - out),
        size(first & second & out),
    )


def _extents(op: Operator, loops: Loops) -> tuple[int, int, int, int]:
    contracted, out = set(loops.contracted), {loop for group in loops.result for loop in group}
    sizes = {"parallel": 1, "contracted": 1, "whole": 1, "stencil": 1}
    for name in loops.names:
        role = "parallel"
        if name in loops.whole:
            role = "stencil" if op.kind == "stencil" else "whole"
        elif name in contracted or name not in out:
            role = "contracted"
        sizes[role] *= loops.extents[name]
    return sizes["parallel"], sizes["contracted"], sizes["whole"], sizes["stencil"]


def is_transposed(loops: Loops) -> bool:
    """Whether the second operand of a product is [n, k], as weights are, and not [k, n]."""
    return not any(loops.holds(loops.result, loop) for loop in loops.operands[1][-1])


def measured_names(op: Operator) -> tuple[str, ...]:
    """What profiles call the kernels of an operator."""
    name = op.measured_as or op.name
    return tuple(f"{name}_{part}" for part in ("full", "prefill")) if op.has_scores else (name,)


def _sizes(op: Operator, loops: Loops, attrs: Attrs) -> tuple[str, Mapping[str, int]]:
    """What profiles call a kernel, and its sizes as their columns have them."""
    names = measured_names(op)
    if op.has_scores:
        return names[attrs["causal"] is True], _attention(loops)
    if op.kind == "stencil" and len(loops.operands) == 2:
        return names[0], _convolution(loops, attrs)
    read = loops.operands[: 0 if op.looks_up_rows else 1]
    return names[0], _rows(max((loops.shape_of(dims) for dims in (*read, loops.result)), key=math.prod))


def _rows(shape: Shape) -> Mapping[str, int]:
    """m rows of n elements."""
    n = shape[-1] if shape else 1
    return {"m": max(1, math.prod(shape) // max(n, 1)), "n": n}


def _attention(loops: Loops) -> Mapping[str, int]:
    """q: [..., heads, s, e], k: [..., heads, t, e]."""
    *lead, s, e = loops.shape_of(loops.operands[0])
    t = loops.shape_of(loops.operands[1])[-2]
    heads = lead[-1] if lead else 1
    dims = {"b": math.prod(lead[:-1]), "seq_q": s, "seq_kv": t, "heads": heads, "kv_heads": heads, "head_dim": e}
    return {**dims, "window": 0}


def _convolution(loops: Loops, attrs: Attrs) -> Mapping[str, int]:
    """x: [n, c, h, w], weight: [o, c / groups, kh, kw]; square sizes, the geometric mean where they are not."""
    b, c_in, height, width = loops.shape_of(loops.operands[0])
    c_out, _, kernel_h, kernel_w = loops.shape_of(loops.operands[1])
    stride = cast(tuple[Any, ...], attrs["stride"])[0]  # Any: attributes are hashables
    padding = cast(tuple[Any, ...], attrs["padding"])[0]
    return {
        "b": b,
        "c_in": c_in,
        "c_out": c_out,
        "ksize": max(1, round(math.sqrt(kernel_h * kernel_w))),
        "img": max(1, round(math.sqrt(height * width))),
        "stride": int(stride),
        "pad": int(padding),
    }
