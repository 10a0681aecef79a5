"""What stages of a pipeline send each other at least, wherever a program is cut. Entry point: ``LeastSends``.

A border passes what pieces behind it read of those before it, cut evenly over a stage's devices at best. Which borders
a plan has is free: of p stages, the p - 1 that pass least.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ir.graph import Graph
from pdv.cluster import Link
from pdv.cluster.routing.route import find_route
from pdv.cost.comm import AxisLink, send_seconds
from pdv.pipelines.candidates import Candidate, Space
from pdv.pipelines.sending import passed_bytes
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.lowering.links import at_reached_rate


@dataclass(frozen=True)
class LeastSends:
    """Seconds of one micro-batch at least: over all borders, there and back; and over the border that passes most."""

    all_s: float = 0.0
    most_s: float = 0.0

    @classmethod
    def of(cls, space: Space, candidate: Candidate, rewritten: tuple[Graph, int] | None = None) -> LeastSends:
        """Of plans for the program as written, or as a plan has it for one of so many micro-batches."""
        size, count = candidate.mesh.num_devices, candidate.stages - 1
        links = [_fastest(space, candidate, at) for at in range(count)]
        if not links:
            return cls()
        whole = _least(space.problem.graph, count)
        passed = whole / candidate.micro_batches
        if rewritten is not None:
            other, parts = _least(rewritten[0], count), rewritten[1]
            if len(other) != len(whole) or not np.allclose(parts * other, whole):  # what has no rows stays as it is
                passed = np.minimum(passed[: len(other)], other * min(1.0, parts / candidate.micro_batches))
        each = [min(send_seconds(link, num_bytes / size) for link in links) for num_bytes in passed.tolist()]
        return cls(2 * sum(each), max(each, default=0.0))


def _least(graph: Graph, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Of so many borders, those that pass least, what is sent on there and whose gradient comes back."""
    return np.sort(passed_bytes(graph, trained=True))[:count]


def _fastest(space: Space, candidate: Candidate, stage: int) -> Link:
    """Of the pairs of devices that send from a stage to the next one, and back; all wait for the slowest."""
    cluster, size = space.cluster, candidate.mesh.num_devices
    pairs = [(stage * size + at, (stage + 1) * size + at) for at in {0, size - 1}]
    routes = [find_route(cluster, pair).link for one in pairs for pair in (one, one[::-1])]
    reached = [at_reached_rate(AxisLink(2, link, library=cluster.library), CALIBRATION).link for link in routes]
    return max(reached, key=lambda link: (link.bandwidth_bytes_per_s, -link.latency_s))
