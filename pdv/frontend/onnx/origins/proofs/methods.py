"""How a module's method turns what it is given, as the file says of another call of it.

Values that are all equal do not tell in which order they lie. A line of source that gives a parameter to a method, as
in ``x + self.transpose_for_scores(self.q_bias)``, does, if the file has the operators of that method where another line
of the same class calls it. Entry point: ``turned_by_method``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

import onnx_ir

from pdv.frontend.onnx.origins.doubts import module_path
from pdv.frontend.onnx.origins.readers import class_of, line_of
from pdv.frontend.onnx.origins.signature import call_of

_TURNING = {"permute", "transpose", "t", "T", "mT", "swapaxes", "movedim"}


def turned_by_method(graph: onnx_ir.Graph, leaf: str, readers: Iterable[onnx_ir.Node]) -> tuple[int, ...] | None:
    """In which order the method that ``self.leaf`` is given to puts the dims; None where that is not told as one.

    readers: the nodes that read what comes of it.
    """
    readers = list(readers)
    methods = {_method_with(leaf, line_of(node)) for node in readers}
    classes = {class_of(node) for node in readers}
    method = methods.pop() if len(methods) == len(classes) == 1 else None
    if method is None:
        return None
    turns: dict[tuple[str, str], list[str]] = {}
    for node in graph:
        call, given = call_of(node)
        line = line_of(node)
        if call in _TURNING and class_of(node) in classes and _calls_alone(method, line):
            turns.setdefault((module_path(node), line), []).append(given[1] if call == "permute" else "")
    orders = {tuple(each) for each in turns.values()}
    (order, *others) = [*(orders.pop() if len(orders) == 1 else ()), ""]
    if others != [""]:
        return None
    return tuple(int(each) for each in order.strip("[]").split(",")) if re.fullmatch(r"\[[0-9, ]+\]", order) else None


def _method_with(leaf: str, line: str) -> str | None:
    """The method of ``self`` that a line gives ``self.leaf`` alone, or parts of it."""
    found = [call for call in _own_calls(line) if _is_of(call, leaf)]
    reads = [node for node in _walk(line) if isinstance(node, ast.Attribute) and node.attr == leaf]
    return found[0].func.attr if len(found) == len(reads) == 1 and isinstance(found[0].func, ast.Attribute) else None


def _is_of(call: ast.Call, leaf: str) -> bool:
    if len(call.args) != 1 or call.keywords:
        return False
    node = call.args[0]
    while isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, ast.Attribute) and node.attr == leaf and _is_self(node.value)


def _calls_alone(method: str, line: str) -> bool:
    """Whether a line calls a method once, no other of ``self``, and turns nothing by itself."""
    own = [call.func.attr for call in _own_calls(line) if isinstance(call.func, ast.Attribute)]
    names = {node.attr for node in _walk(line) if isinstance(node, ast.Attribute)}
    return own == [method] and not names & _TURNING


def _own_calls(line: str) -> list[ast.Call]:
    """Calls of methods of ``self``."""
    calls = [node for node in _walk(line) if isinstance(node, ast.Call)]
    return [each for each in calls if isinstance(each.func, ast.Attribute) and _is_self(each.func.value)]


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _walk(line: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(line)))
    except (SyntaxError, ValueError):
        return []
