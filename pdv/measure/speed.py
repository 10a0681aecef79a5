"""How fast this machine is, over what is known of its kind of device: what `speed:` of a cluster file says.

Two small transformers are trained for a second on as many processes as a plan will have, all at once, so that what
neighbours take of caches, memory and clock is in it; their prices are those of kernels within a step. Processor time
counts, so that it matters little who else waits for the cores. Entry point: ``present_speed``.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from functools import partial

from ir.cost_model import Query
from ir.errors import UsageError
from ir.graph import Graph
from pdv.cluster import Device
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph
from pdv.prices import cost_model
from pdv.simulate.calibration import CALIBRATION

# Of the width of those on which the constants of a step on CPUs were fitted (benchmarks/ranking.py --fit), so that what
# the model errs at other widths is no part of a machine's speed.
PROGRAMS = (
    ("gpt:layers=2,hidden=256,heads=8,seq=64,vocab=2048", 8),
    ("llama:layers=2,hidden=256,heads=8,kv_heads=8,ffn=1024,seq=128,vocab=2048", 4),
)
SECONDS = 1.5


@dataclass(frozen=True)
class Speed:
    """Of a process: how much faster than predicted; the deviation of its logarithm over programs and processes."""

    factor: float
    spread: float


def present_speed(device: Device, processes: int, seconds: float = SECONDS) -> Speed:
    """Of a CPU's core, while so many processes of this machine compute.

    Raises:
        UsageError: if it is no CPU, torch is missing, or the processes do not run.
    """
    if device.kind != "cpu":
        raise UsageError(f"the speed of {device.name} is not measured", "CPUs", "Say what limits it: `power`, `clock`")
    try:
        from learned_cost.profile.passes import measure_passes
    except ImportError as error:
        raise UsageError(f"measuring needs {error.name}", mend="pip install 'pipedejavu[learned]'") from None
    programs = [partial(graph, arch(text), batch, layout="exported") for text, batch in PROGRAMS]
    try:
        measured = measure_passes(programs, processes, seconds)
    except RuntimeError as error:
        raise UsageError(f"{processes} processes could not be measured: {error}", mend="Leave `speed` out") from error
    whole = replace(device, share=1.0, speed=1.0)
    expected = [_predict(make(), whole) for make in programs]
    logs = [math.log(one / found) for one, of in zip(expected, measured, strict=True) for found in of]
    return Speed(math.exp(statistics.fmean(logs)), statistics.pstdev(logs))


def _predict(program: Graph, device: Device) -> float:
    """Seconds of its passes within a step."""
    nodes = [node for node in program.nodes if not node.is_leaf]
    queries = [Query.of(node, node.loops, train=True) for node in nodes]
    found = cost_model(None, [device]).nodes(queries)
    return CALIBRATION.kernels_cpu * sum(way.mean_s for estimate in found for way in estimate)
