"""Products in a narrow format, as a plan has them: which they are, and what they take with their casts.

Entry points: ``products_of`` a source graph; ``estimate_nodes``, which asks a cost model about operators; and
``is_narrow``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ir.cost_model import CostModel, NodeEstimate, Query, together
from ir.graph import Graph, Node
from ir.ops import OPERATORS
from ir.types import TensorType
from pdv.pcg.units import NUMBERED
from pdv.problem.formats import Format, Products
from pdv.problem.fused import Fused

COPIED_BYTES = 4.0  # an element in bfloat16, read and written: what casts are priced by


def products_of(graph: Graph, chosen: Format) -> Products:
    """Those of a source graph's layers."""
    matrices = [node.operands[1] for node in graph.nodes if node.op.weight_waits]
    return Products(chosen, frozenset(matrix.type for matrix in matrices if not _is_in_layer(matrix)))


def _is_in_layer(matrix: Node) -> bool:
    return matrix.is_param and NUMBERED.match(str(matrix.attr("name"))) is not None


def estimate_nodes(
    compute: CostModel, queries: Sequence[Query], products: Products | None, fused: Fused | None = None
) -> list[NodeEstimate]:
    """What the cost model says; of products in a narrow format with their casts, of what is fused its share."""
    if fused is not None:
        found = estimate_nodes(compute, queries, products)
        return [fused.of(query, one) for query, one in zip(queries, found, strict=True)]
    if products is None:
        return compute.nodes(queries)
    taken = [is_narrow(query, products) for query in queries]
    number = products.format.number
    asked = [query._replace(number=number) if takes else query for query, takes in zip(queries, taken, strict=True)]
    casts = [copy for query, takes in zip(queries, taken, strict=True) if takes for copy in _copies(query)]
    found = compute.nodes([*asked, *casts])
    passes, rest = products.format.cast_bytes / COPIED_BYTES, iter(found[len(asked) :])
    return [
        _with_casts(one, [next(rest) for _ in range(3)], passes) if takes else one
        for one, takes in zip(found, taken, strict=False)
    ]


def is_narrow(query: Query, products: Products) -> bool:
    """Whether a product is in the narrow format: one with a matrix that is trained."""
    return query.wanted is not None and query.wanted[-1] and products.takes(query.op, query.operands)


def _copies(query: Query) -> list[Query]:
    """A copy of each factor that is cast: both operands, and the result's gradient."""
    terms = (*query.loops.operands, query.loops.result)
    types = (*query.operands, query.result)
    pieces = [TensorType(query.loops.shape_of(dims), of.dtype) for dims, of in zip(terms, types, strict=True)]
    return [query_of("scale", (piece,), backward=False, factor=1.0) for piece in pieces]


def _with_casts(product: NodeEstimate, copies: Sequence[NodeEstimate], passes: float) -> NodeEstimate:
    """Operands are cast forward, and again backward, along the other dim; the gradient backward."""
    x, weight, grad = (one.forward for one in copies)
    ahead = [one.times(passes / 2) for one in (x, weight)]
    return NodeEstimate(together([product.forward, *ahead]), together([product.backward, *ahead, grad.times(passes)]))


def query_of(name: str, operands: tuple[TensorType, ...], backward: bool, **given: float) -> Query:
    """An operator that stands in no graph, on whole tensors."""
    op = OPERATORS[name]
    attrs = op.check_attrs(given)
    loops = op.solve(name, operands, attrs)
    result = op.result_type(loops, operands, attrs)
    return Query(op, loops, operands, result, attrs, (True,) * len(operands) if backward else None)
