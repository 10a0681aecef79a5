"""What each operator of a plan takes: its own work, and its share of the moves that bring its operands.

A chain of moves that several operators read is shared equally among them; one that only leads out of the program is the
producer's. Over all operators the shares add up to the plan's compute and communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ir.graph import Graph, Node, unmoved
from pdv.report.loaded import Loaded


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds of one operator per step, forward and backward."""

    compute_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute_s + self.forward_s + self.backward_s

    def __add__(self, other: Share) -> Share:
        """Of both."""
        return Share(
            self.compute_s + other.compute_s, self.forward_s + other.forward_s, self.backward_s + other.backward_s
        )


def shares(plan: Loaded) -> Mapping[Node, Share]:
    """By operator of the rewritten graph."""
    pcg, cost = plan.derived.pcg, plan.cost.nodes
    runs: dict[Node, Node] = {plan.derived.places[node]: node for node in plan.operators}
    found = {node: Share(compute_s=cost[made].seconds) for made, node in runs.items()}
    readers = _readers(pcg)
    for node in pcg.nodes:
        if node.op.kind != "parallel":
            continue
        reading = readers[node] or [unmoved(node)]
        for reader in reading:
            if reader in runs:
                part = Share(0.0, cost[node].forward_s / len(reading), cost[node].backward_s / len(reading))
                found[runs[reader]] += part
    return found


def _readers(pcg: Graph) -> dict[Node, list[Node]]:
    """For each parallel operator, the operators that its result reaches without another in between."""
    found: dict[Node, dict[Node, None]] = {}
    for node in reversed(pcg.nodes):
        reached: dict[Node, None] = {}
        for user in pcg.users[node]:
            reached |= found[user] if user.op.kind == "parallel" else {user: None}
        if node.op.kind == "parallel":
            found[node] = reached
    return {node: list(reached) for node, reached in found.items()}
