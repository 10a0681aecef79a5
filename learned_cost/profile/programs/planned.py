"""Shapes of real plans: what each operator of a model is on one device, whole and under every legal cut.

``of_pcg`` derives them from a plan; ``read_shipped`` reads those of the example models, which come with the
package so that profiling needs no model (benchmarks/profile_shapes.py derived and wrote them).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ir.builder import Builder
from ir.cost_model import Query
from ir.errors import DataError
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.types import DType, TensorType
from ir.verify import infer_shardings, node_local_loops, node_splits
from learned_cost.data.kernel import Kernel
from learned_cost.describe import DTYPES
from learned_cost.devices.device import DeviceRecord
from learned_cost.profile.programs.pieces import Piece

FILE = Path(__file__).parent / "planned.json.gz"
FUSIBLE = {"map", "row"}
MAX_SEGMENT = 8  # operators


def of_plan(queries: Iterable[Query], plan: str) -> list[Piece]:
    """The pieces that a cost model was asked about, each once."""
    found = (Piece.of_query(query, plan) for query in queries)
    return list(dict.fromkeys(piece for piece in found if piece is not None))


def of_pcg(pcg: Graph, mesh: Mesh, plan: str) -> list[Piece]:
    """The local work of a training plan: each operator of its graph as its operands' shardings leave it on one device.

    Raises:
        ShardingError: if the graph is not of that mesh.
    """
    shardings = infer_shardings(pcg, mesh)

    def query(node: Node) -> Query:
        splits = node_splits(node, [shardings[operand] for operand in node.operands], mesh)
        return Query.of(node, node_local_loops(node, splits, mesh), train=True)

    return of_plan((query(node) for node in pcg.nodes if not node.is_leaf and node.op.kind != "parallel"), plan)


def segments(graph: Graph) -> list[Graph]:
    """Parts of a graph that a compiler fuses: maps and row functions that feed each other alone, behind one product."""
    uses: dict[Node, int] = {}
    for node in graph.nodes:
        for operand in node.operands:
            uses[operand] = uses.get(operand, 0) + 1
    outputs = {node for _, node in graph.outputs}
    found: dict[str, Graph] = {}
    for node in graph.nodes:
        if node.op.kind not in FUSIBLE or node.op.has_scores:
            continue
        members = _grow(node, uses, outputs)
        if 2 <= sum(member.op.kernel for member in members) <= MAX_SEGMENT:
            part = _part(node, members)
            found.setdefault(part.digest, part)
    return list(found.values())


def _grow(last: Node, uses: dict[Node, int], outputs: set[Node]) -> set[Node]:
    """The operators that end in ``last`` and whose values nobody else reads."""
    members, waiting = {last}, [last]
    while waiting and len(members) < MAX_SEGMENT:
        for operand in waiting.pop().operands:
            alone = uses.get(operand, 0) == 1 and operand not in outputs and not operand.op.has_scores
            if operand in members or not alone:
                continue
            if operand.op.kind in FUSIBLE:
                members.add(operand)
                waiting.append(operand)
            elif operand.op.is_dense and not any(member.op.is_dense for member in members):
                members.add(operand)  # a segment may begin with one: its epilogue is fused
    return members


def _part(last: Node, members: set[Node]) -> Graph:
    """The members as a graph of their own; what they read becomes inputs."""
    k = Builder()
    made: dict[Node, Node] = {}

    def copy(node: Node) -> Node:
        if node not in made:
            if node in members:
                made[node] = k.apply(node.op, tuple(copy(o) for o in node.operands), dict(node.attrs))
            else:
                made[node] = k.input(f"x{len(made)}", node.type)
        return made[node]

    return k.graph({"out": copy(last)})


def example_kernels(device: DeviceRecord) -> list[Kernel]:
    """Of the example models' plans: in float32 on CPUs, in bfloat16 on GPUs that compute in it."""
    pieces, _ = read_shipped()
    asked = DType.BF16 if device.kind == "gpu" and device.peak(DTYPES[DType.BF16]) is not None else DType.F32
    if asked is not DType.F32:
        pieces = [piece.of_dtype(asked) for piece in pieces]
    kernels = [kernel for piece in pieces for kernel in (piece.forward, *piece.backward)]
    known = {kernel.key: kernel for kernel in kernels if kernel.dtype == DTYPES[asked] and kernel.bytes > 0}
    return list(known.values())


# ---- As a file ----


def read_shipped(path: Path = FILE) -> tuple[list[Piece], list[tuple[str, Graph]]]:
    """Pieces and segments of the example models.

    Raises:
        DataError: if the file is none of ours.
    """
    from ir.text import parse_graph

    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        pieces = [
            Piece(
                op,
                tuple(TensorType(tuple(shape), DType(dtype)) for shape, dtype in types),
                _attrs(attrs),
                tuple(wanted),
                plan,
            )
            for op, types, attrs, wanted, plan in data["pieces"]
        ]
        return pieces, [(plan, parse_graph(text)) for plan, text in data["graphs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no file of shapes ({error})", mend="Install the package again") from error


def _attrs(pairs: Sequence[Sequence[Any]]) -> tuple[tuple[str, Hashable], ...]:  # Any: JSON
    return tuple((str(name), _freeze(value)) for name, value in pairs)


def _freeze(value: Any) -> Hashable:  # Any: JSON
    return tuple(_freeze(item) for item in value) if isinstance(value, list) else value
