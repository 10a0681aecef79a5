"""Put one mistake into a plan: change the node of a given name, or what a collective does when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.mutation.edit import Change, Edit, drop
from benchmarks.mutation.edit import edited as changed
from ir.evaluation.collectives import MOVES, Group, Move
from ir.graph import Graph


@dataclass(frozen=True)
class Mistake:
    """A seeded mistake.

    Attributes:
        what: in words.
        caught_by: "states" (the verifier of shardings), "signature" (what plan and source store, take and give),
            "values" (outputs over Z_p) or "gradients" (gradients over Z_p).
        at: the nodes of the plan that ``change`` replaces, by name.
        plan: which program's plan.
        moves: parallel operators that run wrongly.
    """

    what: str
    caught_by: str
    at: tuple[str, ...] = ()
    change: Change = drop
    plan: str = "transformer"
    moves: Mapping[str, tuple[Move, Move]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.what

    @property
    def all_moves(self) -> Mapping[str, tuple[Move, Move]]:
        """Every parallel operator, the wrong ones among them."""
        return {**MOVES, **self.moves}


def edited(graph: Graph, mistake: Mistake) -> Graph:
    """``graph`` with the mistake in it; every name in ``at`` has to be there."""
    changes = {node: mistake.change for node in graph.nodes if node.name in mistake.at}
    missing = set(mistake.at) - {node.name for node in changes}
    assert not missing, f"no node is called {missing}"
    return changed(graph, Edit(mistake.what, changes))


def scaled(move: Move, divide: bool = True) -> Move:
    """``move``, and then the mean where the sum is meant (or the sum again where it was taken already)."""

    def run(group: Group, x: Any, given: Mapping[str, Any]) -> Any:
        moved = move(group, x, given)
        size = group.size
        return moved * (pow(size, -1, 2**31 - 1) if divide else size) % (2**31 - 1)

    return run
