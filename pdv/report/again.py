"""One block of a plan solved again: its boundary as in the plan, its operators in whatever is left to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ir.graph import Node
from ir.operator import Split
from ir.sharding import Sharding, invariant
from pdv.problem import Storage
from pdv.report.loaded import Loaded
from pdv.search.blocks import Block
from pdv.search.solver.configs import Config, ConfigTable
from pdv.search.solver.elimination import eliminate
from pdv.search.solver.network import NOBODY, BlockModel
from pdv.search.solver.tables import Factor, Variable
from pdv.search.solver.tied import TiedTable
from pdv.search.solver.ties import Ties

Splits = tuple[Split, ...]
Least = dict[Node, dict[Splits, float]]
"""By operator and splits, what the block costs at least with them."""


class Again:
    """A block under the plan's boundary, its operators restricted to a domain (configurations by number).

    ``exact`` is False where tables of more than ``limit`` entries would be needed: the values are then lower bounds.
    """

    def __init__(
        self,
        plan: Loaded,
        block: Block,
        configs: ConfigTable,
        tied: Mapping[Node, TiedTable],
        domain: Mapping[Node, Sequence[int]],
        limit: float = math.inf,
    ) -> None:
        self._block = block
        sources: tuple[Sharding, ...] = ((),) if block.source is None else (made_in(plan, block.source),)
        wanted = {node: read_in(plan, block, node) for node in block.nodes} if block.beside else NOBODY
        beside = {node: made_in(plan, node) for node in block.read_beside}
        model = BlockModel(
            block, configs, Ties.together(tied), sources, limit=limit, domain=domain, wanted=wanted, beside=beside
        )
        network = model.at(0.0)
        self._options, self._variables = network.options, network.variables
        kept: dict[Variable, Sequence[int]] = {}
        for param in network.tied:
            stored = plan.assignment.storage.get(param, Storage(invariant(plan.problem.mesh)))
            states = tied[param].states
            kept[network.variables[param]] = [i for i, state in enumerate(states) if state.storage == stored]
        elsewhere = [_elsewhere(plan, block, tied[param], network.variables[param]) for param in network.tied]
        factors = [factor.within(kept) for factor in (*network.factors, *elsewhere)]
        sizes = {variable: len(kept.get(variable, range(size))) for variable, size in network.sizes.items()}
        self._elimination = eliminate(factors, sizes, (), limit=limit)
        priced = network.exact or not all(tied[param].exact for param in network.tied)
        self.exact = self._elimination.exact and priced

    @property
    def value(self) -> float:
        """What the block costs at least."""
        return float(self._elimination.table)

    def least(self) -> Least:
        """The same with each splits of each operator."""
        found = self._elimination.marginals(np.zeros(()))
        values: Least = {}
        for node in self._block.nodes:
            options = [config.splits for config in self._options[node]]
            # a variable with one value is no choice, and has no marginal
            costs = found.get(self._variables[node], np.full(len(options), self.value))
            values[node] = {splits: float(cost) for splits, cost in zip(options, costs, strict=True)}
        return values

    def configs(self) -> dict[Node, Config]:
        """What every operator does where the block is cheapest."""
        values = self._elimination.recover({})
        return {node: self._options[node][values[self._variables[node]]] for node in self._block.nodes}


def made_in(plan: Loaded, node: Node) -> Sharding:
    """The sharding in which a node makes its value."""
    return tuple(split.result for split in plan.assignment.splits[node])


def read_in(plan: Loaded, block: Block, value: Node) -> tuple[Sharding, ...]:
    """The shardings in which others than the block's nodes read a value."""
    readers = [node for node in plan.graph.users[value] if node not in block.nodes]
    needs = [
        tuple(split.operands[i] for split in plan.assignment.splits[node])
        for node in readers
        for i, operand in enumerate(node.operands)
        if operand is value
    ]
    return tuple(dict.fromkeys(needs))


def _elsewhere(plan: Loaded, block: Block, table: TiedTable, variable: Variable) -> Factor:
    """What a tied parameter's states cost outside the block: where it rests, the shared way, and its other readers."""
    seconds = table.own(0.0)
    for node in dict.fromkeys(plan.graph.users[table.param]):
        if node in block.nodes:
            continue
        for i, operand in enumerate(node.operands):
            if operand is table.param:
                need = tuple(split.operands[i] for split in plan.assignment.splits[node])
                seconds = seconds + table.use([need], keep=False, optimistic=False)[0][:, 0]
    return Factor((variable,), seconds)
