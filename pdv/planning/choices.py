"""What is chosen for a whole plan: in which format products are, and whether the optimizer is on the host.

Each is fixed, or allowed: then the best of all is taken, and what changes nothing comes first. Nothing is ever taken
unasked. Entry points: ``read_choices`` and ``search_choices``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ir.errors import NoPlanFitsError, PinsError, UsageError, did_you_mean
from ir.graph import Graph
from pdv import config
from pdv.cluster import Device
from pdv.cluster.units import MEMORY
from pdv.memory import StepMemory
from pdv.pcg.fused import fused_of
from pdv.pipelines.pinned import Pinned
from pdv.planning.products import ALLOWED, read_formats
from pdv.planning.search import LEAST_S, SearchResult
from pdv.problem import Problem
from pdv.problem.formats import Products
from pdv.problem.problem import offloaded
from pdv.problem.workload import IN_HALVES, STALE

OPTIMIZER, ACTIVATIONS, ALL = "optimizer", "activations", "all"
OFFLOADS = (config.OFFLOAD, OPTIMIZER, ACTIVATIONS, ALL)
"""What may be kept in the memory of hosts."""
ALLOW_OFFLOAD = "offload"


@dataclass(frozen=True, slots=True)
class Choice:
    """Of a plan; ``on_host``: what it trains, and the optimizer, are in the host's memory; ``compiled``: it runs so."""

    products: Products | None
    on_host: bool = False
    compiled: bool = False

    def of(self, problem: Problem, devices: Sequence[Device]) -> Problem:
        """The problem with it, on such devices."""
        fused = fused_of(problem.graph, problem.compute) if self.compiled else None
        problem = replace(problem, products=self.products, fused=fused)
        return offloaded(problem, devices) if self.on_host else problem


def read_choices(
    products: str,
    offload: str,
    allow: Sequence[str],
    mode: config.Mode,
    pinned: Pinned,
    graph: Graph,
    devices: Sequence[Device],
    *,
    compiled: bool = False,
) -> tuple[Choice, ...]:
    """All that is to be searched, by how much it changes.

    Of devices that are CPUs the host's memory is their own: there it is done where it is fixed, and never allowed.

    Raises:
        UsageError: if there is nothing of that name, or what is fixed does not go with the rest.
    """
    known = (*ALLOWED, ALLOW_OFFLOAD)
    for name in allow:
        if name not in known:
            what = f"nothing is called {name!r} that could be allowed"
            raise UsageError(what, f"Allowed: {', '.join(known)}", did_you_mean(name, known))
    if offload not in OFFLOADS:
        what = f"offload: {offload!r} is not known"
        raise UsageError(what, f"Allowed: {', '.join(OFFLOADS)}", did_you_mean(offload, OFFLOADS))
    if offload != config.OFFLOAD and (mode != "train" or ALLOW_OFFLOAD in allow):
        found = "inference" if mode != "train" else f"allowed {ALLOW_OFFLOAD}"
        raise UsageError(f"offload {offload!r} with {found}", "It is of training, and fixed", "Leave one of them out")
    allowed_formats = [name for name in allow if name in ALLOWED and pinned.slices is None]
    formats = read_formats(products, allowed_formats, mode, pinned, graph, devices)
    gains = _gains(allow, mode, devices) and pinned.schedule not in STALE and pinned.slices is None
    ways = (True,) if offload in {OPTIMIZER, ALL} else (False, True) if gains else (False,)
    return tuple(Choice(one, on_host, compiled) for on_host in ways for one in formats)


def with_activations(
    pinned: Pinned, offload: str, allow: Sequence[str], mode: config.Mode, devices: Sequence[Device]
) -> Pinned:
    """What is pinned, and whether layers leave what they keep for backward in the host's memory, or may."""
    may = _gains(allow, mode, devices) and pinned.schedule not in IN_HALVES and pinned.slices is None
    return replace(pinned, activations="host" if offload in {ACTIVATIONS, ALL} else "either" if may else None)


def _gains(allow: Sequence[str], mode: config.Mode, devices: Sequence[Device]) -> bool:
    """Whether it is allowed, and of any use: a CPU is its own host."""
    return ALLOW_OFFLOAD in allow and mode == "train" and all(device.kind != "cpu" for device in devices)


def check_host(memory: StepMemory) -> None:
    """Whether what a plan has on hosts is there, where a cluster file says how much that is.

    Raises:
        NoPlanFitsError: if it is not.
    """
    for stage in memory.stages:
        limit = stage.device.host_limit_bytes
        if stage.host_bytes > limit:
            needed, there = MEMORY.format(stage.host_bytes), MEMORY.format(limit)
            what = f"the plan found needs {needed} of its host for each {stage.device.name}, which has {there}"
            mend = "Cut parameters over more devices, or leave out what is offloaded"
            raise NoPlanFitsError(what, mend=mend, needed_bytes=stage.host_bytes)


def search_choices(
    choices: Sequence[Choice],
    budget_s: float,
    search: Callable[[Choice, float, bool], SearchResult],
    step_s: Callable[[SearchResult], float],
    stopped: Callable[[], bool],
) -> SearchResult:
    """What is found whose simulated step is shortest; its bound is of all with which a plan fits.

    budget_s: CPU-seconds of all searches; each gets an equal part of what those before it left.
    search: for one choice, within seconds; and whether nothing was found and it is the last, whose refusal is said.

    Raises:
        NoPlanFitsError: that of the last choice, if nothing fits with any.
        PinsError: the same, where that is the pins' doing.
    """
    results: list[SearchResult] = []
    deadline, skipped = time.thread_time() + budget_s, False
    for number, one in enumerate(choices):
        last = number == len(choices) - 1
        left_s = max(deadline - time.thread_time(), LEAST_S) if number else budget_s
        skipped = bool(results) and (time.thread_time() >= deadline or stopped())
        if skipped:
            break
        try:
            results.append(search(one, left_s / (len(choices) - number), last and not results))
        except (NoPlanFitsError, PinsError):
            if last and not results:
                raise
    best = results[0] if len(results) == 1 else min(results, key=step_s)
    bound = 0.0 if skipped else min(result.found.lower_bound_s for result in results)
    found = replace(best.found, lower_bound_s=bound)
    return SearchResult(found, sum(result.seconds for result in results))
