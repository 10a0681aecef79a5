"""The PCG as the emitted program says it: operators that a sentence of two says better, and axis names that fit Python.

reduce_replicate(x, a) == replicate(reduce(x, a), a), so that whoever else wants the sum shares it; a value that several
readers would each lay out in rows is laid out once; functions are said by one call where torch has it; an axis whose
name the program needs for itself gets an underscore; a buffer that is overwritten is read through one stored tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ir.builder import Builder
from ir.graph import Graph, Node
from ir.mesh import JOINT, Axis, Mesh
from ir.ops import OPERATORS
from ir.ops.parallel import move
from ir.sharding import Invariant, State
from pdv.emit.analysis.reserved import GLOBALS, MODULE
from pdv.emit.analysis.row_major import laid_in_rows
from pdv.frontend.program import BATCH
from pdv.passes.tied_views import whole_buffers
from pdv.pcg.over_time import TIME

_SAYING = [(op, op.says) for op in OPERATORS.values() if op.says is not None]


def lower(pcg: Graph, mesh: Mesh, sizes: Iterable[str] = ()) -> tuple[Graph, Mesh, Mapping[Node, Node]]:
    """An equal PCG and its mesh, ready to be written, and what nodes became where no buffer is overwritten.

    ``sizes`` are names of open ones, which no axis may have.
    """
    taken = GLOBALS | MODULE | {BATCH, *sizes, *(variable(span) for span in mesh.spans if JOINT in span)}
    taken -= {TIME}
    renamed = {axis.name: f"{axis.name}_" if axis.name in taken else axis.name for axis in mesh.axes}
    builder = Builder()
    in_rows, laid_out = laid_in_rows(pcg), dict[Node, Node]()

    def make(node: Node, operands: tuple[Node, ...]) -> Node:
        read = tuple(laid_out.get(operand, operand) for operand in operands)
        made = _in_one_call(builder, _lower_all(builder, node, read, renamed))
        if node in in_rows:
            laid_out[made] = builder.apply(OPERATORS["row_major"], (made,), {})
        return made

    graph, made = builder.rebuild(pcg, make)
    return whole_buffers(graph), Mesh(tuple(Axis(renamed[axis.name], axis.size) for axis in mesh.axes)), made


def variable(axis: str) -> str:
    """What the program calls an axis, or a joint one: ``dp_tp``."""
    return axis.replace(JOINT, "_")


def _in_one_call(builder: Builder, node: Node) -> Node:
    """The same value, by a function that torch has, in a third of the time; the node itself if there is none."""
    for op, says in _SAYING:
        if (said := says(node)) is not None:
            return builder.apply(op, *said, node.name)
    return node


def _lower_all(builder: Builder, node: Node, operands: tuple[Node, ...], renamed: Mapping[str, str]) -> Node:
    if node.op.kind != "parallel":
        return builder.copy(node, operands)
    axis = JOINT.join(renamed[name] for name in node.attr("axis").split(JOINT))
    if node.op.emit:
        return builder.apply(node.op, operands, {**node.attrs, "axis": axis}, node.name)
    before, after = node.op.transition.states(node.attrs)
    invariant = _move(builder, operands[0], before, Invariant(), axis)
    return _move(builder, invariant, Invariant(), after, axis)


def _move(builder: Builder, x: Node, before: State, after: State, axis: str) -> Node:
    """x in another state along an axis, by one operator."""
    found = move(before, after)
    assert found is not None, (before, after)
    name, dims = found
    return builder.apply(OPERATORS[name], (x,), {**dims, "axis": axis})
