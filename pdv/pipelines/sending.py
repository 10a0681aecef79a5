"""What stages of a pipeline send each other beside what they compute, by arithmetic, before anything is planned.

Entry points: ``sending_seconds`` and ``least_seconds``.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ir.cost_model import PASSES, model_flops
from ir.graph import Graph
from pdv.cluster import Cluster
from pdv.cluster.routing.route import find_route
from pdv.problem import Problem
from pdv.schedule.pieces import pieces

REACHED = 0.9  # of the rate of products, at most, by a whole step


def least_seconds(problem: Problem, cluster: Cluster) -> float:
    """What the model's products take if all devices together compute nothing else."""
    dtypes = [node.type.dtype.torch_name for node in problem.graph.params if node.type.dtype.is_floating]
    name = dtypes[0] if dtypes else "float32"
    peak = sum(entry.device.peak(name) * entry.device.pace * entry.count for entry in cluster.classes)
    return model_flops(problem.graph) * PASSES[problem.mode] / (REACHED * peak)


def sending_seconds(graph: Graph, cluster: Cluster, stages: int) -> float:
    """What a batch takes from stage to stage one way, a share on each device, where that takes longest."""
    size = cluster.num_devices // stages
    links = (find_route(cluster, (at * size, (at + 1) * size)).link for at in range(stages - 1))
    rates = [link.bandwidth_bytes_per_s for link in links]
    return max((sent_bytes(graph) / size / rate for rate in rates if rate), default=0.0)


def sent_bytes(graph: Graph) -> float:
    """Bytes of a batch that pass between two pieces, where as many boundaries have more as have less."""
    passed = passed_bytes(graph)
    return float(np.median(passed)) if len(passed) else 0.0


@lru_cache(maxsize=16)
def passed_bytes(graph: Graph, *, trained: bool = False) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """[borders between pieces] bytes that pass there; ``trained``: of what gets a gradient back, alone."""
    found = pieces(graph)
    passed = np.zeros(found.count)
    for node, home in found.of.items():
        last = max((found.of[user] for user in graph.users[node] if user in found.of), default=home)
        if node.needs_grad or not trained:
            passed[home:last] += node.type.num_bytes
    return passed[:-1]
