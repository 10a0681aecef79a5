"""What an operator is called in reports: the parameter that it reads, without the number of its layer."""

from __future__ import annotations

import re

from ir.graph import Graph, Node, unmoved

NUMBER = re.compile(r"\.\d+(?=\.)")


def layer_names(graph: Graph) -> dict[Node, str]:
    """`h.*.attn.c_attn` of each operator that reads a parameter, through whatever moves it."""
    found: dict[Node, str] = {}
    for node in graph.nodes:
        if node.is_leaf or node.op.kind == "parallel":
            continue
        for operand in node.operands:
            base = unmoved(operand)
            if base.is_param:
                found[node] = NUMBER.sub(".*", str(base.attr("name"))).removesuffix(".weight")
                break
    return found
