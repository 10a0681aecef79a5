"""The best rejected alternative of an operator: its block solved again without the split that it took.

Everything else in the block is free; the block's boundary (the shardings in which its source comes and its sink
leaves, and where tied parameters rest) is kept, so that the difference is what the whole step would take longer. The
operator that makes a block's sink is weighed in this block and the next together. Prices are seconds alone: where
memory or a simulated step decided, or a search was stopped, an alternative may cost less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from ir.graph import Node
from pdv.pcg.plan_cost import local_cost
from pdv.report.again import Again, Least, Splits, made_in
from pdv.report.loaded import Loaded
from pdv.search.blocks import Block, block_of, split_blocks, tied_params
from pdv.search.solver.configs import ConfigTable
from pdv.search.solver.tables import TooWideError
from pdv.search.solver.tied import TiedTable

# Entries of a table (16 MB) above which a block is first bounded, then solved among what costs little more.
LIMIT = 2_000_000
SLACKS = (0.02, 0.1, 0.5)


@dataclass(frozen=True, slots=True)
class Extra:
    """What a step takes more, in seconds; where not ``exact``, at least so much."""

    seconds: float
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to run an operator: its splits by axis, and what the step takes more with it.

    ``compute_s`` is the part of it that is compute, the rest is communication (and the optimizer's work); None where
    that was not asked for, or is not known exactly.
    """

    splits: tuple[str, ...]
    extra: Extra
    compute_s: float | None = None

    @property
    def communication_s(self) -> float | None:
        """The rest."""
        return None if self.compute_s is None else self.extra.seconds - self.compute_s


@dataclass(frozen=True)
class Weighed:
    """One operator, with what was weighed against its split.

    Attributes:
        best: the cheapest alternative, None if there is none within the same boundary.
        by_axis: for each axis, by each other loop, what the step takes more if it is cut there (None: not possible).
        wide: True if the block is too wide to be solved again.
    """

    best: Alternative | None
    by_axis: tuple[Mapping[str, Extra | None], ...]
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
        self._configs = ConfigTable(self._problem, self._numbers)
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
        for block, following in zip_longest(self.blocks, self.blocks[1:]):
            inner = [node for node in block.nodes if node is not block.sink]
            found |= self._weigh(block, inner)
            if block.sink is not None and following is not None:
                found |= self._weigh(self._join(block, following), [block.sink])
        return found

    def _weigh(self, block: Block, nodes: Sequence[Node]) -> dict[Node, Weighed]:
        """Some operators of one block."""
        places = tuple(block.nodes.index(node) for node in nodes)
        splits = tuple(tuple(self._plan.splits(node).values()) for node in block.nodes)
        apart = tuple(self._apart(node) for node in nodes)
        key = (block.key, self._boundary(block), splits, places, apart)
        if key not in self._known:
            solve = _Solve(self._plan, block, self._configs, self._tied)
            self._known[key] = solve.weigh(dict(zip(places, apart, strict=True)))
        return {block.nodes[number]: weighed for number, weighed in self._known[key].items()}

    def _join(self, block: Block, following: Block) -> Block:
        """Two neighbours as one block."""
        both = (*block.nodes, *following.nodes)
        outputs, updates = (*block.outputs, *following.outputs), (*block.updates, *following.updates)
        joined = block_of(block.source, both, following.sink, outputs, updates, self._numbers)
        return replace(joined, key=joined.key + self._plan.problem.pins.mark(both))

    def _boundary(self, block: Block) -> object:
        sharding = None if block.source is None else made_in(self._plan, block.source)
        stored = [self._plan.assignment.storage.get(param) for param in self._numbers]
        return sharding, tuple(stored), tuple(made_in(self._plan, node) for node in block.read_beside)


class _Solve:
    """One block under the plan's boundary."""

    def __init__(self, plan: Loaded, block: Block, configs: ConfigTable, tied: Mapping[Node, TiedTable]) -> None:
        self._plan = plan
        self._block = block
        self._configs = configs
        self._tied = tied
        self._chosen = {node: plan.assignment.splits[node] for node in block.nodes}
        self._domain = {node: self._numbers(node, lambda splits: True) for node in block.nodes}
        if block.sink is not None:
            leaves = made_in(plan, block.sink)
            self._domain[block.sink] = self._numbers(
                block.sink, lambda splits: tuple(split.result for split in splits) == leaves
            )

    def weigh(self, places: Mapping[int, bool]) -> dict[int, Weighed]:
        """The operators at some places of the block, and whether their alternatives' compute is told apart."""
        try:
            chosen_s = self._again(
                {node: self._numbers(node, splits.__eq__) for node, splits in self._chosen.items()}
            ).value
            extras = self._extras(chosen_s)
        except TooWideError:
            return {place: Weighed(None, (), wide=True) for place in places}
        return {place: self._weigh(self._block.nodes[place], extras, apart) for place, apart in places.items()}

    def _extras(self, chosen_s: float) -> dict[Node, dict[Splits, Extra]]:
        """By operator and splits, what a step takes more; impossible ones are left out."""
        rough = self._again(self._domain, LIMIT)
        bounds = rough.least()
        exact, cut = (bounds, np.inf) if rough.exact else (Least(), chosen_s)
        for slack in () if rough.exact else SLACKS:
            most = chosen_s * (1 + slack)
            left = {
                node: [i for i in numbers if bounds[node].get(self._configs.of(node)[i].splits, np.inf) <= most]
                for node, numbers in self._domain.items()
            }
            fine = self._again(left, LIMIT)
            if not fine.exact:
                break
            exact, cut = fine.least(), most
        return {
            node: {
                splits: _extra(exact.get(node, {}).get(splits, np.inf), bound, cut, chosen_s)
                for splits, bound in costs.items()
                if np.isfinite(bound)
            }
            for node, costs in bounds.items()
        }

    def _weigh(self, node: Node, extras: Mapping[Node, Mapping[Splits, Extra]], apart: bool) -> Weighed:
        own, options = self._chosen[node], extras[node]
        others = [splits for splits in options if splits != own]
        best = min(others, key=lambda splits: (options[splits].seconds, _labels(splits)), default=None)
        found = None
        if best is not None:
            told = apart and options[best].exact
            found = Alternative(_labels(best), options[best], self._compute(node, best) if told else None)
        every = [self._configs.of(node)[i].splits for i in self._domain[node]]
        return Weighed(found, tuple(_along(every, options, axis, _labels(own)[axis]) for axis in range(len(own))))

    def _compute(self, node: Node, splits: Splits) -> float | None:
        """Seconds of compute that the block takes more with other splits of one node; None where it is too wide."""
        again = self._again({**self._domain, node: self._numbers(node, splits.__eq__)}, LIMIT)
        if not again.exact:
            return None
        problem = self._plan.problem
        return sum(
            local_cost(problem, other, config.splits).seconds - local_cost(problem, other, self._chosen[other]).seconds
            for other, config in again.configs().items()
        )

    def _again(self, domain: Mapping[Node, Sequence[int]], limit: float = np.inf) -> Again:
        return Again(self._plan, self._block, self._configs, self._tied, domain, limit)

    def _numbers(self, node: Node, wanted: Callable[[Splits], bool]) -> list[int]:
        """Configurations by number."""
        return [i for i, config in enumerate(self._configs.of(node)) if wanted(config.splits)]


def _extra(known: float, bound: float, cut: float, chosen_s: float) -> Extra:
    """What is known below the cut is exact; what is not costs at least the cut, and its bound."""
    if np.isfinite(known) and known <= cut:
        return Extra(known - chosen_s)
    return Extra(max(bound, cut) - chosen_s, exact=False)


def _labels(splits: Splits) -> tuple[str, ...]:
    return tuple(split.label for split in splits)


def _along(every: Sequence[Splits], options: Mapping[Splits, Extra], axis: int, taken: str) -> dict[str, Extra | None]:
    """By each other label on an axis, the least that it costs more."""
    found: dict[str, Extra | None] = {}
    for splits in every:
        label, extra = splits[axis].label, options.get(splits)
        if label == taken:
            continue
        best = found.setdefault(label, extra)
        if extra is not None and (best is None or extra.seconds < best.seconds):
            found[label] = extra
    return found
