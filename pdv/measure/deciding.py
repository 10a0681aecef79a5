"""Which kernels decide between a plan and its nearest rivals, so that they are measured first.

The rival of an operator is the best cut that was not taken (`pdv.report.alternatives`). What is gained by knowing both
kernels is how much a step is expected to be shortened by changing one's mind (knowledge gradient; Frazier, Powell and
Dayanik, SIAM J. Control Optim. 2008): nothing where the rival is far behind, or where both are known already. Entry
points: ``deciding``, ``of_package``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from ir.cost_model import Query
from ir.graph import Node
from ir.operator import Split
from ir.verify import node_local_loops
from pdv.cluster import Cluster
from pdv.measure.bench import record_of
from pdv.pcg.plan_cost import local_costs
from pdv.plan.package import read_document
from pdv.prices import priced_by
from pdv.report.alternatives import Weighing
from pdv.report.loaded import Loaded, load_plan

Splits = tuple[Split, ...]


@dataclass(frozen=True)
class Decision:
    """An operator as it is cut and as its rival would be, by how much a step is expected to gain by measuring both."""

    gain_s: float
    own: Query
    rival: Query | None


def deciding(plan: Loaded) -> list[Decision]:
    """Classes of equal operators, those whose measurement gains most first; of equal gain the longest first."""
    weighed = Weighing(plan).all()
    nodes = [node for node in weighed if node.op.kernel]
    own = [plan.assignment.splits[node] for node in nodes]
    best = [weighed[node].best for node in nodes]
    rivals = [None if b is None else _named(node, b.splits) for node, b in zip(nodes, best, strict=True)]
    costs = local_costs(plan.problem, list(zip(nodes, own, strict=True)))
    others = local_costs(plan.problem, [(node, r or o) for node, r, o in zip(nodes, rivals, own, strict=True)])
    gains: dict[object, float] = {}
    seconds: dict[object, float] = {}
    asked: dict[object, tuple[Query, Query | None]] = {}
    for node, splits, other, alternative, cost, theirs in zip(nodes, own, rivals, best, costs, others, strict=True):
        mine = _query(plan, node, splits)
        his = None if other is None else _query(plan, node, other)
        key = repr((_identity(mine), None if his is None else _identity(his)))
        asked.setdefault(key, (mine, his))
        seconds[key] = seconds.get(key, 0.0) + cost.seconds
        std = math.hypot(*(e.std_s for c in (cost, theirs) for e in c.estimates))
        extra = math.inf if alternative is None else alternative.extra.seconds
        gains[key] = gains.get(key, 0.0) + expected_gain(extra, std)
    order = sorted(asked, key=lambda key: (-gains[key], -seconds[key], str(key)))
    return [Decision(gains[key], *asked[key]) for key in order]


def expected_gain(extra_s: float, std_s: float) -> float:
    """Seconds by which the better of two is expected to be shorter than the first, where the second is thought to take
    ``extra_s`` more, give or take ``std_s``.
    """
    if std_s <= 0.0 or math.isinf(extra_s):
        return 0.0
    z = extra_s / std_s
    return max(0.0, std_s * NormalDist().pdf(z) - extra_s * NormalDist().cdf(-z))


def queries(decisions: Sequence[Decision]) -> list[Query]:
    """In order, each once: an operator as it is cut, then its rival's."""
    every = [query for decision in decisions for query in (decision.own, decision.rival) if query is not None]
    return list({repr(_identity(query)): query for query in every}.values())


def of_package(directory: str | os.PathLike[str], cost: str | None = None) -> list[Query]:
    """The deciding questions of a saved plan.

    Raises:
        UsageError: if the directory is no package, or the plan was priced by other files than are here.
    """
    return queries(deciding(load_plan(directory, priced_by(read_document(directory), cost))))


def processors_of(directory: str | os.PathLike[str], devices: Path | None = None) -> str | None:
    """The record of the processors that a saved plan is for; None if there is none, or it is for other devices.

    A driver says of a GPU which it is. Of a CPU it says a name that no plan is for: what is measured for a plan is
    measured as what the plan is for, as ``pdv bench`` has it.

    Raises:
        UsageError: if the directory is no package.
    """
    document = read_document(directory)
    device = Cluster.from_dict(document["cluster"]).classes[0].device
    return None if device.kind == "gpu" else record_of(document, devices)


def _query(plan: Loaded, node: Node, splits: Splits) -> Query:
    return Query.of(node, node_local_loops(node, splits, plan.problem.mesh), train=plan.problem.train)


def _named(node: Node, labels: Sequence[str]) -> Splits:
    by_label = {split.label: split for split in node.op.splits(node.loops)}
    return tuple(by_label[label] for label in labels)


def _identity(query: Query) -> tuple[object, ...]:
    types = tuple((t.shape, t.dtype.value) for t in (*query.operands, query.result))
    return query.op.name, tuple(query.loops.extents.items()), types, tuple(query.attrs.items()), query.wanted
