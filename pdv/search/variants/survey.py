"""A cheap look at variants: each mesh axis alone, over all boundary shardings along it.

A problem of one axis has few configurations per operator, so a block is solved in milliseconds. Whether a rewrite lets
something be cut that could not be cut before, or saves work, shows there; what it is worth on the whole mesh does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ir.graph import Node
from ir.mesh import Mesh
from ir.sharding import Sharding
from pdv.pcg.redistribute import all_shardings
from pdv.problem import Pins, Problem
from pdv.search.blocks import Block, tied_params
from pdv.search.solver.block_table import Solved, solve_model
from pdv.search.solver.configs import ConfigTable, KnownConfigs
from pdv.search.solver.network import BlockModel
from pdv.search.solver.tables import Table
from pdv.search.solver.tied import TiedTable, reads
from pdv.search.solver.ties import Ties

LIMIT = 1_000_000  # entries of a table: beyond, a bound is good enough here


class Survey:
    """Prices blocks of one problem along each axis alone."""

    def __init__(self, problem: Problem, known: KnownConfigs | None = None) -> None:
        """``known``: of the problem, or of one that differs in its limits alone."""
        leaving, known = problem.leaving, known or KnownConfigs.of(problem)
        self._axes = [] if problem.mesh.axes else [_Axis(problem, known)]
        for i, (axis, link) in enumerate(zip(problem.mesh.axes, problem.axes, strict=True)):
            left = None if leaving is None else (leaving[i],)
            alone = replace(problem, mesh=Mesh((axis,)), axes=(link,), leaving=left)
            self._axes.append(_Axis(alone, known.axes.setdefault(axis.name, KnownConfigs.of(alone))))

    def tables(self, block: Block) -> tuple[Table, ...]:
        """By axis, seconds as [sources, sinks]."""
        return tuple(axis.table(block) for axis in self._axes)

    def least_seconds(self, block: Block) -> float:
        """What the block costs at least along the first axis: each operator at its cheapest, nothing moved."""
        return sum(self._axes[0].least_seconds(node) for node in block.nodes)


class _Axis:
    def __init__(self, problem: Problem, known: KnownConfigs) -> None:
        pins = problem.pins
        own = Pins(split=pins.split, storage=pins.storage, name=pins.name)
        self._problem = replace(problem, pins=own, memory_limit=float("inf"))
        numbers = tied_params(problem.graph)
        self._configs = ConfigTable(self._problem, numbers, known)
        nodes = problem.graph.nodes
        self._ties = Ties.aside({param: TiedTable(self._configs, param, reads(nodes, param)) for param in numbers})
        self._least: dict[Node, float] = {}

    def table(self, block: Block) -> Table:
        source = block.source
        sources = all_shardings(source.type, self._problem.mesh) if source is not None else ((),)
        model = BlockModel(block, self._configs, self._ties, sources, optimistic=True, limit=LIMIT)
        return by_sink(solve_model(model, 0.0), wanted_sinks(block, self._problem.mesh))

    def least_seconds(self, node: Node) -> float:
        if node not in self._least:
            configs = self._configs.of(node)
            self._least[node] = min((config.totals(0.0)[0] for config in configs), default=float("inf"))
        return self._least[node]


def wanted_sinks(block: Block, mesh: Mesh) -> tuple[Sharding, ...]:
    """All shardings that the sink may have, whatever makes it."""
    return () if block.sink is None else all_shardings(block.sink.type, mesh)


def by_sink(solved: Solved, wanted: Sequence[Sharding]) -> Table:
    """[sources, wanted shardings of the sink]; the best state of every tied parameter."""
    table: Table = solved.table.min(axis=tuple(range(2, solved.table.ndim)), initial=np.inf)
    if solved.block.sink is None:
        return table
    spread = np.full((table.shape[0], len(wanted)), np.inf)
    for number, sharding in enumerate(wanted):
        if sharding in solved.sinks:
            spread[:, number] = table[:, solved.sinks.index(sharding)]
    return spread


def gain(found: Sequence[Table], before: Sequence[Table]) -> tuple[float, float]:
    """(the largest, the mean) relative saving of a variant over what is known, entry by entry, over all axes."""
    savings = []
    for new, old in zip(found, before, strict=True):
        known = np.isfinite(old)
        savings.append(np.maximum(0.0, 1.0 - ratios_of(new[known], old[known])))
    every = np.concatenate([saving.reshape(-1) for saving in savings])
    return (float(every.max()), float(every.mean())) if every.size else (0.0, 0.0)


def ratio(new: float, old: float) -> float:
    """What ``new`` is relative to ``old``; of nothing, the same or infinitely more."""
    if old == 0.0:
        return 1.0 if new == 0.0 else float("inf")
    return new / old


def ratios_of(new: Table, old: Table) -> Table:
    """``ratio``, entry by entry."""
    same = np.where(new == old, 1.0, np.inf)
    found: Table = np.divide(new, old, out=same, where=old != 0.0)
    return found
