"""Which states a parallel computation graph's values are in, or why it is not one.

Decides: legality of every node on every axis. An illegal graph is refused with node, axis, expected and found.
Entry points: ``infer_shardings``, ``check_outputs``, and of whole programs ``check_returned``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from ir.dims import Loops
from ir.errors import ShardingError
from ir.graph import Graph, Node
from ir.mesh import Axis, Mesh
from ir.operator import Split, local_loops
from ir.sharding import (
    Invariant,
    Shard,
    Sharding,
    State,
    fits,
    format_sharding,
    inner_states,
    invariant,
    parse_sharding,
    with_states,
)


@lru_cache(maxsize=8)  # of a plan that is looked at, each part of a price asks
def infer_shardings(graph: Graph, mesh: Mesh) -> Mapping[Node, Sharding]:
    """The sharding of every node's result.

    Raises:
        ShardingError: at the first node whose operands are in states that it has no split for, or that is cut unevenly.
    """
    shardings: dict[Node, Sharding] = {}
    known: dict[tuple[str, tuple[Sharding, ...]], Sharding] = {}  # equal layers are the same question
    for node in graph.nodes:
        asked = node.signature, tuple(shardings[operand] for operand in node.operands)
        if asked not in known:
            known[asked] = _infer_that_fits(node, asked[1], mesh)
        shardings[node] = known[asked]
    return MappingProxyType(shardings)


def check_outputs(graph: Graph, shardings: Mapping[Node, Sharding]) -> None:
    """Outputs must be Invariant or Shard on every axis, buffers' new values Invariant: what leaves a program is whole.

    Raises:
        ShardingError: naming the output and its states.
    """
    for name, node in graph.outputs:
        if not all(isinstance(state, Invariant | Shard) for state in shardings[node]):
            raise ShardingError(
                f"output {name} is left as {format_sharding(shardings[node])}",
                "Outputs are S<dim> or I on every axis",
                "Reduce a Partial, or drop the replicate",
            )
    for name, node in graph.updates:
        if not all(isinstance(state, Invariant) for state in shardings[node]):
            raise ShardingError(f"buffer {name} would be overwritten as {format_sharding(shardings[node])}", "I only")


def check_returned(graph: Graph, shardings: Mapping[Node, Sharding]) -> None:
    """What a whole program returns: as ``check_outputs``, and all outputs whole, or cut by rows along the same axes.

    A loss outside the graph then sees, on each rank, the same rows of every output, and of the targets.

    Raises:
        ShardingError: naming the output and its states.
    """
    check_outputs(graph, shardings)
    first = graph.outputs[0] if graph.outputs else None
    for name, node in graph.outputs:
        states = shardings[node]
        if not all(state in (Invariant(), Shard(0)) for state in states):
            raise ShardingError(
                f"output {name} is returned as {format_sharding(states)}",
                "Outputs are S0 or I on every axis",
                "Combine the others",
            )
        if first is not None and states != shardings[first[1]]:
            raise ShardingError(
                f"output {name} is returned as {format_sharding(states)}, "
                f"output {first[0]} as {format_sharding(shardings[first[1]])}",
                "All outputs are cut by rows along the same axes",
                "Combine, or partition, one as the other",
            )


def node_splits(node: Node, operands: Sequence[Sharding], mesh: Mesh) -> tuple[Split, ...]:
    """The split that each axis takes at ``node``, given its operands' shardings.

    Raises:
        ShardingError: if an axis has none.
    """
    options = node.op.splits(node.loops)
    chosen = []
    for position, axis in enumerate(mesh.axes):
        found = tuple(sharding[position] for sharding in operands)
        split = next((option for option in options if option.operands == found), None)
        if split is None:
            raise _no_split(node, axis, found, options)
        chosen.append(split)
    return tuple(chosen)


def split_degrees(splits: Sequence[Split], mesh: Mesh) -> dict[str, int]:
    """How many ways each loop is cut."""
    degrees: dict[str, int] = {}
    for split, axis in zip(splits, mesh.axes, strict=True):
        if split.loop is not None:
            degrees[split.loop] = degrees.get(split.loop, 1) * axis.size
    return degrees


def node_local_loops(node: Node, splits: Sequence[Split], mesh: Mesh) -> Loops:
    """The node's loop nest on one device."""
    return local_loops(node.loops, split_degrees(splits, mesh))


def divides(loops: Loops, splits: Sequence[Split], mesh: Mesh) -> bool:
    """True if every loop's extent is a multiple of the ways it is cut."""
    return all(loops.extents[loop] % degree == 0 for loop, degree in split_degrees(splits, mesh).items())


def _infer_that_fits(node: Node, operands: Sequence[Sharding], mesh: Mesh) -> Sharding:
    sharding = _infer(node, operands, mesh)
    if not fits(node.type, sharding, mesh):
        raise ShardingError(
            f"{describe(node)} of shape {list(node.type.shape)} does not divide as {format_sharding(sharding)}",
            f"The mesh is {mesh}",
            "Cut another dim, or pad this one",
        )
    return sharding


def _infer(node: Node, operands: Sequence[Sharding], mesh: Mesh) -> Sharding:
    if node.is_param:
        return parse_sharding(node.attr("stored")) or invariant(mesh)
    if node.is_leaf:
        return invariant(mesh)
    if node.op.kind == "parallel":
        return _infer_parallel(node, operands[0], mesh)
    splits = node_splits(node, operands, mesh)
    if not divides(node.loops, splits, mesh):
        raise ShardingError(
            f"{describe(node)} cuts its loops {split_degrees(splits, mesh)} ways",
            f"Extents are {dict(node.loops.extents)}",
        )
    return tuple(split.result for split in splits)


def _infer_parallel(node: Node, sharding: Sharding, mesh: Mesh) -> Sharding:
    name = node.attr("axis")
    try:
        positions = mesh.positions(name)
    except KeyError:
        raise ShardingError(f"{describe(node)} names axis {name!r}", f"The mesh is {mesh}") from None
    before, after = node.op.transition.states(node.attrs)
    for position in positions:
        if sharding[position] != before:
            found = f"found {sharding[position]} (of {node.operands[0]!r})"
            raise ShardingError(f"{describe(node)} on axis {name}: expected {before}, {found}")
    for state in (before, after):
        if isinstance(state, Shard) and state in inner_states(sharding, positions):
            raise ShardingError(
                f"{describe(node)} changes axis {name} on dim {state.dim}, which an inner axis cuts too",
                "Axes cut a dim in mesh order, so the inner cut is undone first",
            )
    return with_states(sharding, positions, after)


def _no_split(node: Node, axis: Axis, found: tuple[State, ...], options: Sequence[Split]) -> ShardingError:
    allowed = "; ".join(f"{option.label}: {format_sharding(option.operands)}" for option in options)
    return ShardingError(
        f"{describe(node)} on axis {axis.name}: found operands {format_sharding(found)}", f"Allowed are {allowed}"
    )


def describe(node: Node) -> str:
    """How messages name a node."""
    return f"{node.op.name} {node.name or node.digest[:8]}"
