"""What is made wrong in collectives and parameters: for each kind of change, every place where it can be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.mutation.edit import (
    Change,
    Edit,
    attrs,
    drop,
    on_axis,
    other,
    parameter,
    reversed_ranks,
    twice,
)
from ir.evaluation.collectives import MOVES, Move
from ir.graph import Graph, Node
from ir.mesh import Mesh

Places = Iterator[Edit]
EXCHANGED = {"all_gather": "combine", "combine": "all_gather", "reduce": "reduce_replicate",
             "reduce_replicate": "reduce"}  # fmt: skip


def one(node: Node, change: Change, detail: object = "") -> Edit:
    """A change of one node."""
    return Edit(f"{node.op.name} {node.name} {detail}".strip(), {node: change})


def parallel(graph: Graph, *names: str) -> list[Node]:
    """Parallel operators, of these names if any are given."""
    return [x for x in graph.nodes if x.op.kind == "parallel" and (not names or x.op.name in names)]


def named(graph: Graph, *names: str) -> list[Node]:
    """Operators of these names."""
    return [node for node in graph.nodes if node.op.name in names]


def local(graph: Graph) -> list[Node]:
    """What computes with floats: no leaves, no moves."""
    return [x for x in graph.nodes if not x.is_leaf and x.op.kind != "parallel" and x.type.dtype.is_floating]


def constants(graph: Graph) -> list[tuple[Node, Any]]:  # Any: arrays of any type
    """Constants and their values."""
    return [(node, node.attr("value").array) for node in named(graph, "const")]


# ---- Collectives ----


def wrong_axis(g: Graph, mesh: Mesh) -> Places:
    """A collective along another axis."""
    for node in parallel(g):
        yield from (one(node, attrs(axis=name), name) for name in mesh.spans if name != node.attr("axis"))


def wrong_dim(*names: str) -> Callable[[Graph, Mesh], Places]:
    """Along another dim."""

    def places(g: Graph, mesh: Mesh) -> Places:
        for node in parallel(g, *names):
            yield from (one(node, attrs(dim=d), d) for d in range(node.type.rank) if d != node.attr("dim"))

    return places


def dropped(*names: str) -> Callable[[Graph, Mesh], Places]:
    """Left out."""
    return lambda g, mesh: (one(node, drop) for node in named(g, *names))


def doubled(*names: str) -> Callable[[Graph, Mesh], Places]:
    """Done twice."""
    return lambda g, mesh: (one(node, twice) for node in named(g, *names))


def exchange_reversed(g: Graph, mesh: Mesh) -> Places:
    """From and to dims of an all-to-all exchanged."""
    for node in named(g, "all_to_all"):
        yield one(node, attrs(dim=node.attr("to_dim"), to_dim=node.attr("dim")))


def other_collective(g: Graph, mesh: Mesh) -> Places:
    """An all-gather for a combine, a partition for a reduce-scatter, and so on."""
    for node in parallel(g):
        if node.op.name in EXCHANGED:
            yield one(node, other(EXCHANGED[node.op.name], **node.attrs), EXCHANGED[node.op.name])
        if node.op.name in ("partition", "reduce_scatter"):
            name = "partition" if node.op.name == "reduce_scatter" else "reduce_scatter"
            yield one(node, other(name, **node.attrs), name)


def backward(wrong: Callable[[Move], Move], what: str, *names: str) -> Callable[[Graph, Mesh], Places]:
    """Gradients of one collective along one axis moved wrongly."""

    def places(g: Graph, mesh: Mesh) -> Places:
        used = {(node.op.name, node.attr("axis")) for node in parallel(g, *names)}
        for name, axis in sorted(used):
            forward, dual = MOVES[name]
            yield Edit(f"{what} of {name} along {axis}", moves={name: (forward, on_axis(wrong(dual), dual, axis))})

    return places


def ranks_reversed(g: Graph, mesh: Mesh) -> Places:
    """What a collective does forward, in the reverse order of ranks."""
    for name, axis in sorted({(x.op.name, x.attr("axis")) for x in parallel(g)}):
        forward, dual = MOVES[name]
        yield Edit(f"{name} along {axis}", moves={name: (on_axis(reversed_ranks(forward), forward, axis), dual)})


def identity(move: Move) -> Move:
    """Moves nothing."""
    del move
    return MOVES["replicate"][0]


def sliced(move: Move) -> Move:
    """Only slices."""
    del move
    return MOVES["partition"][0]


def summed(move: Move) -> Move:
    """Only sums."""
    del move
    return MOVES["reduce"][0]


# ---- Parameters ----


def other_weight(g: Graph, mesh: Mesh) -> Places:
    """A parameter that reads another's stored tensor, of another layer for instance."""
    for node in g.params:
        for rival in g.params:
            if rival.type == node.type and rival.attr("source") != node.attr("source"):
                yield one(node, parameter(source=rival.attr("source"), view=rival.attr("view")), rival.name)


def weights_exchanged(g: Graph, mesh: Mesh) -> Places:
    """Two parameters of one shape exchanged."""
    for node in g.params:
        for rival in g.params:
            if rival.type == node.type and rival.attr("name") > node.attr("name"):
                change = {
                    x: parameter(**{key: y.attr(key) for key in ("name", "source", "view")})
                    for x, y in ((node, rival), (rival, node))
                }
                yield Edit(f"{node.name} and {rival.name}", change)


def other_view(g: Graph, mesh: Mesh) -> Places:
    """A weight read backwards, transposed, or from another chunk."""
    for node in g.params:
        shape = node.type.shape
        if len(shape) == 2 and shape[0] == shape[1]:
            yield one(node, parameter(view=(*node.attr("view"), ("permute", (1, 0)))), "transposed")
        if len(shape) == 2 and shape[0] != shape[1] and not node.attr("view"):
            yield one(node, parameter(view=(("reshape", shape[::-1]), ("permute", (1, 0)))), "by columns")


def other_storage(g: Graph, mesh: Mesh) -> Places:
    """A parameter stored otherwise than the program takes it."""
    for node in g.params:
        states = (node.attr("stored") or ",".join("I" * len(mesh.axes))).split(",")
        for at in range(len(states)):
            for state in ("I", *(f"S{dim}" for dim in range(node.type.rank))):
                if state != states[at]:
                    yield one(node, parameter(stored=",".join((*states[:at], state, *states[at + 1 :]))), state)


def trainable(g: Graph, mesh: Mesh) -> Places:
    """A weight frozen, a buffer trained."""
    return (one(node, parameter(trainable=not node.attr("trainable"))) for node in g.params)
