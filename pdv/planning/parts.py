"""Parts of a cluster whose devices alone take less time than all of it. Entry point: ``find_part``.

A plan uses all devices of its cluster; where their links, their hosts or the slowest of them cost more than they save,
a few do better. Only said: which devices a program runs on is the user's choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ir.errors import PdvError
from ir.graph import Graph
from pdv.cluster import Cluster
from pdv.cluster.build import levels_of
from pdv.cluster.description import NodeGroup
from pdv.pipelines.sending import least_seconds
from pdv.plan.running import as_run
from pdv.planning.search import Again, Effort, search_problems
from pdv.problem import Problem
from pdv.report.loaded import workload_of_found
from pdv.simulate.step import simulate

WORTH = 0.97  # times the step on all devices, that a part is worth saying for
MOST_S = 5.0  # of search a part
SHARE = 0.1  # of all the time that there is, the same


@dataclass(frozen=True)
class Part:
    """Devices of a cluster, in words, how many, and the step of the plan found for them."""

    what: str
    devices: int
    step_s: float


def find_part(step_s: float, graph: Graph, cluster: Cluster, problems: Again, effort: Effort) -> Part | None:
    """The fastest part that takes clearly less than ``step_s``; None if there is none among those looked at.

    problems: those of a graph on another cluster. What could not compute the model in that time is not looked at.
    """
    best: Part | None = None
    within = replace(effort, budget_s=min(MOST_S, SHARE * effort.budget_s), cache=None, bounded=False)
    for what, part in parts_of(cluster):
        most_s = WORTH * step_s if best is None else best.step_s
        own = [entry.device for entry in part.classes]
        asked = [replace(problem, compute=problem.compute.on(own)) for problem in problems(graph, part)]
        if least_seconds(asked[0], part) > most_s or effort.watch.stopped():
            continue
        found_s = _step_seconds(asked, part, within)
        if found_s is not None and found_s < most_s:
            best = Part(what, part.num_devices, found_s)
    return best


def _step_seconds(problems: Sequence[Problem], cluster: Cluster, effort: Effort) -> float | None:
    try:
        found = search_problems(
            problems, cluster, effort, None, lambda stage, fraction: None, None, pipelines="always"
        ).found
    except PdvError:  # it does not fit there, or cannot be cut so
        return None
    devices = found.on(cluster)
    return simulate(workload_of_found(as_run(found, devices), devices)).step_s


def parts_of(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Parts in words, the smallest first: one device, one node, fewer devices of a node, the nodes of one kind."""
    if cluster.num_devices == 1:
        return
    fastest = max(range(len(cluster.classes)), key=lambda at: _speed(cluster, at))
    yield f"1 {cluster.classes[fastest].device.name}", _of_group(cluster, NodeGroup(1, 1, fastest, ()))
    if cluster.wires:  # what joins fewer of them is nobody's level
        return
    for group in cluster.nodes:
        name = cluster.classes[group.device_class].device.name
        if 1 < group.devices < cluster.num_devices:
            yield f"a node of {group.devices} {name}", _of_group(cluster, replace(group, count=1))
        if cluster.num_nodes == 1 and len(group.inside) == 1:
            for count in _fewer(group.devices):
                inside = (replace(group.inside[0], size=count),)
                yield f"{count} {name}", _of_group(cluster, replace(group, devices=count, inside=inside))
        if 1 < group.count < cluster.num_nodes and len(cluster.network) == 1:
            count = group.count * group.devices
            yield f"the {count} {name} of {group.count} nodes", _of_group(cluster, group)


def _fewer(devices: int) -> list[int]:
    """What divides more ways than an odd number: the power of two below, and one device less."""
    power = 1 << (devices.bit_length() - 1)
    return sorted({power, devices - 1}) if 2 < devices != power else []


def _speed(cluster: Cluster, at: int) -> float:
    device = cluster.classes[at].device
    return device.peak("float32") * device.pace


def _of_group(cluster: Cluster, group: NodeGroup) -> Cluster:
    """Equal nodes of a cluster, joined as they are there."""
    classes = (replace(cluster.classes[group.device_class], count=group.count * group.devices),)
    nodes = (replace(group, device_class=0),)
    network = tuple(replace(tier, nodes=group.count) for tier in cluster.network) if group.count > 1 else ()
    levels = levels_of(nodes, network, classes)
    return replace(
        cluster, levels=levels, classes=classes, nodes=nodes, network=network, wires=(), mesh=None, places=()
    )
