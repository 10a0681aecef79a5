"""What a node of a PCG is to a simulation: equal nodes are one `Entry`, which is inferred and priced once.

Entry points: ``Entries``, a table that grows by what it is asked for, and ``Nodes``, those of a PCG.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ir.cost_model import backward_work
from ir.dims import Loops
from ir.graph import Graph, Node
from ir.memory.kept import light_values
from ir.operator import Attrs, Split
from ir.ops.parallel import transition_of
from ir.sharding import Sharding, invariant, local_bytes, parse_sharding, with_states
from ir.verify import node_local_loops, node_splits
from pdv.pcg.calls import is_within_product, issued, parameters_read
from pdv.pcg.norms import is_within_norm
from pdv.pcg.units import moves_units
from pdv.problem import Problem
from pdv.problem.formats import EMITTED_CALLS
from pdv.problem.workload import Execution

Role = Literal["leaf", "local", "move", "parameter", "once", "sum", "nothing"]
"""Leaves and what is at hand; local work; a move of an activation; of a resting parameter, for each use or once a step;
the gradient sum of a whole one that is due once a step; a move of what is whole everywhere, which costs nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """Equal nodes.

    Attributes:
        name: the operator.
        node: of local work one of them, of a move one of the values that are moved, of a leaf itself.
        form: a number for its type and states, by which readers of equal values are equal.
        axis: of a move, the number of its axis among the mesh's spans; -1: no move.
        bytes: that a device holds of the result.
        held: that a device holds of what is moved.
        backward: whether it has a gradient to work for.
        regathers: whether a parameter is gathered again in backward (ZeRO-3).
        kernels: of the device, forward and backward.
        issued: by the host: kernels of frameworks, calls of emitted programs; read: trained parameters of the latter.
        two_products: whether backward is two products, one for each operand.
        dims: of a move, the dims along which its pieces are put together, forward and backward.
    """

    number: int
    name: str
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
    issued: tuple[int, int] = (0, 0)
    read: int = 0
    two_products: bool = False
    dims: tuple[int, int] = (0, 0)


class Entries:
    """The entries of nodes on the mesh of one stage."""

    def __init__(self, problem: Problem, execution: Execution) -> None:
        self.problem = problem
        self.all: list[Entry] = []
        self._data = frozenset(execution.data_axes)
        self._eager, self._several = execution.eager, execution.several
        self._known: dict[Hashable, Entry] = {}
        self._forms: dict[Hashable, int] = {}

    def leaf(self, node: Node, stored: str = "", *, regather: bool = False) -> Entry:
        """An input, a constant, or a parameter that rests as ``stored``, gathered copies of it kept or not."""
        key = (node.op.name, node.type, node.needs_grad, stored, regather)
        if key not in self._known:
            mesh = self.problem.mesh
            sharding = parse_sharding(stored) or invariant(mesh)
            held = float(local_bytes(node.type, sharding, mesh))
            self._add(
                key,
                Entry(
                    len(self.all),
                    node.op.name,
                    node,
                    "leaf",
                    sharding,
                    self._form(node, sharding),
                    bytes=held,
                    regathers=regather,
                ),
            )
        return self._known[key]

    def local(self, node: Node, operands: Sequence[Entry]) -> Entry:
        """An operator over operands in the states of ``operands``.

        Raises:
            ShardingError: if it has no split for them.
        """
        key: Hashable = (
            node.op.name,
            tuple(node.attrs.values()),
            tuple([operand.form for operand in operands]),
            node.type,
            node.needs_grad,
            is_within_product(node) or is_within_norm(node),
        )
        if not self.problem.train:
            key = node  # what is computed from weights alone costs nothing: a question of more than operands
        found = self._known.get(key)
        return self._add(key, self._local(node, operands)) if found is None else found

    def _local(self, node: Node, operands: Sequence[Entry]) -> Entry:
        mesh, backward = self.problem.mesh, self.problem.train and node.needs_grad
        splits = node_splits(node, [operand.sharding for operand in operands], mesh)
        sharding = tuple(split.result for split in splits)
        loops = node_local_loops(node, splits, mesh)
        types = [operand.type for operand in node.operands]
        kernels = backward_work(node.op, loops, types, node.type, node.wanted).kernels if backward else 0
        return Entry(
            len(self.all),
            node.op.name,
            node,
            "local",
            sharding,
            self._form(node, sharding),
            splits,
            bytes=float(local_bytes(node.type, sharding, mesh)),
            backward=backward,
            kernels=(int(node.op.kernel), kernels),
            issued=self._issued(node, loops, kernels),
            read=parameters_read(node) if self._eager else 0,
            two_products=backward and node.op.kind == "contraction" and sum(node.wanted) == 2,
        )

    def _issued(self, node: Node, loops: Loops, behind: int) -> tuple[int, int]:
        if not self._eager:
            return int(node.op.kernel), behind
        products = self.problem.products
        if products is not None and behind and products.takes(node.op, [operand.type for operand in node.operands]):
            return EMITTED_CALLS[products.format.name]
        return issued(node, loops, behind)

    def move(self, name: str, attrs: Attrs, value: Node, before: Entry, base: Entry | None) -> Entry:
        """A parallel operator on ``value`` (or on a moved copy of it) in the states of ``before``.

        ``base`` is the leaf whose copies are moved, if it is one.
        """
        key = (name, tuple(attrs.values()), before.form, None if base is None else base.number)
        found = self._known.get(key)
        return self._add(key, self._move(name, attrs, value, before, base)) if found is None else found

    def _move(self, name: str, attrs: Attrs, value: Node, before: Entry, base: Entry | None) -> Entry:
        mesh, backward = self.problem.mesh, self.problem.train and value.needs_grad
        axis_name = str(attrs["axis"])
        axis = mesh.spans.index(axis_name)
        transition = transition_of(name)
        sharding = with_states(before.sharding, mesh.positions(axis_name), transition.states(attrs)[1])
        role: Role = "move"
        if base is not None and not base.node.needs_grad:
            role = "nothing"  # whole on every device: any slice of it is at hand
        elif base is not None and transition.only_names and self._is_in_time(axis_name):
            role = "nothing"
        elif base is not None:
            kept = self._several and before is base and backward and not base.regathers
            is_sum = transition.only_names and axis_name in self._data and backward
            role = "sum" if is_sum else "once" if kept and moves_units(transition, axis_name) else "parameter"
        return Entry(
            len(self.all),
            name,
            value,
            role,
            sharding,
            self._form(value, sharding),
            axis=axis,
            bytes=float(local_bytes(value.type, sharding, mesh)),
            held=before.bytes,
            backward=backward,
            regathers=role == "parameter" and backward and base is not None and base.regathers,
            dims=transition.joined_dims(attrs),
        )

    def _is_in_time(self, axis: str) -> bool:
        """Whether the ranks of an axis are one device's passes, behind one another."""
        return self.problem.link(axis).size < self.problem.mesh.size(axis)

    def _add(self, key: Hashable, entry: Entry) -> Entry:
        self._known[key] = entry
        self.all.append(entry)
        return entry

    def _form(self, node: Node, sharding: Sharding) -> int:
        return self._forms.setdefault((node.type, sharding, node.needs_grad), len(self._forms))


class Nodes:
    """What each node of a PCG is; states are inferred on the way.

    Raises:
        ShardingError: if the graph is no PCG of the problem's mesh.
    """

    def __init__(self, problem: Problem, pcg: Graph, execution: Execution) -> None:
        self.problem, self.pcg = problem, pcg
        self.entries = Entries(problem, execution)
        self.of: dict[Node, Entry] = {}
        self.base: dict[Node, Node] = {}  # the value at the root of a chain of parallel operators
        for node in pcg.nodes:
            self.base[node] = self.base[node.operands[0]] if node.op.kind == "parallel" else node
            self.of[node] = self._entry(node)

    @cached_property
    def light(self) -> Collection[Node]:
        """Nodes whose values are cheap to make again in backward, which reads them."""
        return light_values(self.pcg) if self.problem.train else ()

    def _entry(self, node: Node) -> Entry:
        if node.is_param:
            return self.entries.leaf(node, node.attr("stored"), regather=node.attr("regather"))
        if node.is_leaf:
            return self.entries.leaf(node)
        operands = [self.of[operand] for operand in node.operands]
        if node.op.kind != "parallel":
            return self.entries.local(node, operands)
        base = self.of[self.base[node]]
        return self.entries.move(
            node.op.name, node.attrs, node.operands[0], operands[0], base if base.role == "leaf" else None
        )
