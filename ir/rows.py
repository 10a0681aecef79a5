"""Which dim of a value is the batch: dim 0 of what the caller passes, followed through the operators' loops.

Decides whether what a program returns may leave it cut by rows: only where dim 0 of every output is the batch does each
rank hold whole samples, in the order of the targets that belong to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ir.dims import Loops
from ir.graph import Graph, Node
from ir.sharding import Replicate, Shard


@lru_cache(maxsize=8)  # the problems of all meshes share a graph
def by_rows(graph: Graph) -> bool:
    """True if dim 0 of every output is the batch; False if there is no output, or one has no dims."""
    found: dict[Node, frozenset[int]] = {}
    for node in graph.nodes:
        found[node] = _of_leaf(graph, node) if node.is_leaf else _of_result(node.loops, node, found)
    return bool(graph.outputs) and all(0 in found[node] for _, node in graph.outputs)


def _of_leaf(graph: Graph, node: Node) -> frozenset[int]:
    """Dim 0 of the first input, and of others of that size."""
    if not node.is_input or not node.type.rank:
        return frozenset()
    batched = next(other for other in graph.inputs if other.type.rank)
    return frozenset({0} if node.type.shape[0] == batched.type.shape[0] else ())


def _of_result(loops: Loops, node: Node, found: dict[Node, frozenset[int]]) -> frozenset[int]:
    """The dims whose outermost loop walks the batch of some operand."""
    batch = {
        loop
        for dims, operand in zip(loops.operands, node.operands, strict=True)
        for dim in found[operand]
        if (loop := loops.outermost(dims[dim])) is not None
    }
    return frozenset(dim for dim, group in enumerate(loops.result) if loops.outermost(group) in batch)


def rows_apart(graph: Graph) -> bool:
    """True if each row of every output depends on the same row of the inputs alone, as the operators' splits say.

    Then a batch in parts gives the parts of its result, and a sum over its rows has the sum of their gradients. False
    may also mean that it was not seen. In a program of one row, a batch taken row by row, there is no other to see. Of
    what is drawn for all rows at once (a mask over a weight) parts of a batch would each draw their own.
    """
    return not what_joins_rows(graph)


@lru_cache(maxsize=8)
def what_joins_rows(graph: Graph) -> str:
    """What of a program puts rows together, as far as is known, as the rest of "it has …"; empty if they are apart."""
    if graph.updates:
        return "buffers that a step overwrites"
    if not graph.outputs or not graph.inputs:
        return "no inputs, or no outputs"
    if single := [name for name, node in graph.outputs if not node.type.rank]:
        return f"an output, {single[0]}, that is one number for all rows: give a loss to train_step, not the module"
    if all(node.type.shape[:1] == (1,) for node in graph.inputs):
        return ""
    found, why = _dims_of_rows(graph)
    others = [] if why else [name for name, node in graph.outputs if found[node] != 0]
    return f"an output, {others[0]}, whose dim 0 is not that of rows" if others else why


def _dims_of_rows(graph: Graph) -> tuple[dict[Node, int | None], str]:
    """The dim of rows of each value, until one is met that puts rows together: why, or nothing."""
    rows = next(node.type.shape[0] for node in graph.inputs if node.type.rank)
    found: dict[Node, int | None] = {}  # the dim of rows
    copies: set[Node] = set()  # of one and the same row, made for as many rows as there are
    for node in graph.nodes:
        if node.is_leaf:
            found[node] = 0 if 0 in _of_leaf(graph, node) else None
            if node.is_input and found[node] is None:
                return found, f"an input, {node.attr('name')} {node.type}, that has no dim 0 of {rows} rows"
            continue
        dims = [found[operand] for operand in node.operands]
        found[node] = _dim_of_rows(node, dims)
        same = not node.op.draws  # as many masks as rows are drawn
        if same and all(dim is None or operand in copies for dim, operand in zip(dims, node.operands, strict=True)):
            if (dim := _repeated(node, rows)) is not None:
                found[node] = dim
            if found[node] is not None:
                copies.add(node)
            elif any(dim is not None for dim in dims):
                return found, f"a value, {node.name} {node.type}, made of as many copies as there are rows"
        elif found[node] is None:
            found[node] = _dim_of_rows(node, [None if x in copies else found[x] for x in node.operands])
            if found[node] is None:
                return found, f"a value, {node.name} {node.type}, that is not known to be row by row"
    return found, ""


def _dim_of_rows(node: Node, dims: Sequence[int | None]) -> int | None:
    """The dim of the result that is cut if operands are cut along ``dims``; None if that leaves no rows apart."""
    if all(dim is None for dim in dims):
        return None
    states = tuple(Replicate() if dim is None else Shard(dim) for dim in dims)
    splits = [split for split in node.op.splits(node.loops) if split.operands == states]
    results = [split.result for split in splits if split.loop != node.op.offset_loop]
    found = [state.dim for state in results if isinstance(state, Shard)]
    return found[0] if len(found) == 1 else None


def _repeated(node: Node, rows: int) -> int | None:
    """The dim along which a value of one row is expanded to all (a class token, a state that layers begin with)."""
    if not node.op.repeats:
        return None
    sizes = zip(node.operands[0].type.shape, node.type.shape, strict=True)
    return next((dim for dim, (before, after) in enumerate(sizes) if before == 1 and after == rows), None)
