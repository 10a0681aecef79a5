"""The forms of an answer: an assignment, the PCG that it derives, what that costs, and a search's solution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ir.graph import Graph, Node
from ir.operator import Split
from ir.sharding import Sharding
from pdv.cost.breakdown import PlanCost
from pdv.problem.problem import Problem, Storage


@dataclass(frozen=True)
class Assignment:
    """One split per node and axis, one storage per parameter: with the graph, a derivation.

    ``leaving``: how all outputs leave; None: as is cheapest, given how they are made.
    """

    splits: Mapping[Node, tuple[Split, ...]]
    storage: Mapping[Node, Storage]
    leaving: Sharding | None = None


@dataclass(frozen=True, slots=True)
class AlgebraicStep:
    """An algebraic rule, applied everywhere that it matches inside one block of the source graph (by number)."""

    rule: str
    block: int


@dataclass(frozen=True)
class Derived:
    """A PCG, and the node of it that runs each node of the serial graph."""

    pcg: Graph
    places: Mapping[Node, Node]


@dataclass(frozen=True)
class Realized:
    """The PCG of an assignment, and what it costs."""

    derived: Derived
    cost: PlanCost


@dataclass(frozen=True)
class Solution:
    """A derivation with its price and its certificate.

    ``graph`` is the source after ``steps``; ``assignment`` speaks of its nodes. ``cost_s`` is seconds per step,
    ``memory_bytes`` per device; no derivation on this mesh within the rules explored costs less than
    ``lower_bound_s`` under the same cost model, limit and pins (0: nothing is known). ``states`` counts configurations
    priced, ``variants`` the rewritten blocks among which the bound holds; a search that was cut short is not
    ``complete``. ``realized`` is the PCG with its price, where the strategy had to make it anyway.
    """

    problem: Problem
    graph: Graph
    steps: tuple[AlgebraicStep, ...]
    assignment: Assignment
    cost_s: float
    memory_bytes: float
    lower_bound_s: float
    states: int
    variants: int = 1
    complete: bool = True
    realized: Realized | None = field(default=None, compare=False, repr=False)

    @property
    def gap(self) -> float:
        """Relative distance that optimality may still be away."""
        return max(0.0, (self.cost_s - self.lower_bound_s) / self.cost_s) if self.cost_s > 0 else 0.0
