"""Operator graphs of a folder (opgraphs.parquet, nodes as FX prints them) as kernels, to predict whole models.

Decides which node runs a kernel, and which one. Views, sizes and dropout at inference run none; a node that does
something unknown over a whole tensor is an element-wise kernel of its own name.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ir.errors import DataError
from learned_cost.data.kernel import Kernel
from learned_cost.data.table import Table

Shape = tuple[int, ...]

BYTES: Mapping[str, tuple[str, int]] = {
    "torch.float32": ("fp32", 4), "torch.float16": ("fp16", 2), "torch.bfloat16": ("bf16", 2),
    "torch.int64": ("fp32", 8), "torch.bool": ("fp32", 1),
}  # fmt: skip
# last part of a target -> operator of the profiles, and the same with a scalar for a second operand
ELEMENTWISE: Mapping[str, tuple[str, str]] = {
    "add": ("add", "add_scalar"), "sub": ("add", "add_scalar"), "mul": ("mul", "mul_scalar"),
    "truediv": ("div", "div_scalar"), "pow": ("pow", "pow_scalar"), "tanh": ("tanh", "tanh"), "gelu": ("gelu", "gelu"),
    "relu": ("relu", "relu"), "activation": ("tanh", "tanh"), "activation_fn": ("relu", "relu"),
}  # fmt: skip
NOTHING = frozenset({
    "size", "getitem", "getattr", "dim", "view", "reshape", "expand", "transpose", "permute", "split", "unsqueeze",
    "to", "type", "type_as", "bool", "long", "full", "ones", "arange", "tensor", "finfo", "output", "placeholder",
    "get_attr", "eq", "ne", "lt", "gt",
})  # fmt: skip
PRODUCTS = frozenset({"matmul", "bmm"})
ROWS: Mapping[str, tuple[str, float]] = {"softmax": ("softmax", 5.0)}  # and FLOPs of an element; norms have many names
LEAST = 2  # elements of a result below which a node is bookkeeping


def graph_kernels(table: Table) -> dict[str, list[Kernel]]:
    """The kernels of each graph, in order; all forward.

    Raises:
        DataError: if a shape cannot be read, naming its row.
    """
    graphs: dict[str, list[Kernel]] = {}
    columns = {name: table.text(name) for name in ("graph", "op", "target", "input_shapes", "output_shape", "dtype")}
    for row in range(len(table)):
        cell = {name: values[row] for name, values in columns.items()}
        kernels = graphs.setdefault(str(cell["graph"]), [])
        try:
            kernel = _kernel(cell)
        except (ValueError, TypeError, SyntaxError, IndexError, MemoryError, RecursionError) as error:
            what = f"opgraphs: the shapes of row {row} cannot be read ({' '.join(str(error).split())[:120]})"
            raise DataError(what, "Lists of whole numbers, as [[16, 512], [512, 512]]", "Correct the row") from error
        if kernel is not None:
            kernels.append(kernel)
    return graphs


def _kernel(cell: Mapping[str, Any]) -> Kernel | None:  # Any: text or None
    name = _name(str(cell["target"]), str(cell["op"]))
    if cell["op"] in NOTHING or name in NOTHING or "drop" in name:
        return None
    result = _shape(ast.literal_eval(cell["output_shape"] or "()"))
    operands = [_shape(shape) for shape in ast.literal_eval(cell["input_shapes"] or "[]")]
    if math.prod(result) < LEAST or not operands:
        return None
    dtype, width = BYTES.get(cell["dtype"] or "", ("fp32", 4))
    moved = float(width * (math.prod(result) + sum(math.prod(shape) for shape in operands)))
    if name in PRODUCTS and len(operands) == 2 and min(map(len, operands)) >= 2:
        *lead, m, k = operands[0]
        return _product(math.prod(lead), m, result[-1], k, dtype, width)
    if name == "addmm" and len(operands) == 3:
        (m, k), n = operands[1], result[-1]
        return _product(1, m, n, k, dtype, width)
    sizes = {"m": math.prod(result[:-1]), "n": result[-1]}
    elements = float(math.prod(result))
    if "embed" in name or name in {"wte", "wpe"}:
        return Kernel("embedding", "index", dtype, sizes, (int(elements), 1, 1, 1), 0.0, 2.0 * width * elements)
    if name in ROWS or "norm" in name.lower() or re.fullmatch(r"ln_\w+", name):
        op, flops = ROWS.get(name, ("layernorm", 8.0))
        return Kernel(op, "row", dtype, sizes, (sizes["m"], 1, sizes["n"], 1), flops * elements, 2.0 * width * elements)
    if cell["op"] == "call_module" and name not in ELEMENTWISE:
        k = operands[0][-1]
        return _product(1, math.prod(operands[0][:-1]), result[-1], k, dtype, width)
    both = len(operands) > 1 and math.prod(operands[1]) > 1
    op = ELEMENTWISE.get(name, (name, name))[0 if both else 1]
    return Kernel(op, "map", dtype, sizes, (int(elements), 1, 1, 1), elements, moved)


def _product(b: int, m: int, n: int, k: int, dtype: str, width: int) -> Kernel:
    moved = float(width * b * (m * k + k * n + m * n))
    dims = {"b": b, "m": m, "n": n, "k": k}
    op = "linear" if b == 1 else "bmm"
    return Kernel(op, "contraction", dtype, dims, (b * m * n, k, 1, 1), 2.0 * b * m * n * k, moved)


def _name(target: str, op: str) -> str:
    """`<built-in method matmul of type object>` is matmul, `h.0.mlp.c_fc` c_fc."""
    found = re.fullmatch(r"<(?:built-in )?(?:function|method|class) '?([\w.]+?)'?(?: of type object)?>", target)
    return (found[1] if found else target).rsplit(".", 1)[-1] if op != "output" else "output"


def _shape(sizes: Sequence[Any]) -> Shape:  # Any: what a literal holds
    return tuple(int(size) for size in sizes)
