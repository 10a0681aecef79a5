"""A program's forward and backward passes on every process of a machine at once: processor seconds of each.

What a step meets is in it that a kernel in a loop of its own does not meet: other operands each time, memory that is
new, and neighbours that fill caches and draw power. Entry point: ``measure_passes``.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from ir.graph import Graph, Node
from learned_cost.profile.programs.pieces import noise
from learned_cost.profile.programs.subgraphs import callable_of

Made = Callable[[], Graph]  # in each process, for a graph is sent to none
START_S = 120.0  # that processes may take to start on a busy machine
IDS = 64  # rows that tables have at least
_together: Barrier | None = None  # of the processes of one measurement, in each of them


def measure_passes(programs: Sequence[Made], processes: int, seconds: float) -> list[list[float]]:
    """Of each program, by process, the median over the passes that about so many seconds allow; one thread each.

    Raises:
        RuntimeError: if a process ended or did not start.
    """
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")  # forked ones import nothing
    torch.set_num_threads(1)  # a process that is forked has none of the threads of a pool
    pool = ProcessPoolExecutor(processes, context, initializer=_meet, initargs=(context.Barrier(processes),))
    with pool:
        asked = [pool.submit(_passes, programs, seconds / len(programs)) for _ in range(processes)]
        found = [one.result() for one in asked]
    return [list(of) for of in zip(*found, strict=True)]


def _meet(barrier: Barrier) -> None:
    global _together  # noqa: PLW0603  # a barrier is given to processes as they start, and by no task
    _together = barrier


def _passes(programs: Sequence[Made], seconds: float) -> list[float]:
    torch.set_num_threads(1)
    assert _together is not None, "set as the process starts"
    found = []
    for make in programs:
        run = _training_pass(make())
        run()
        _together.wait(START_S)
        until = time.monotonic() + seconds
        samples: list[float] = []
        while time.monotonic() < until or len(samples) < 3:
            began = time.process_time()
            run()
            samples.append(time.process_time() - began)
        _together.wait(START_S)  # nobody prepares the next one while others measure
        found.append(statistics.median(samples))
    return found


def _training_pass(graph: Graph) -> Callable[[], Any]:  # Any: gradients are dropped
    """Outputs, and the gradients of all that is trained."""
    values = [_value(node) for node in graph.nodes if node.is_leaf]
    trained = [value for value in values if value.requires_grad]
    run = callable_of(graph)

    def once() -> Any:
        results = run(*values)
        return torch.autograd.grad(results, trained, [result.detach() for result in results])

    return once


def _value(leaf: Node) -> Tensor:
    """A constant, numbers, or ids that every table has."""
    if leaf.is_const:
        return torch.from_numpy(leaf.attr("value").array.copy())
    dtype = getattr(torch, leaf.type.dtype.torch_name)
    if not leaf.type.dtype.is_floating:
        return (torch.arange(leaf.type.num_elements) % IDS).reshape(leaf.type.shape).to(dtype)
    return noise(leaf.type.shape, dtype, torch.device("cpu")).requires_grad_(leaf.needs_grad)
