"""What each node of a PCG is to a simulation: equal nodes are one `Entry`, which is inferred and priced once.

Entry point: ``Nodes``.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from ir.graph import Graph, Node
from ir.operator import Split, backward_work
from ir.ops.parallel import TRANSITIONS
from ir.sharding import Sharding, invariant, local_bytes, parse_sharding
from ir.verify import node_local_loops, node_splits
from pdv.problem import Problem
from pdv.simulate.setup import Execution

Role = Literal["leaf", "local", "move", "parameter", "sum", "nothing"]
"""Leaves and what is at hand; local work; a move of an activation; of a resting parameter; the gradient sum of a whole
one that is due once a step; a move of what is whole everywhere, which costs nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """Equal nodes.

    Attributes:
        node: one of them.
        axis: of a move, the mesh axis's number; -1: no move.
        form: a number for its type and states, by which readers of equal values are equal.
        bytes: that a device holds of the result.
        held: that a device holds of what is moved.
        backward: whether it has a gradient to work for.
        regathers: whether a parameter is gathered again in backward (ZeRO-3).
        kernels: launches forward and backward.
        two_products: whether backward is two products, one for each operand.
    """

    number: int
    node: Node
    role: Role
    sharding: Sharding
    form: int
    splits: tuple[Split, ...] = ()
    axis: int = -1
    bytes: float = 0.0
    held: float = 0.0
    backward: bool = False
    regathers: bool = False
    kernels: tuple[int, int] = (0, 0)
    two_products: bool = False

    @property
    def name(self) -> str:
        """The operator."""
        return self.node.op.name


class Nodes:
    """The entries of a PCG's nodes on the mesh of one stage; states are inferred on the way.

    Raises:
        ShardingError: if the graph is no PCG of the mesh.
    """

    def __init__(self, problem: Problem, pcg: Graph, execution: Execution) -> None:
        self.problem, self.pcg = problem, pcg
        self._data = frozenset(execution.data_axes)
        self._known: dict[Hashable, Entry] = {}
        self._forms: dict[Hashable, int] = {}
        self.entries: list[Entry] = []
        self.of: dict[Node, Entry] = {}
        self.base: dict[Node, Node] = {}
        for node in pcg.nodes:
            self.base[node] = self.base[node.operands[0]] if node.op.kind == "parallel" else node
            self.of[node] = self._entry(node)

    def _entry(self, node: Node) -> Entry:
        key = self._key(node)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._made(node, len(self.entries))
            self.entries.append(found)
        return found

    def _key(self, node: Node) -> Hashable:
        attrs = tuple(node.attrs.values())
        if node.is_leaf:
            stored = (node.attr("stored"), node.attr("regather")) if node.op.name == "param" else ()
            return node.op.name, node.type, node.needs_grad, stored
        if not self.problem.train and node.op.kind != "parallel":
            return node  # what is computed from weights alone costs nothing: a question of more than operands
        operands = tuple([self.of[operand].form for operand in node.operands])
        if node.op.kind == "parallel":
            base = self.base[node]
            return node.op.name, attrs, operands, node.needs_grad, base.is_leaf and self.of[base].number
        return node.op.name, attrs, operands, node.type, node.needs_grad

    def _made(self, node: Node, number: int) -> Entry:
        mesh, operands = self.problem.mesh, [self.of[operand] for operand in node.operands]
        backward = self.problem.train and node.needs_grad
        if node.is_leaf:
            stored = parse_sharding(node.attr("stored")) if node.op.name == "param" else ()
            sharding = stored or invariant(mesh)
            held = float(local_bytes(node.type, sharding, mesh))
            return Entry(number, node, "leaf", sharding, self._form(node, sharding), bytes=held)
        if node.op.kind == "parallel":
            return self._move(node, number, operands[0], backward=backward)
        splits = node_splits(node, [operand.sharding for operand in operands], mesh)
        sharding = tuple(split.result for split in splits)
        wanted = self._wanted(node) if backward else ()
        loops = node_local_loops(node, splits, mesh)
        types = [operand.type for operand in node.operands]
        kernels = backward_work(node.op, loops, types, node.type, wanted).kernels if backward else 0
        return Entry(
            number, node, "local", sharding, self._form(node, sharding), splits,
            bytes=float(local_bytes(node.type, sharding, mesh)),
            backward=backward, kernels=(int(node.op.kernel), kernels),
            two_products=node.op.kind == "contraction" and sum(wanted) == 2,
        )  # fmt: skip

    def _form(self, node: Node, sharding: Sharding) -> int:
        return self._forms.setdefault((node.type, sharding, node.needs_grad), len(self._forms))

    def _wanted(self, node: Node) -> tuple[bool, ...]:
        indices = range(len(node.operands)) if node.op.differentiable is None else node.op.differentiable
        return tuple(i in indices and operand.needs_grad for i, operand in enumerate(node.operands))

    def _move(self, node: Node, number: int, operand: Entry, *, backward: bool) -> Entry:
        mesh, base = self.problem.mesh, self.base[node]
        axis = mesh.index(node.attr("axis"))
        after = TRANSITIONS[node.op.name](node.attrs)[1]
        sharding = (*operand.sharding[:axis], after, *operand.sharding[axis + 1 :])
        role: Role = "move"
        if base.is_leaf and not base.needs_grad:
            role = "nothing"  # whole on every device: any slice of it is at hand
        elif base.op.name == "param":
            once = node.op.name == "replicate" and node.attr("axis") in self._data
            role = "sum" if once and backward else "parameter"
        return Entry(
            number, node, role, sharding, self._form(node, sharding), axis=axis,
            bytes=float(local_bytes(node.type, sharding, mesh)),
            held=float(local_bytes(node.operands[0].type, operand.sharding, mesh)),
            backward=backward,
            regathers=role == "parameter" and backward and bool(base.attr("regather")),
        )  # fmt: skip
