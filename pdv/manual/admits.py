"""Whether a model admits degrees (heads, positions and experts that divide), and devices a format.

Entry points: `check_model`, `check_format`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ir.dims import divisors
from ir.errors import UsageError
from ir.graph import Graph
from pdv.cluster import Device
from pdv.cluster.presets import record_peaks
from pdv.pins.roles import RoleOf
from pdv.problem.formats import FORMATS


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


def check_format(name: str, devices: Sequence[Device]) -> None:
    """Products in a narrow format, on devices that have units for it.

    Raises:
        UsageError: naming the device that has none.
    """
    chosen = FORMATS.get(name)
    for device in devices if chosen is not None else ():
        assert chosen is not None, "as the loop says"
        peaks = record_peaks(device.name)
        if peaks is not None and chosen.peak not in peaks:
            having = [one.name for one in FORMATS.values() if one.peak in peaks]
            raise UsageError(
                f"products={name}: {device.name} has no units for {chosen.peak}",
                f"Allowed: {', '.join(['own', *having])}",
            )


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
