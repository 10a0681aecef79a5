"""Who decides a tied parameter: the blocks that read it together, one block alone, or each block for itself.

What one block alone reads, that block decides. What several read is an axis of their tables, as long as these stay
small. Beyond that it is *loose*: each block decides for itself and pays its share of what the parameter costs, which
bounds every plan from below, for all blocks deciding alike pay the whole. A plan is found with its state *fixed*.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ir.graph import Node
from ir.mesh import Mesh
from ir.sharding import Sharding
from pdv.pcg.redistribute import all_shardings
from pdv.search.blocks import Block
from pdv.search.solver.configs import ConfigTable
from pdv.search.solver.tables import Table, table_of
from pdv.search.solver.tied import TiedTable

# Entries of a block's table, and of what is known of a chain at one place: with the first axis alone, which usually is
# an embedding that is the last product's weight too, and with all of them, for which the chain is walked often.
ENTRIES = 4_000_000
ALL_ENTRIES = 250_000

Reading = tuple[Node, Sharding, bool]
"""A tied parameter, what somebody reads of it, and whether that is kept for backward."""


@dataclass(frozen=True)
class Ties:
    """Every tied parameter of a program, by who decides it.

    Attributes:
        tables: of all of them.
        axes: those that blocks decide together.
        shares: of the others, what part of its own cost each block pays that reads it.
        fixed: of the others, those that have one state.
    """

    tables: Mapping[Node, TiedTable]
    axes: tuple[Node, ...]
    shares: Mapping[Node, float] = field(default_factory=dict)
    fixed: Mapping[Node, int] = field(default_factory=dict)

    @classmethod
    def together(cls, tables: Mapping[Node, TiedTable]) -> Ties:
        """All are axes."""
        return cls(tables, tuple(tables))

    @classmethod
    def aside(cls, tables: Mapping[Node, TiedTable]) -> Ties:
        """Each block decides for itself, and where a parameter rests costs nothing."""
        return cls(tables, (), dict.fromkeys(tables, 0.0))

    @classmethod
    def of(cls, tables: Mapping[Node, TiedTable], blocks: Sequence[Block], configs: ConfigTable, mesh: Mesh) -> Ties:
        """As many axes as there is room for, the largest parameters first."""
        readers: Counter[Node] = Counter()
        for block in blocks:
            readers.update({operand for node in block.nodes for operand in node.operands if operand in tables})
        joint = [param for param in tables if readers[param] > 1]
        axes = _roomy(sorted(joint, key=lambda param: -param.type.num_bytes), tables, blocks, configs, mesh)
        shares = {param: 1 / max(1, readers[param]) for param in tables if param not in axes}
        return cls(tables, tuple(param for param in tables if param in axes), shares)

    @property
    def loose(self) -> tuple[Node, ...]:
        """Those that blocks may decide differently."""
        return tuple(p for p, share in self.shares.items() if share < 1.0 and p not in self.fixed)

    def inside(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """Those that are no axis and that nodes read, in order of their first reads."""
        read = dict.fromkeys(operand for node in nodes for operand in node.operands)
        return tuple(operand for operand in read if operand in self.shares)

    def states(self, param: Node) -> Sequence[int]:
        """By number in its table."""
        return (self.fixed[param],) if param in self.fixed else range(len(self.tables[param].states))

    def share(self, param: Node) -> float:
        """What part of its own cost a block pays that decides it; what is fixed is paid once, by none."""
        return 0.0 if param in self.fixed else self.shares[param]

    def fixing(self, param: Node, state: int) -> Ties:
        """One more fixed."""
        return replace(self, fixed={**self.fixed, param: state})

    def own(self, price: float) -> Table:
        """[axes…] what parameters cost by themselves that no block decides."""
        fixed = [self.tables[param].own_parts(state) for param, state in self.fixed.items()]
        total = table_of((1,) * len(self.axes), sum(seconds + price * held for seconds, held in fixed))
        for position, param in enumerate(self.axes):
            own = self.tables[param].own(price)
            total = total + own.reshape([-1 if i == position else 1 for i in range(len(self.axes))])
        return total

    def own_parts(self, states: Sequence[int]) -> tuple[float, float]:
        """(seconds, bytes) of the same, at one state of each axis."""
        settled = [*zip(self.axes, states, strict=True), *self.fixed.items()]
        found = [self.tables[param].own_parts(state) for param, state in settled]
        return sum(seconds for seconds, _ in found), sum(held for _, held in found)

    def settled(self, readings: Mapping[Reading, int], price: float) -> Ties:
        """Loose ones fixed, each where it costs least if it is read so often as said.

        Where no state serves all of its readers, that which costs least by itself.
        """
        costs = {param: self.tables[param].own(price) for param in self.loose}
        totals = dict(costs)
        for (param, need, keep), times in readings.items():
            if param in totals:
                seconds, held = self.tables[param].use([need], keep=keep, optimistic=False)
                added = seconds[:, 0] if held is None else seconds[:, 0] + price * held[:, 0]
                totals[param] = totals[param] + times * added
        chosen = {p: int((total if np.isfinite(total).any() else costs[p]).argmin()) for p, total in totals.items()}
        return replace(self, fixed={**self.fixed, **chosen})


def _roomy(
    params: Sequence[Node],
    tables: Mapping[Node, TiedTable],
    blocks: Sequence[Block],
    configs: ConfigTable,
    mesh: Mesh,
) -> set[Node]:
    """Those of ``params``, in order, whose states all blocks' tables have room for beside those before."""
    if not params:
        return set()
    firsts = {block.key: block for block in reversed(blocks)}
    boundaries = {key: _boundary(block, configs, mesh) for key, block in firsts.items()}
    reads = {key: {x for node in block.nodes for x in node.operands if x in tables} for key, block in firsts.items()}
    widest = max((_sources(block, mesh) for block in firsts.values()), default=1)
    axes: set[Node] = set()
    for param in params:
        wider = {*axes, param}
        sizes = {key: boundaries[key] * _states(wider & read, tables) for key, read in reads.items() if param in read}
        if max(*sizes.values(), widest * _states(wider, tables)) <= (ALL_ENTRIES if axes else ENTRIES):
            axes = wider
    return axes


def _states(params: Iterable[Node], tables: Mapping[Node, TiedTable]) -> int:
    return math.prod(len(tables[param].states) for param in params)


def _boundary(block: Block, configs: ConfigTable, mesh: Mesh) -> int:
    """Entries of a block's table for one state of every tied parameter."""
    return _sources(block, mesh) * (len(configs.of(block.sink)) if block.sink is not None else 1)


def _sources(block: Block, mesh: Mesh) -> int:
    return len(all_shardings(block.source.type, mesh)) if block.source is not None else 1
