"""The whole source graph as one flat network of choices, and back from values to a plan.

What folds the chain search (equal blocks, boundary states) is left out: these are the problems that the papers solve.
A choice is an operator's configuration or a tied parameter's state. What moving a value costs depends on the choices
of all who read it; where several do, ``moving`` adds a helper variable over which the cost is the least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ir.graph import Node
from ir.operator import Split
from pdv.pcg.plan_cost import realize, whole_bytes
from pdv.problem import Assignment, Problem, Storage
from pdv.search.blocks import block_of, tied_params
from pdv.search.refusals import no_legal_plan
from pdv.search.solver.configs import ConfigTable
from pdv.search.solver.network import BlockModel, Network
from pdv.search.solver.sharing import EXACT_WANTS
from pdv.search.solver.tables import Factor, Table, Variable
from pdv.search.solver.tied import TiedTable, reads
from pdv.search.solver.ties import Ties

Values = dict[Variable, int]


@dataclass(frozen=True)
class Term:
    """min over h of the sum of its parts: what one value's moves, or one operator, cost.

    Attributes:
        variables: the choices that it depends on.
        parts: tables over some of these (their positions, in the order of the table's axes) and, on the last axis, h.
    """

    variables: tuple[Variable, ...]
    parts: tuple[tuple[tuple[int, ...], Table], ...]

    def at(self, values: Mapping[Variable, int]) -> float:
        """What it costs."""
        rows = [table[tuple([values[self.variables[p]] for p in at])] for at, table in self.parts]
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        return float(total[0]) if len(total) == 1 else float(total.min())

    def along(self, position: int, values: Mapping[Variable, int]) -> Table:
        """[values of the variable at ``position``] what it costs, the other variables as they are."""
        size = next(table.shape[at.index(position)] for at, table in self.parts if position in at)
        total: Table = np.zeros((size, 1))
        for at, table in self.parts:
            index = tuple(slice(None) if p == position else values[self.variables[p]] for p in at)
            total = total + table[index]
        least: Table = total.min(axis=-1)
        return least


@dataclass(frozen=True)
class Flat:
    """Choices and terms at one price of memory; a plan's value is the sum of its terms.

    Attributes:
        price: seconds per byte.
        factors: the same as plain tables, over choices and helpers.
        sizes: of every variable's domain.
        choices: the variables to choose, in program order; a tied parameter before its first reader.
        network: what values mean.
        terms: finite everywhere; an illegal entry costs ``illegal``, more than any legal plan does.
    """

    price: float
    factors: tuple[Factor, ...]
    sizes: Mapping[Variable, int]
    choices: tuple[Variable, ...]
    network: Network
    terms: tuple[Term, ...]
    illegal: float

    @cached_property
    def touching(self) -> dict[Variable, list[tuple[int, int]]]:
        """Of each choice, the terms that depend on it, and where they have it."""
        found: dict[Variable, list[tuple[int, int]]] = {variable: [] for variable in self.choices}
        for number, term in enumerate(self.terms):
            for position, variable in enumerate(term.variables):
                found[variable].append((number, position))
        return found

    def value(self, values: Mapping[Variable, int]) -> float:
        """Seconds and priced bytes of a plan; ``illegal`` or more if it is none."""
        return sum(term.at(values) for term in self.terms)

    def along(self, variable: Variable, values: Mapping[Variable, int]) -> Table:
        """[values of ``variable``] what the terms that depend on it cost, all else as it is."""
        total: Table = np.zeros(self.sizes[variable])
        for number, position in self.touching[variable]:
            total = total + self.terms[number].along(position, values)
        return total

    def polish(self, values: Values, rounds: int = 4) -> Values:
        """No single choice of the result can be bettered (or ``rounds`` have passed); never worse than what came."""
        values = dict(values)
        for _ in range(rounds):
            before = dict(values)
            for variable in self.choices:
                costs = self.along(variable, values)
                best = int(costs.argmin())
                if costs[best] < costs[values[variable]]:
                    values[variable] = best
            if values == before:
                break
        return values


@dataclass(frozen=True)
class Plain:
    """A plan with its true seconds and bytes."""

    assignment: Assignment
    cost_s: float
    memory_bytes: float


class Flattened:
    """One problem as flat networks, one for each price of memory."""

    def __init__(self, problem: Problem) -> None:
        assert not problem.undecided, "how outputs leave is decided first (together)"
        self.problem = problem
        graph = problem.graph
        numbers = tied_params(graph)
        self.configs = ConfigTable(problem, numbers)
        self._tied = {param: TiedTable(self.configs, param, reads(graph.nodes, param)) for param in numbers}
        self.nodes = tuple(node for node in graph.nodes if not node.is_leaf)
        outputs = tuple(node for _, node in graph.outputs if not node.is_leaf)
        updates = tuple(node for _, node in graph.updates if not node.is_leaf)
        self._block = block_of(None, self.nodes, None, outputs, updates, numbers)
        self.whole_bytes = whole_bytes(graph)
        wants = [len(graph.users[node]) + sum(node is root for root in graph.roots) for node in self.nodes]
        self.exact = max(wants, default=0) <= EXACT_WANTS[2] and all(table.exact for table in self._tied.values())

    def at(self, price: float, *, optimistic: bool = False) -> Flat:
        """The network at a price; an ``optimistic`` one bounds every plan's cost from below (``sharing``).

        Raises:
            NoPlanFitsError: if pins leave some operator no configuration.
        """
        ties = Ties.together(self._tied)
        network = BlockModel(self._block, self.configs, ties, ((),), optimistic=optimistic).at(price)
        if not all(network.sizes.values()):
            raise no_legal_plan(self.problem)
        own = [Factor((network.variables[p],), self._tied[p].own(price)) for p in network.tied]
        factors = (*network.factors, *own)
        illegal = 2 * sum(float(f.table[np.isfinite(f.table)].max(initial=0.0)) for f in factors) + 1e-9
        return Flat(
            price, factors, network.sizes, self._choices(network), network, _terms(factors, network, illegal), illegal
        )

    def _choices(self, network: Network) -> tuple[Variable, ...]:
        """Variables in program order."""
        order: dict[Variable, None] = {}
        for node in self.nodes:
            order |= dict.fromkeys(network.variables[operand] for operand in node.operands if operand in self._tied)
            order[network.variables[node]] = None
        return tuple(order)

    def plan(self, flat: Flat, values: Mapping[Variable, int]) -> Plain:
        """The plan that legal values mean, derived and priced as a whole."""
        network = flat.network
        splits: dict[Node, tuple[Split, ...]] = {}
        storage: dict[Node, Storage] = {}
        for param in network.tied:
            storage[param] = self._tied[param].states[values[network.variables[param]]].storage
        for node in self.nodes:
            config = network.options[node][values[network.variables[node]]]
            splits[node] = config.splits
            for operand, kept in config.storage(flat.price):
                storage.setdefault(node.operands[operand], kept)
        assignment = Assignment(splits, storage, self.problem.leaving)
        cost = realize(self.problem, assignment, self.configs.moves).cost
        return Plain(assignment, cost.seconds, cost.memory_bytes)


def _terms(factors: Sequence[Factor], network: Network, illegal: float) -> tuple[Term, ...]:
    """Factors joined by helper, and those over the same choices added up (OptCNN calls it edge elimination)."""
    choices = set(network.variables.values())
    groups: dict[tuple[Variable, ...], list[Factor]] = {}
    for factor in factors:
        helpers = tuple(v for v in factor.variables if v not in choices)
        scope = tuple(sorted(factor.variables)) if not helpers else (-1, *helpers)
        groups.setdefault(scope, []).append(factor)
    terms = []
    for group in groups.values():
        variables = tuple(dict.fromkeys(v for factor in group for v in factor.variables if v in choices))
        parts: dict[tuple[int, ...], Table] = {}
        for factor in group:
            places = [_place(variable, variables) for variable in factor.variables]
            order = sorted(range(len(places)), key=places.__getitem__)
            table = np.where(np.isfinite(factor.table), factor.table, illegal).transpose(order)
            at = tuple(places[i] for i in order if places[i] < len(variables))
            if len(at) == len(order):
                table = table[..., None]
            parts[at] = parts[at] + table if at in parts else np.ascontiguousarray(table)
        terms.append(Term(variables, tuple(parts.items())))
    return tuple(terms)


def _place(variable: Variable, variables: tuple[Variable, ...]) -> int:
    """Where a choice stands; helpers come last."""
    return variables.index(variable) if variable in variables else len(variables)
