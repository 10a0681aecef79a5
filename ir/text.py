"""Printer and parser of graphs, exact inverses: the format of every golden file.

    graph 'mlp'
    %0 = input(name='x') : f32[4,8]
    %1 = param(name='w', source='w', view=(), trainable=True, stored='I,S0') : f32[16,8]
    %2 = linear(%0, %1, name='up') : f32[4,16]  # I,S1
    output 'y' = %2

One line a node, attributes as Python literals, states of a PCG as a comment. Constants of up to 16 elements are
written out; larger ones by digest, and go beside the text (``constants``).
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ir.builder import Builder
from ir.errors import ModelError, ShapeError
from ir.graph import Constant, Graph, Node
from ir.operator import Leaf
from ir.ops import OPERATORS
from ir.sharding import Sharding, format_sharding
from ir.types import DType, TensorType

INLINE = 16
_LINE = re.compile(
    r"%(?P<number>\d+) = (?P<op>\w+)\((?P<operands>(?:%\d+(?:, )?)*)(?P<attrs>.*)\)"
    r" : (?P<dtype>\w+)\[(?P<shape>[\d,]*)\](?:  # [SIRP\d,]*)?"
)
_HEAD = re.compile(r"graph (?P<name>.+)")
_ROOT = re.compile(r"(?P<kind>output|update) (?P<name>.+) = %(?P<number>\d+)")


def print_graph(graph: Graph, shardings: Mapping[Node, Sharding] | None = None) -> str:
    """The text of a graph, with the states of its nodes as comments if ``shardings`` are given."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    lines = [f"graph {graph.name!r}"]
    for node, number in numbers.items():
        comment = f"  # {format_sharding(shardings[node])}" if shardings is not None else ""
        operands = [f"%{numbers[operand]}" for operand in node.operands]
        attrs = [f"{name}={value!r}" for name, value in _attrs(node).items()]
        lines.append(f"%{number} = {node.op.name}({', '.join(operands + attrs)}) : {node.type}{comment}")
    for kind, roots in (("output", graph.outputs), ("update", graph.updates)):
        lines += [f"{kind} {name!r} = %{numbers[node]}" for name, node in roots]
    return "\n".join(lines) + "\n"


def constants(graph: Graph) -> dict[str, np.ndarray[Any, Any]]:
    """Digest -> array of the constants that are too large for the text."""
    found = [node.attr("value") for node in graph.nodes if node.is_const]
    return {constant.digest: constant.array for constant in found if constant.array.size > INLINE}


def parse_graph(text: str, known: Mapping[str, np.ndarray[Any, Any]] | None = None) -> Graph:
    """The graph that ``text`` says: ``parse_graph(print_graph(g), constants(g)).digest == g.digest``.

    Raises:
        ModelError: naming the line that is malformed, says another type than its operator gives, or lacks a constant.
    """
    k = Builder()
    nodes: dict[int, Node] = {}
    roots: dict[str, dict[str, Node]] = {"output": {}, "update": {}}
    name = "model"
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if match := _LINE.fullmatch(line):
                nodes[int(match["number"])] = _node(k, match, nodes, known or {})
            elif match := _ROOT.fullmatch(line):
                roots[match["kind"]][ast.literal_eval(match["name"])] = nodes[int(match["number"])]
            elif match := _HEAD.fullmatch(line):
                name = ast.literal_eval(match["name"])
            elif line:
                raise ValueError("no graph has such a line")
        except (ValueError, SyntaxError, LookupError, TypeError, AssertionError, ShapeError) as error:
            raise ModelError(f"line {number} of a graph's text is malformed: {line[:200]!r} ({error})") from error
    return k.graph(roots["output"], roots["update"], name)


def _attrs(node: Node) -> dict[str, Any]:
    attrs = dict(node.attrs)
    if node.is_const:
        del attrs["value"]
        array = node.attr("value").array
        attrs["digest"] = node.attr("value").digest
        if array.size <= INLINE:
            attrs = {"array": array.dtype.name, "data": array.reshape(-1).tolist()}
    if node.name and "name" not in attrs:
        attrs["name"] = node.name
    return attrs


def _node(k: Builder, match: re.Match[str], nodes: Mapping[int, Node], known: Mapping[str, Any]) -> Node:
    shape = tuple(int(size) for size in match["shape"].split(",") if size)
    tensor = TensorType(shape, DType(match["dtype"]))
    attrs = _read_attrs(match["attrs"])
    operands = tuple(nodes[int(number)] for number in re.findall(r"\d+", match["operands"]))
    op = OPERATORS[match["op"]]
    if op.leaf is Leaf.INPUT:
        node = k.input(attrs["name"], tensor)
    elif op.leaf is Leaf.PARAM:
        node = k.param(attrs.pop("name"), tensor, **attrs)
    elif op.leaf is Leaf.CONST:
        given = known[attrs["digest"]] if "digest" in attrs else np.array(attrs["data"], dtype=attrs["array"])
        node = k.const(Constant.of(given.reshape(shape)).array, attrs.get("name", ""), tensor.dtype)
    else:
        node = k.apply(op, operands, attrs, attrs.pop("name", ""))
    if node.type != tensor:
        raise ValueError(f"{op.name} gives {node.type}")
    return node


def _read_attrs(text: str) -> dict[str, Any]:
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call), text
    return {str(keyword.arg): _read(keyword.value) for keyword in call.keywords}


def _read(value: ast.expr) -> Any:  # Any: whatever literal was written
    match value:
        case ast.Name(id=("inf" | "nan") as name):
            return math.inf if name == "inf" else math.nan
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_read(operand)
        case ast.Tuple(elts=elements):
            return tuple(_read(element) for element in elements)
        case ast.List(elts=elements):
            return [_read(element) for element in elements]
    return ast.literal_eval(value)
