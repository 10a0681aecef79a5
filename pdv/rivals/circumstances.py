"""The model planned again where one thing is another: faster links, more nodes, a larger batch, half the precision.

Entry point: ``circumstances``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ir.graph import Graph
from ir.scaling.rows import more_rows
from ir.types import DType
from pdv import config
from pdv.cluster import Cluster
from pdv.guard import Progress
from pdv.passes.precision import with_dtype
from pdv.planning.problems import plan_problems
from pdv.planning.search import Effort, search_problems
from pdv.report.remedies import multiply_nodes
from pdv.rivals.setting import WITHIN_S, Row, Setting, row
from pdv.search.best import BestPlan

QUIET: Progress = lambda stage, fraction: None  # noqa: E731  # the callback's signature


def circumstances(setting: Setting) -> list[Row]:
    """One row each, in order."""
    return [_again(name, replace(setting, **changed)) for name, changed in _changes(setting)]


def _changes(setting: Setting) -> Iterator[tuple[str, dict[str, Any]]]:  # Any: fields of a Setting
    graph, cluster = setting.graph, setting.cluster
    if cluster.num_devices > 1:
        yield "links twice as fast", {"cluster": faster_links(cluster, 2.0)}
    if (larger := add_nodes(cluster, 2)) is not None:
        yield "two more nodes", {"cluster": larger}
    if cluster.num_devices > 1:
        what = "nodes" if cluster.num_nodes > 1 else "devices"
        yield f"twice the {what}", {"cluster": multiply_nodes(cluster, 2)}
    yield "the batch doubled", {"graph": more_rows(graph, 2)}
    if any(node.type.dtype is DType.F32 and node.needs_grad for node in graph.params):
        yield "bfloat16", {"graph": with_dtype(graph, DType.BF16)}


def _again(name: str, setting: Setting) -> Row:
    return row(name, lambda: _plan(setting.graph, setting), setting.cluster, setting)


def _plan(graph: Graph, setting: Setting) -> BestPlan:
    """The best plan, pipelines where they are needed."""

    def ask(graph: Graph, cluster: Cluster) -> Any:  # Any: as search_problems takes it
        return plan_problems(
            graph, cluster, mode=setting.mode, memory_limit=setting.memory_limit, compute=setting.compute
        )

    pipelines: config.Pipelines = "always" if setting.stages > 1 else "where-needed"
    effort = Effort(config.SEARCH, WITHIN_S)
    problems = ask(graph, setting.cluster)
    return search_problems(problems, setting.cluster, effort, None, QUIET, ask, pipelines=pipelines).found


def faster_links(cluster: Cluster, times: float) -> Cluster:
    """Every link of a cluster with so many times the bandwidth."""
    return Cluster.from_dict(_scale(cluster.as_dict(), times))


def _scale(value: Any, times: float) -> Any:  # Any: JSON
    if isinstance(value, Mapping):
        return {
            name: one * times if name in ("bandwidth_bytes_per_s", "uplink_bytes_per_s") and one else _scale(one, times)
            for name, one in value.items()
        }
    return [_scale(one, times) for one in value] if isinstance(value, list | tuple) else value


def add_nodes(cluster: Cluster, more: int) -> Cluster | None:
    """So many more of the same nodes, where they are on one network and alike; else None."""
    plain = len(cluster.nodes) == len(cluster.network) == 1 and not cluster.wires
    if not (plain and cluster.num_nodes > 1 and cluster.levels[0].size == cluster.num_nodes):
        return None
    (nodes,), (tier,), (outer, *inner) = cluster.nodes, cluster.network, cluster.levels
    (devices,) = cluster.classes
    return replace(
        cluster,
        levels=(replace(outer, size=outer.size + more), *inner),
        classes=(replace(devices, count=devices.count + more * nodes.devices),),
        nodes=(replace(nodes, count=nodes.count + more),),
        network=(replace(tier, nodes=tier.nodes + more),),
        mesh=None,
    )
