"""How much of a program's arithmetic is in operators that nobody declared. Entry point: ``opaque_work``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ir.cost_model import forward_work

if TYPE_CHECKING:
    from ir.graph import Graph, Node

_PRODUCTS = ("grouped_mm", "einsum", "linear", "tensordot", "convolution", "conv_transpose")
"""Names of products that torch's counter of operations does not know."""


def opaque_work(graph: Graph) -> tuple[dict[str, float], list[str]]:
    """The share of all operations, by opaque operator; and which of them are contractions."""
    whole, opaque, products = 0.0, Counter[str](), set[str]()
    for node in graph.nodes:
        if node.is_leaf:
            continue
        operands = [operand.type for operand in node.operands]
        flops = forward_work(node.op, node.loops, operands, node.type).flops
        if node.op.is_foreign:
            name = str(node.attr("function")).removeprefix("torch.ops.")
            counted = _counted(node)
            if counted or any(part in name for part in _PRODUCTS):
                products.add(name)
            flops = max(flops, counted)
            opaque[name] += flops
        whole += flops
    return {name: flops / whole for name, flops in opaque.items()}, sorted(products)


def _counted(node: Node) -> float:
    """What torch counts of products inside a function."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from ir.ops.opaque import Foreign
    from pdv.frontend.torch.opaque import call_torch

    names = [x.type.dtype.torch_name if not x.type.dtype.is_floating else "float64" for x in node.operands]
    foreign = Foreign(str(node.attr("function")), str(node.attr("arguments")), int(node.attr("output")), tuple(names))
    arrays = [
        torch.ones(x.type.shape, dtype=getattr(torch, name)).numpy()
        for x, name in zip(node.operands, names, strict=True)
    ]
    with FlopCounterMode(display=False) as counter:
        try:
            call_torch(foreign, arrays, [False] * len(arrays))
        except Exception:  # noqa: BLE001  # ones need not be in its domain
            return 0.0
    return float(counter.get_total_flops())
