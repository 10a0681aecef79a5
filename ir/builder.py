"""Builder: the one way to make a graph. Calling ``k.linear(x, w)`` appends a node, or returns the equal one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ir.dims import Loops
from ir.errors import ShapeError
from ir.graph import Constant, Graph, Node, View, dtype_of_array, node_digest, node_text
from ir.operator import Operator
from ir.ops import OPERATORS
from ir.types import DType, TensorType


class _Application(NamedTuple):
    """An operator applied to operands of some types: what equal layers ask for again and again.

    ``text`` is what the digests of such nodes begin with; ``signature`` tells operands' types too.
    """

    attrs: Mapping[str, Hashable]
    loops: Loops
    result: TensorType
    text: str
    signature: str


def _apply(
    op: Operator, types: tuple[TensorType, ...], attrs: tuple[tuple[str, Hashable], ...], name: str
) -> _Application:
    """The operator over operands of these types.

    Raises:
        ShapeError: if the operands do not fit.
    """
    try:
        return _apply_once(op, types, attrs)
    except ShapeError:
        op.solve(f"{op.name} {name}".strip(), types, op.check_attrs(dict(attrs)))  # the same error, with this name
        raise


@lru_cache(maxsize=1 << 14)
def _apply_once(op: Operator, types: tuple[TensorType, ...], given: tuple[tuple[str, Hashable], ...]) -> _Application:
    attrs = op.check_attrs(dict(given))
    loops = op.solve(op.name, types, attrs)
    result = op.result_type(loops, types, attrs)
    text = node_text(op, attrs, result)
    return _Application(attrs, loops, result, text, f"{text} of {', '.join(map(str, types))}")


class Builder:
    """Appends nodes by calling operators by name; equal calls give the same node.

    Example:
        >>> k = Builder()
        >>> x = k.input("x", TensorType((4, 8), DType.F32))
        >>> y = k.linear(x, k.param("w", TensorType((16, 8), DType.F32)))
        >>> y.type.shape
        (4, 16)
    """

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._inputs: list[Node] = []

    def __getattr__(self, name: str) -> Callable[..., Node]:
        if name not in OPERATORS:
            raise AttributeError(f"no operator is called {name!r}")
        op = OPERATORS[name]

        def call(*operands: Node, name: str = "", **attrs: Hashable) -> Node:
            return self.apply(op, operands, attrs, name)

        return call

    def apply(self, op: Operator, operands: tuple[Node, ...], attrs: Mapping[str, Hashable], name: str = "") -> Node:
        """Append ``op`` over ``operands``.

        Raises:
            ShapeError: if the operands do not fit the operator's loops.
        """
        made = _apply(op, tuple(operand.type for operand in operands), tuple(attrs.items()), name)
        needed = (operand.needs_grad and op.differentiates(i) for i, operand in enumerate(operands))
        needs_grad = made.result.dtype.is_floating and any(needed)
        return self._intern(op, operands, made, needs_grad, name)

    def input(self, name: str, tensor: TensorType) -> Node:
        """A tensor the caller passes; inputs keep the order in which they are made."""
        node = self._leaf("input", {"name": name}, tensor, needs_grad=False, name=name)
        if node not in self._inputs:
            self._inputs.append(node)
        return node

    def param(
        self,
        name: str,
        tensor: TensorType,
        *,
        source: str | None = None,
        view: View = (),
        trainable: bool = True,
        stored: str = "",
        regather: bool = False,
    ) -> Node:
        """A weight (or, not trainable, a buffer): ``view`` of the stored tensor ``source``.

        ``stored`` is its sharding in a PCG (``format_sharding``); empty means Invariant on every axis. ``regather``
        says that gathered copies of it are dropped after forward and gathered again in backward (ZeRO-3).
        """
        attrs = {
            "name": name,
            "source": source or name,
            "view": view,
            "trainable": trainable,
            "stored": stored,
            "regather": regather,
        }
        return self._leaf("param", attrs, tensor, needs_grad=trainable and tensor.dtype.is_floating, name=name)

    def const(self, array: np.ndarray[Any, Any], name: str = "", dtype: DType | None = None) -> Node:
        """A known array."""
        tensor = TensorType(tuple(array.shape), dtype or dtype_of_array(array))
        return self._leaf("const", {"value": Constant.of(array)}, tensor, needs_grad=False, name=name)

    def graph(
        self, outputs: Mapping[str, Node], updates: Mapping[str, Node] | None = None, name: str = "model"
    ) -> Graph:
        """The finished program."""
        return Graph(tuple(self._inputs), tuple(outputs.items()), tuple((updates or {}).items()), name)

    def copy(self, node: Node, operands: tuple[Node, ...]) -> Node:
        """``node`` of another graph over new operands, attributes and name kept."""
        if node.is_input:
            return self.input(node.attr("name"), node.type)
        if node.is_leaf:
            return self._leaf(node.op.name, dict(node.attrs), node.type, node.needs_grad, node.name)
        return self.apply(node.op, operands, dict(node.attrs), node.name)

    def rebuild(self, graph: Graph, make: Callable[[Node, tuple[Node, ...]], Node]) -> tuple[Graph, dict[Node, Node]]:
        """The program of the nodes that ``make(node, new operands)`` gives, operands first; and what each became."""
        made: dict[Node, Node] = {}
        for node in graph.nodes:
            made[node] = make(node, tuple(made[operand] for operand in node.operands))
        outputs, updates = ({name: made[node] for name, node in named} for named in (graph.outputs, graph.updates))
        return self.graph(outputs, updates, graph.name), made

    def _leaf(self, op: str, attrs: Mapping[str, Hashable], tensor: TensorType, needs_grad: bool, name: str) -> Node:
        names = tuple((f"d{i}",) for i in range(tensor.rank))
        loops = Loops((), names, {group[0]: size for group, size in zip(names, tensor.shape, strict=True)}, frozenset())
        text = node_text(OPERATORS[op], attrs, tensor)
        return self._intern(OPERATORS[op], (), _Application(attrs, loops, tensor, text, text), needs_grad, name)

    def _intern(
        self, op: Operator, operands: tuple[Node, ...], made: _Application, needs_grad: bool, name: str
    ) -> Node:
        digest = node_digest(made.text, operands)
        if digest not in self._nodes:
            self._nodes[digest] = Node(
                op, operands, made.attrs, made.result, made.loops, digest, needs_grad, name, made.signature
            )
        return self._nodes[digest]
