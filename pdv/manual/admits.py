"""Whether a model admits degrees: heads, positions and experts that divide. Entry point: `check_model`."""

from __future__ import annotations

from dataclasses import dataclass

from ir.dims import divisors
from ir.errors import UsageError
from ir.graph import Graph
from pdv.pins.roles import RoleOf


@dataclass(frozen=True, slots=True)
class Degrees:
    """Ways in which the inside of a model is cut, as `pdv.manual.configuration.Configuration` names them."""

    tp: int
    cp: int
    ep: int
    sp: bool


def check_model(graph: Graph, given: Degrees) -> None:
    """Attention and experts, where the degrees cut them.

    Raises:
        UsageError: naming what does not divide or is not there, and what would be allowed.
    """
    _check_heads(graph, given)
    _check_parts(graph, given)


def _check_heads(graph: Graph, given: Degrees) -> None:
    """Attention must divide by heads and by positions.

    Raises:
        UsageError: naming what does not divide, and what would.
    """
    for node in graph.nodes:
        if node.op.has_scores:
            heads, positions = node.type.shape[-3], node.type.shape[-2]
            if heads % given.tp:
                raise UsageError(f"tp={given.tp} does not divide {heads} heads", f"Allowed: {list_divisors(heads)}")
            for degree, word in ((given.cp, "cp"), (given.cp * given.tp if given.sp else 1, "cp x tp, with sp=1,")):
                if positions % degree:
                    raise UsageError(f"{word}={degree} does not divide a sequence of {positions}")
            return


def _check_parts(graph: Graph, given: Degrees) -> None:
    """Experts to spread, and attention over positions, where they are asked for.

    Raises:
        UsageError: if the model has none, or another number.
    """
    if given.cp > 1 and not any(node.op.has_scores for node in graph.nodes):
        raise UsageError(f"cp={given.cp}: {graph.name} has no attention", "Context parallelism cuts its positions")
    if given.ep == 1:
        return
    role = RoleOf()
    products = [node for node in graph.nodes if node.op.kind == "contraction" and node.type.rank > 2]
    cuts = ((node, split) for node in products for split in node.op.splits(node.loops))
    experts = {node.loops.extents[split.loop] for node, split in cuts if split.loop and role(node, split) == "expert"}
    if not experts:
        raise UsageError(f"ep={given.ep}: {graph.name} has no experts", "ep=1")
    for count in experts:
        if count % given.ep:
            raise UsageError(f"ep={given.ep} does not divide {count} experts", f"Allowed: {list_divisors(count)}")


def list_divisors(number: int) -> str:
    """Every divisor, for messages."""
    return ", ".join(str(size) for size in divisors(number))
