"""The best rejected alternative of an operator: its block solved again without the split that it took.

Everything else in the block is free; the block's boundary (the shardings in which its source comes and its sink
leaves, and where tied parameters rest) is kept, so that the difference is what the whole step would take longer. The
operator that makes a block's sink is weighed in this block and the next together. Prices are seconds alone: where
memory decided, an alternative may be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ir.graph import Node
from ir.sharding import Sharding, invariant
from pdv.pcg.plan_cost import local_cost
from pdv.pcg.redistribute import Redistribution
from pdv.problem import Storage
from pdv.report.loaded import Loaded
from pdv.search.block_table import BlockSolver
from pdv.search.blocks import Block, block_of, split_blocks, tied_params
from pdv.search.configs import Config, ConfigTable
from pdv.search.exact import Factor, Table, TooWideError, Variable, eliminate
from pdv.search.tied import TiedTable

Kept = Mapping[Variable, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to run an operator: its splits by axis, and what the step takes more with it.

    ``compute_s`` is the part of it that is compute, the rest is communication (and the optimizer's work); None where
    that was not asked for.
    """

    splits: tuple[str, ...]
    extra_s: float
    compute_s: float | None = None

    @property
    def communication_s(self) -> float | None:
        """The rest."""
        return None if self.compute_s is None else self.extra_s - self.compute_s


@dataclass(frozen=True)
class Weighed:
    """One operator, with what was weighed against its split.

    Attributes:
        best: the cheapest alternative, None if there is none within the same boundary.
        by_axis: for each axis, by each other loop, what the step takes more if it is cut there (None: not possible).
        wide: True if the block is too wide to be solved again.
    """

    best: Alternative | None
    by_axis: tuple[Mapping[str, float | None], ...]
    wide: bool = False


class Weighing:
    """Weighs the operators of one plan; equal blocks are solved once.

    ``apart`` says of which operators the alternative's compute is told apart, which takes solving once more for each.
    """

    def __init__(self, plan: Loaded, apart: Callable[[Node], bool] = lambda node: False) -> None:
        self._plan = plan
        self._apart = apart
        graph = plan.graph
        self._numbers = tied_params(graph)
        # the plan is explained as it is priced, in seconds: its limits have done their work
        self._problem = replace(plan.problem, memory_limit=float("inf"))
        moves = Redistribution(plan.problem.mesh, plan.problem.axes)
        self._configs = ConfigTable(self._problem, moves, self._numbers)
        reads = [(x, (node, i)) for node in graph.nodes for i, x in enumerate(node.operands) if x in self._numbers]
        self._tied = {
            param: TiedTable(self._configs, param, [read for x, read in reads if x is param]) for param in self._numbers
        }
        self._known: dict[tuple[object, ...], dict[int, Weighed]] = {}
        mark = plan.problem.pins.mark
        self.blocks = tuple(replace(block, key=block.key + mark(block.nodes)) for block in split_blocks(graph))

    def all(self) -> dict[Node, Weighed]:
        """Every operator."""
        found: dict[Node, Weighed] = {}
        for block, following in zip(self.blocks, (*self.blocks[1:], None), strict=True):
            inner = [node for node in block.nodes if node is not block.sink]
            found |= self._weighed(block, inner)
            if block.sink is not None and following is not None:
                found |= self._weighed(self._joined(block, following), [block.sink])
        return found

    def _weighed(self, block: Block, nodes: Sequence[Node]) -> dict[Node, Weighed]:
        """Some operators of one block."""
        places = tuple(block.nodes.index(node) for node in nodes)
        splits = tuple(tuple(self._plan.splits(node).values()) for node in block.nodes)
        apart = tuple(self._apart(node) for node in nodes)
        key = (block.key, self._boundary(block), splits, places, apart)
        if key not in self._known:
            solve = _Solve(self._plan, block, self._configs, self._tied)
            self._known[key] = solve.weighed(dict(zip(places, apart, strict=True)))
        return {block.nodes[number]: weighed for number, weighed in self._known[key].items()}

    def _joined(self, block: Block, following: Block) -> Block:
        """Two neighbours as one block."""
        both = (*block.nodes, *following.nodes)
        outputs, updates = (*block.outputs, *following.outputs), (*block.updates, *following.updates)
        joined = block_of(block.source, both, following.sink, outputs, updates, self._numbers)
        return replace(joined, key=joined.key + self._plan.problem.pins.mark(both))

    def _boundary(self, block: Block) -> object:
        sharding = None if block.source is None else made(self._plan, block.source)
        stored = [self._plan.assignment.storage.get(param) for param in self._numbers]
        return sharding, tuple(stored)


def made(plan: Loaded, node: Node) -> Sharding:
    """The sharding in which a node makes its value."""
    return tuple(split.result for split in plan.assignment.splits[node])


class _Solve:
    """One block under the plan's boundary."""

    def __init__(self, plan: Loaded, block: Block, configs: ConfigTable, tied: Mapping[Node, TiedTable]) -> None:
        self._plan = plan
        self._block = block
        sources: tuple[Sharding, ...] = ((),) if block.source is None else (made(plan, block.source),)
        network = BlockSolver(configs, tied, 0.0, sources).network(block)
        self._options = network.options
        self._variables = network.variables
        self._chosen = {node: self._index(node) for node in block.nodes}
        kept: dict[Variable, Sequence[int]] = {}
        for param in network.tied:
            stored = plan.assignment.storage.get(param, Storage(invariant(plan.problem.mesh)))
            states = tied[param].states
            kept[network.variables[param]] = [i for i, state in enumerate(states) if state.storage == stored]
        if block.sink is not None:
            results = [config.result for config in self._options[block.sink]]
            wanted = results[self._chosen[block.sink]]
            kept[self._variables[block.sink]] = [i for i, result in enumerate(results) if result == wanted]
        self._kept = kept
        elsewhere = (_elsewhere(plan, block, tied[param], network.variables[param]) for param in network.tied)
        self._factors = tuple(_sliced(factor, kept) for factor in (*network.factors, *elsewhere))
        self._sizes = {variable: len(kept.get(variable, range(size))) for variable, size in network.sizes.items()}

    def weighed(self, places: Mapping[int, bool]) -> dict[int, Weighed]:
        """The operators at some places of the block, and whether their alternatives' compute is told apart."""
        try:
            least = eliminate(self._factors, self._sizes, ()).marginals(np.zeros(()))
            chosen_s = self._value({self._variables[n]: [self._at(n, i)] for n, i in self._chosen.items()})
            nodes = self._block.nodes
            return {place: self._weigh(nodes[place], least, chosen_s, apart) for place, apart in places.items()}
        except TooWideError:
            return {place: Weighed(None, (), wide=True) for place in places}

    def _weigh(self, node: Node, least: Mapping[Variable, Table], chosen_s: float, apart: bool) -> Weighed:
        variable = self._variables[node]
        options = [self._options[node][i] for i in self._kept.get(variable, range(len(self._options[node])))]
        own = self._at(node, self._chosen[node])
        taken = _labels(options[own])
        # a variable with one value is no choice, and has no marginal
        extra = [float(value) - chosen_s for value in least[variable]] if variable in least else [0.0] * len(options)
        others = [i for i in range(len(options)) if i != own and np.isfinite(extra[i])]
        best = min(others, key=lambda i: (extra[i], _labels(options[i])), default=None)
        found = None
        if best is not None:
            found = Alternative(_labels(options[best]), extra[best], self._compute(node, best) if apart else None)
        by_axis = tuple(_along(options, extra, axis, taken[axis]) for axis in range(len(taken)))
        return Weighed(found, by_axis)

    def _compute(self, node: Node, index: int) -> float:
        """Seconds of compute that the block takes more with another configuration of one node."""
        variable = self._variables[node]
        factors = [_sliced(factor, {variable: [index]}) for factor in self._factors]
        values = eliminate(factors, {**self._sizes, variable: 1}, ()).recover({})
        values[variable] = index
        compute_s = 0.0
        for other in self._block.nodes:
            at = self._variables[other]
            config = self._options[other][self._kept[at][values[at]] if at in self._kept else values[at]]
            compute_s += local_cost(self._plan.problem, other, config.splits).seconds
            compute_s -= local_cost(self._plan.problem, other, self._plan.assignment.splits[other]).seconds
        return compute_s

    def _value(self, fixed: Kept) -> float:
        """The block's cost with some variables fixed (to positions among what is kept of them)."""
        sizes = {
            variable: len(fixed[variable]) if variable in fixed else size for variable, size in self._sizes.items()
        }
        return float(eliminate([_sliced(factor, fixed) for factor in self._factors], sizes, ()).table)

    def _index(self, node: Node) -> int:
        splits = self._plan.assignment.splits[node]
        return next(i for i, config in enumerate(self._options[node]) if config.splits == splits)

    def _at(self, node: Node, index: int) -> int:
        """The position of a configuration among those that are kept."""
        kept = self._kept.get(self._variables[node])
        return index if kept is None else list(kept).index(index)


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


def _sliced(factor: Factor, kept: Kept) -> Factor:
    table = factor.table
    for position, variable in enumerate(factor.variables):
        if variable in kept:
            table = table.take(list(kept[variable]), axis=position)
    return Factor(factor.variables, table)


def _labels(config: Config) -> tuple[str, ...]:
    return tuple(split.label for split in config.splits)


def _along(options: Sequence[Config], extra: Sequence[float], axis: int, taken: str) -> dict[str, float | None]:
    """By each other label on an axis, the least that it costs more."""
    found: dict[str, float | None] = {}
    for option, seconds in zip(options, extra, strict=True):
        label = option.splits[axis].label
        if label == taken:
            continue
        best = found.get(label)
        if np.isfinite(seconds):
            found[label] = seconds if best is None else min(best, seconds)
        else:
            found.setdefault(label, None)
    return found
