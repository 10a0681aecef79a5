"""What would make a program fit that does not: changes tried in order of disturbance, each with what it then needs.

Parameters at rest cut along every axis (ZeRO-3) need no entry: such plans are among those that were searched.
Entry point: ``find_remedies``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ir.errors import NoPlanFitsError
from ir.graph import Graph
from ir.scaling.rows import micro_batch
from ir.types import DType
from pdv.cluster import Cluster
from pdv.cluster.units import MEMORY
from pdv.memory import needed_bytes, step_memory
from pdv.passes.precision import with_dtype
from pdv.pcg.spread import spread_to_pcg
from pdv.problem import Problem
from pdv.problem.problem import offloaded
from pdv.problem.workload import Recompute, Workload, workload_of_pcg
from pdv.schedule.stages import units
from pdv.search.best import BestPlan
from pdv.search.meshes import NearestTooLargeError, search_meshes
from pdv.search.refusals import LESS_EACH

MICRO_BATCHES = (2, 4, 8, 16)
MOST_DEVICES = 64  # times as many as there are
WITHIN_S, ALL_S = 10.0, 30.0  # CPU-seconds of each search, and of all together: what is not looked at then is not said

AGAIN: tuple[tuple[Recompute, str], ...] = (
    ("light", "what is cheap to make again recomputed (--recompute light)"),
    ("full", "each layer recomputed from its input"),
)
HOSTED: tuple[tuple[Recompute, str], ...] = (
    ("hosted", "--offload activations"),
    ("full-hosted", "--offload activations --recompute full"),
)

Problems = Callable[[Graph, Cluster], Sequence[Problem]]
"""The problems of a graph on a cluster, one a mesh; limits and mode as the user asked."""
Needs = Callable[..., float | None]
"""What the best of all plans of problems on a cluster needs, within seconds; ``hosted``: layers may keep on hosts."""
Need = Callable[..., float | None]
"""The same of a graph on a cluster, asked by ``Problems``, in what time there is; None, too, once there is none."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change, what a device then needs, and whether that is within the limit."""

    change: str
    needed_bytes: float
    fits: bool

    def as_dict(self) -> dict[str, str | float | bool]:
        """As JSON-ready data."""
        return {"change": self.change, "needed_bytes": self.needed_bytes, "fits": self.fits}


def need_of(cluster: Cluster) -> Callable[[BestPlan], float]:
    """What a plan's emitted program takes of a device of ``cluster``."""
    known: dict[str, float] = {}

    def of(found: BestPlan) -> float:
        if found.pcg.digest not in known:
            known[found.pcg.digest] = needed_bytes(_work(found, cluster))
        return known[found.pcg.digest]

    return of


def with_remedies(error: NoPlanFitsError, remedies: Sequence[Remedy]) -> NoPlanFitsError:
    """The refusal, with what would help."""
    fitting = [remedy for remedy in remedies if remedy.fits]
    lines = "; ".join(f"{remedy.change} ({MEMORY.format(remedy.needed_bytes)} per device)" for remedy in fitting)
    tried = "None of the changes that were tried would do alone: combine them"
    mend = f"What would fit: {lines}" if lines else tried if remedies else LESS_EACH
    what = str(error).removeprefix(f"{error.slug}: ").split(". ")[0].rstrip(".")
    searched = "Weights, gradients and optimizer state cut along every axis were among the plans searched"
    return NoPlanFitsError(
        what, searched, mend, needed_bytes=error.needed_bytes, bound_s=error.bound_s,
        ways=tuple(remedy.as_dict() for remedy in remedies),
    )  # fmt: skip


def find_remedies(
    problems: Problems,
    graph: Graph,
    cluster: Cluster,
    error: NoPlanFitsError,
    limit: float,
    needs: Needs | None = None,
    budget_s: float = ALL_S,
) -> list[Remedy]:
    """Changes that were tried, in order of disturbance; of each kind the mildest that fits, or the last tried.

    needs: of plans in stages and micro-batches, some of them recomputed, where the search was over these.
    budget_s: CPU-seconds behind which no more are tried.
    """
    found: list[Remedy] = []
    deadline = time.thread_time() + min(ALL_S, budget_s)

    def need(problems: Problems, graph: Graph, cluster: Cluster, **how: Any) -> float | None:  # Any: as of ``Need``
        within_s = min(WITHIN_S, deadline - time.thread_time())
        if within_s <= 0.0:
            return None
        if needs is None:
            return _smallest(problems(graph, cluster), cluster, within_s, **how)
        return needs(problems(graph, cluster), cluster, within_s, **how)

    if problems(graph, cluster)[0].train:
        if needs is None:
            found += _mildest(_accumulate(problems, graph, cluster, limit, need))
            found += in_layers(error, cluster, limit)
        found += _offload(problems, graph, cluster, limit, need)
    if any(node.type.dtype is DType.F32 and node.needs_grad for node in graph.params):
        narrow = need(problems, with_dtype(graph, DType.BF16), cluster)
        found += [] if narrow is None else [Remedy("--dtype bfloat16", narrow, narrow <= limit)]
    found += _mildest(_larger(problems, graph, cluster, error.needed_bytes, limit, need))
    return found


def _mildest(ways: Iterator[Remedy]) -> list[Remedy]:
    last: Remedy | None = None
    for way in ways:
        last = way
        if way.fits:
            break
    return [] if last is None else [last]


def _accumulate(problems: Problems, graph: Graph, cluster: Cluster, limit: float, need: Need) -> Iterator[Remedy]:
    """Gradients of several smaller batches added up, one optimizer step behind them."""
    for count in MICRO_BATCHES:
        smaller = micro_batch(graph, count)
        if smaller is None:
            return
        needed = need(problems, smaller, cluster, micro_batches=count)
        if needed is None:
            return
        yield Remedy(f"the batch in {count} parts, their gradients added up", needed, needed <= limit)


def in_layers(error: NoPlanFitsError, cluster: Cluster, limit: float) -> list[Remedy]:
    """The nearest plan with layers, or attention alone, run again in backward; what layers keep on the hosts.

    On the hosts where that is another memory than the devices', has room, and there are layers.
    """
    if not isinstance(error, NearestTooLargeError):
        return []
    nearest = error.nearest
    work = _work(nearest, cluster)
    layers = units(nearest.solution.graph)
    inside = {
        node: unit for node, unit in spread_to_pcg(nearest.derived, layers.of).items() if 0 <= unit < layers.count
    }
    stages = replace(work.stages, layer_of=inside if layers.layers else {})

    def of(kind: Recompute, change: str) -> Remedy:
        again = replace(work, execution=replace(work.execution, recompute=kind), stages=stages)
        memory = step_memory(again)
        needed = memory.worst.least_bytes
        there = all(one.host_bytes <= one.device.host_limit_bytes for one in memory.stages)
        return Remedy(change, needed, needed <= limit and there)

    found = _mildest(of(kind, change) for kind, change in AGAIN)
    if layers.layers and all(entry.device.kind != "cpu" for entry in cluster.classes):
        found += _mildest(of(kind, change) for kind, change in HOSTED)
    return found


def _offload(problems: Problems, graph: Graph, cluster: Cluster, limit: float, need: Need) -> list[Remedy]:
    """The optimizer in the memory of the hosts, where that is another one and is not done yet.

    What layers keep, too, in plans in parts.
    """
    devices = [entry.device for entry in cluster.classes]

    def there(graph: Graph, cluster: Cluster) -> list[Problem]:
        return [offloaded(problem, devices) for problem in problems(graph, cluster)]

    first = problems(graph, cluster)[0]
    if first.precision.on_host or any(device.kind == "cpu" for device in devices):
        return []
    needed = need(there, graph, cluster, hosted=True)
    return [] if needed is None else [Remedy("--allow offload, the optimizer on the hosts", needed, needed <= limit)]


def _larger(
    problems: Problems, graph: Graph, cluster: Cluster, needed: float, limit: float, need: Need
) -> Iterator[Remedy]:
    """More of the same nodes, by powers of two from where all would fit if it were cut evenly; not of a lone device."""
    if not cluster.levels:  # nobody says what would join it with others
        return
    times = 2 ** max(1, math.ceil(math.log2(needed / limit))) if 0 < needed < math.inf else 2
    while times <= MOST_DEVICES:
        larger = multiply_nodes(cluster, times)
        found = need(problems, graph, larger)
        if found is not None:
            yield Remedy(f"{larger.num_devices} devices", found, found <= limit)
        times *= 2


def multiply_nodes(cluster: Cluster, times: int) -> Cluster:
    """As many times the nodes; of a single node, its devices."""
    outer, *inner = cluster.levels
    levels = (replace(outer, size=outer.size * times), *inner)
    classes = tuple(replace(entry, count=entry.count * times) for entry in cluster.classes)
    if cluster.num_nodes > 1:
        nodes = tuple(replace(group, count=group.count * times) for group in cluster.nodes)
    else:
        nodes = tuple(
            replace(
                group,
                devices=group.devices * times,
                inside=tuple(
                    replace(level, size=level.size * times) if place == 0 else level
                    for place, level in enumerate(group.inside)
                ),
            )
            for group in cluster.nodes
        )
    network = tuple(
        replace(tier, nodes=tier.nodes * times) if place == 0 else tier for place, tier in enumerate(cluster.network)
    )
    return replace(
        cluster, levels=levels, classes=classes, nodes=nodes, network=network, mesh=None, wires=(), places=()
    )


def _smallest(
    problems: Sequence[Problem], cluster: Cluster, within_s: float, *, micro_batches: int = 1, hosted: bool = False
) -> float | None:
    """What the best plan of the whole batch that fits needs, or else the smallest; None if no plan was found at all."""
    del hosted  # layers of one stage are told of by ``in_layers``

    def of(found: BestPlan) -> float:
        work = _work(found, cluster)
        return needed_bytes(replace(work, execution=replace(work.execution, micro_batches=micro_batches)))

    try:
        return of(search_meshes(problems, budget_s=within_s, needs=of))
    except NoPlanFitsError as error:
        return None if math.isinf(error.needed_bytes) else error.needed_bytes


def _work(found: BestPlan, cluster: Cluster) -> Workload:
    """A plan as its emitted program runs it."""
    solution = found.solution
    return workload_of_pcg(replace(solution.problem, graph=solution.graph), found.pcg, cluster)
