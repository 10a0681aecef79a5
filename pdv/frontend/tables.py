"""Constants that follow from a size that the source leaves open, as parts of longer ones.

Positions, angles and masks are computed from the length of the inputs, and are constants once that is a number. The
source is read at a greater length, too: where the shorter constant is the leading part of the longer one, the longer
one becomes the constant, of which the program takes as much as its inputs are long. That no other length needs
anything else is seen by reading the source at further sizes (``pdv/sizes.py``). Entry point: ``with_tables``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ir.builder import Builder
from ir.dims import Shape
from ir.errors import PdvError
from ir.graph import Graph, Node
from pdv.frontend.program import BATCH, Array, OpenSize, Program

BROKEN = (PdvError, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a model's own code raises at a size that it does not know."""
LONGER = 16  # times the planned size: how far tables reach where nothing bounds them
MOST_BYTES = 64 << 20  # of one table


@dataclass(frozen=True)
class _Table:
    """A constant for all sizes, and the dims of which a program takes the leading part."""

    value: Array
    dims: tuple[int, ...]


Tables = Sequence[_Table | None]
"""For each constant of a program, in order, the table that it is a part of, if it is."""


def with_tables(program: Program) -> Program:
    """The program with tables in place of the constants that follow from its open sizes, where it has such."""
    if program.again is None or not set(program.sizes) - {BATCH}:
        return program
    planned = {name: _size(program.graph, one) for name, one in program.sizes.items() if name != BATCH}
    tries = _to_try(program, planned)
    for sizes in tries:
        other = _read(program, sizes)
        if other is None:
            continue
        is_longer = any(sizes[name] > planned[name] for name in planned)
        tables = _tables(other, program.graph) if is_longer else _tables(program.graph, other)
        if tables is None or not any(tables):
            return program
        if sizes is tries[-1] or max(table.value.nbytes for table in tables if table) <= MOST_BYTES:
            return program.map(partial(_rewritten, tables=tables))
    return program


def resized_inputs(graph: Graph, sizes: Mapping[str, OpenSize], wanted: Mapping[str, int]) -> dict[str, Shape]:
    """Shapes of the inputs, by name, where open sizes are the ones wanted."""
    shapes = {node.attr("name"): list(node.type.shape) for node in graph.inputs}
    for name, size in wanted.items():
        for node, dim in sizes[name].places:
            shapes[node][dim] = size
    return {name: tuple(shape) for name, shape in shapes.items()}


def _size(graph: Graph, one: OpenSize) -> int:
    where, dim = one.places[0]
    return next(int(node.type.shape[dim]) for node in graph.inputs if node.attr("name") == where)


def _to_try(program: Program, planned: Mapping[str, int]) -> list[dict[str, int]]:
    """Sizes at which tables are as long as anybody needs; then shorter ones, and at last less than is planned."""
    positions = [node for node in program.graph.nodes if _is_position(node)]
    rows = min((_rows(x) for x in positions if set(planned.values()) & set(x.operands[1].type.shape)), default=None)
    farthest: dict[str, int] = {}
    for name, size in planned.items():
        bounds = [bound for bound in (program.sizes[name].most, rows) if bound is not None]
        farthest[name] = max(min(bounds, default=LONGER * size), size)
    twice = {name: min(2 * size, farthest[name]) for name, size in planned.items()}
    less = {name: max(size // 2, 1) for name, size in planned.items()}
    return [sizes for sizes in (farthest, twice) if sizes != planned] + [less]


def _is_position(node: Node) -> bool:
    """Whether a node reads rows of a table by known numbers."""
    return node.op.looks_up_rows and node.operands[1].is_const


def _rows(node: Node) -> int:
    return int(node.operands[0].type.shape[0])


def _read(program: Program, sizes: Mapping[str, int]) -> Graph | None:
    """The program at other sizes, where it can be read and its tables have all rows that it takes."""
    assert program.again is not None
    try:
        found = program.again(resized_inputs(program.graph, program.sizes, sizes))
    except BROKEN:
        return None
    known = [node for node in found.nodes if _is_position(node)]
    inside = all(int(node.operands[1].attr("value").array.max()) < _rows(node) for node in known)
    return found if inside else None


def _constants(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.is_const]


def _tables(longer: Graph, shorter: Graph) -> Tables | None:
    """What the constants of the shorter program are parts of; None if that cannot be said."""
    pairs = list(zip(_constants(longer), _constants(shorter), strict=False))
    if not len(_constants(longer)) == len(_constants(shorter)) == len(pairs):
        return None
    found: list[_Table | None] = []
    for one, other in pairs:
        if one.type == other.type:
            found.append(None)
            continue
        pairs_of_sizes = enumerate(zip(one.type.shape, other.type.shape, strict=False))
        table = _Table(one.attr("value").array, tuple(dim for dim, (n, m) in pairs_of_sizes if n != m))
        if not _is_part(other, table):
            return None
        found.append(table)
    return found


def _is_part(node: Node, table: _Table) -> bool:
    """Whether a constant is the leading part of a table."""
    shape = node.type.shape
    if len(shape) != table.value.ndim or any(n > m for n, m in zip(shape, table.value.shape, strict=True)):
        return False
    value = node.attr("value").array
    return value.dtype == table.value.dtype and np.array_equal(table.value[tuple(map(slice, shape))], value)


def _rewritten(graph: Graph, tables: Tables) -> Graph:
    """The program with parts of tables for the constants that are such parts."""
    constants = _constants(graph)
    if len(constants) != len(tables):
        return graph
    of = {node: table for node, table in zip(constants, tables, strict=True) if table and _is_part(node, table)}
    k = Builder()

    def make(node: Node, operands: tuple[Node, ...]) -> Node:
        if node not in of:
            return k.copy(node, operands)
        part = k.const(of[node].value, node.name, node.type.dtype)
        for dim in of[node].dims:
            part = k.slice(part, dim=dim, start=0, stop=node.type.shape[dim], name=node.name)
        return part

    return k.rebuild(graph, make)[0]
