"""Graph, Node: immutable programs. A node has one result, so a node is also the value it gives.

Leaves are nodes too: ``input`` (what the caller passes), ``param`` (a trained weight or a buffer, a view of a stored
tensor) and ``const`` (a known array). Structure is hashed bottom-up; names of inner nodes are hints and not hashed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from ir.dims import Loops
from ir.operator import Leaf, Operator
from ir.types import DType, TensorType


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A known array, equal by content; bfloat16 constants are kept as float32."""

    array: np.ndarray[Any, Any]
    digest: str

    @classmethod
    def of(cls, array: np.ndarray[Any, Any]) -> Constant:
        """Wrap (and freeze) an array."""
        frozen = np.ascontiguousarray(array).reshape(array.shape)
        frozen.flags.writeable = False
        head = f"{frozen.dtype.str}{frozen.shape}".encode()
        return cls(frozen, hashlib.sha256(head + frozen.tobytes()).hexdigest()[:32])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return f"#{self.digest}"


ViewStep = tuple[Any, ...]
"""("permute", perm) | ("chunk", dim, parts, index) | ("slice", dim, start, stop, extent) | ("reshape", shape), or, as
the first step alone, ("concat", dim, ((source, view, shape of the view), ...)): several stored tensors, read as one.
"""
View = tuple[ViewStep, ...]
"""How a parameter reads its stored tensor, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operator applied to operands. Equal nodes of one builder are the same object.

    ``loops`` has global extents. ``name`` is a hint for the emitted program, not part of the structure. ``signature``
    is equal for nodes of the same operator, attributes and types, whatever their operands are.
    """

    op: Operator
    operands: tuple[Node, ...]
    attrs: Mapping[str, Hashable]
    type: TensorType
    loops: Loops
    digest: str
    needs_grad: bool
    name: str = ""
    signature: str = ""

    def __repr__(self) -> str:
        return f"<{self.op.name} {self.name or self.digest[:8]}: {self.type}>"

    def attr(self, name: str) -> Any:  # Any: attribute types differ by operator
        """Value of one attribute."""
        return self.attrs[name]

    @property
    def wanted(self) -> tuple[bool, ...]:
        """Which operands a gradient goes to."""
        differentiates = self.op.differentiates
        return tuple([operand.needs_grad and differentiates(i) for i, operand in enumerate(self.operands)])

    @property
    def is_leaf(self) -> bool:
        """True for inputs, parameters and constants."""
        return self.op.kind == "leaf"

    @property
    def is_input(self) -> bool:
        """True for what the caller passes."""
        return self.op.leaf is Leaf.INPUT

    @property
    def is_param(self) -> bool:
        """True for parameters and buffers."""
        return self.op.leaf is Leaf.PARAM

    @property
    def is_const(self) -> bool:
        """True for known arrays."""
        return self.op.leaf is Leaf.CONST


def node_text(op: Operator, attrs: Mapping[str, Hashable], tensor: TensorType) -> str:
    """What a node's digest says of it beside its operands."""
    return "|".join([op.name, str(tensor), *(f"{key}={value!s}" for key, value in attrs.items())])


def node_digest(text: str, operands: Sequence[Node]) -> str:
    """Structural hash of a node."""
    text = text + "(" + ",".join([operand.digest for operand in operands]) + ")"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Graph:
    """A program: what the caller passes, what it returns, and which buffers it overwrites.

    Attributes:
        inputs: in the order of the call.
        outputs: (name, node), in the order returned.
        updates: (buffer name, its new value), e.g. running statistics of batch normalisation.
    """

    inputs: tuple[Node, ...]
    outputs: tuple[tuple[str, Node], ...]
    updates: tuple[tuple[str, Node], ...] = ()
    name: str = field(default="model", compare=False)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Every node reachable from inputs, outputs and updates, operands first, in a deterministic order."""
        order: dict[Node, None] = dict.fromkeys(self.inputs)
        for root in self.roots:
            stack: list[tuple[Node, Iterator[Node]]] = [(root, iter(root.operands))] if root not in order else []
            open_nodes = {root}
            while stack:
                node, operands = stack[-1]
                following = next((x for x in operands if x not in order and x not in open_nodes), None)
                if following is None:
                    stack.pop()
                    order[node] = None
                else:
                    open_nodes.add(following)
                    stack.append((following, iter(following.operands)))
        return tuple(order)

    @property
    def draws(self) -> int:
        """How many of its nodes draw at random."""
        return sum(node.op.draws for node in self.nodes)

    @cached_property
    def fixed(self) -> frozenset[Node]:
        """Parameters, constants, and what is made of them alone: what no input changes."""
        found: set[Node] = set()
        for node in self.nodes:
            if not node.is_input and all(operand in found for operand in node.operands):
                found.add(node)
        return frozenset(found)

    @property
    def roots(self) -> tuple[Node, ...]:
        """Outputs, then updates."""
        return tuple(node for _, node in (*self.outputs, *self.updates))

    @cached_property
    def users(self) -> Mapping[Node, tuple[Node, ...]]:
        """For each node, the nodes that read it, in order (once per operand position)."""
        users: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for operand in node.operands:
                users[operand].append(node)
        return MappingProxyType({node: tuple(readers) for node, readers in users.items()})

    @cached_property
    def params(self) -> tuple[Node, ...]:
        """Parameters and buffers, in order of first use."""
        return tuple(node for node in self.nodes if node.is_param)

    @cached_property
    def digest(self) -> str:
        """Structural hash of the whole program; names of inputs, parameters and outputs count, others do not."""
        lines = [f"{name}:{node.digest}" for name, node in (*self.outputs, *self.updates)]
        lines += [node.digest for node in self.inputs]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def is_column(param: Node) -> bool:
    """True for a bias of channels: a stored vector read as [c, 1, 1], kept as the vector."""
    shape = param.type.shape
    return len(shape) == 3 and shape[1:] == (1, 1) and tuple(param.attr("view")) == (("reshape", shape),)


def unmoved(node: Node) -> Node:
    """The value at the root of a chain of parallel operators."""
    while node.op.kind == "parallel":
        node = node.operands[0]
    return node


def bottlenecks(nodes: Sequence[Node], users: Mapping[Node, Sequence[Node]]) -> list[int]:
    """Places in ``nodes`` (operands first) of values that are read on, and on which alone all behind them depends.

    Only ``nodes`` count as readers and as values. These are the post-dominators at which Unity splits (OSDI'22,
    section 6.2).
    """
    place = {node: at for at, node in enumerate(nodes)}
    last = [max((place.get(user, -1) for user in users[node]), default=-1) for node in nodes]
    found: list[int] = []
    reach = -1  # the last place where anything made before is read
    for at, end in enumerate(last):
        if reach <= at < end:
            found.append(at)
        reach = max(reach, end)
    return found


def param_view(node: Node) -> View:
    """The view of a parameter node."""
    assert node.is_param, node
    return cast(View, node.attr("view"))


def dtype_of_array(array: np.ndarray[Any, Any]) -> DType:
    """The element type of a NumPy array.

    Raises:
        KeyError: if the IR has no such type.
    """
    return DType.from_name(array.dtype.name)
