"""How long a call takes: CUDA graphs or events on a GPU, the clock on a CPU; with warm or cold caches.

warm: the same operands again and again, as a consumer meets what was just made. cold: the last-level cache is
overwritten before each call, as weights are met once a step. On a CPU with one thread, a sample during which another
process ran is taken again; where all were disturbed, the processor time of the quietest counts. Entry point:
``Stopwatch.measure``.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

Caches = Literal["warm", "cold"]
SAMPLE_S = 1e-3  # a thousand times what the clocks resolve: CUDA events 0.5 us (CUDA runtime API), perf_counter less
SAMPLES = 7
ATTEMPTS = 4  # of a sample that other processes disturbed
UNDISTURBED = 0.93  # share of the wall time that the process must have run, of a sample that counts
MAX_CALLS = 1000
GRAPH_LAUNCH_S = (
    5e-6  # a replay of one kernel: median 4.9, least 2.6 us of 6,456 kernels on an H100, CUDA 13, 2026-11-23
)
GRAPH_CALLS = 32  # in one graph, so that its launch is a thirtieth of what is measured of the shortest kernels


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: the median over ``repeats`` samples, their standard deviation, and the shortest."""

    median_s: float
    std_s: float
    repeats: int
    stack: str = ""  # "cudagraph" where calls were replayed without their launches
    best_s: float = math.inf


class Stopwatch:
    """Times calls on one device. On a GPU it makes a stream the current one, for the default one cannot be captured.

    Args:
        cache_bytes: of the last-level cache, what ``cold`` overwrites twice.
        limit_s: about how long one measurement may take.
    """

    def __init__(self, device: torch.device, cache_bytes: int, limit_s: float = 0.04) -> None:
        self.device = device
        self.limit_s = limit_s
        if device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        self._sweep = torch.empty(2 * cache_bytes // 4, dtype=torch.float32, device=device)
        self._single = torch.get_num_threads() == 1

    def measure(self, run: Callable[[], Any], caches: Caches = "warm") -> Timing:  # Any: results are dropped
        """Time ``run`` after a warm-up, within about ``limit_s``; at least three samples, whatever they take."""
        run()
        if caches == "cold":
            return self._cold(run)
        replayed = self._replayed(run) if self.device.type == "cuda" else None
        stack = "" if replayed is None else "cudagraph"
        run, inside = replayed or (run, 1)
        first = min(self._sample(run, 1), self._sample(run, 1))
        calls = min(MAX_CALLS, max(1, math.ceil(SAMPLE_S / first)))
        count = max(3, min(SAMPLES, int(self.limit_s / (first * calls))))
        samples = [self._sample(run, calls) / inside for _ in range(count)]
        return summary(samples, stack)

    def _replayed(self, run: Callable[[], Any]) -> tuple[Callable[[], Any], int] | None:
        """A CUDA graph of ``run``, and how often it runs in there: short calls often, for a replay takes microseconds
        whatever is in it. None where it cannot be captured.
        """
        one = capture(run)
        if one is None or min(self._sample(one, 1), self._sample(one, 1)) > GRAPH_CALLS * GRAPH_LAUNCH_S:
            return None if one is None else (one, 1)
        several = capture(run, GRAPH_CALLS)
        return (one, 1) if several is None else (several, GRAPH_CALLS)

    def _cold(self, run: Callable[[], Any]) -> Timing:
        """A GPU is still sweeping when the host has issued a replay; issuing a call's kernels would take longer."""

        def sweep() -> None:
            self._sweep.fill_(1.0)

        replay = capture(run) if self.device.type == "cuda" else None
        run = replay or run
        first = self._sample(run, 1, sweep)
        count = max(3, min(SAMPLES, int(self.limit_s / first)))
        return summary([self._sample(run, 1, sweep) for _ in range(count)], "" if replay is None else "cudagraph")

    def _sample(self, run: Callable[[], Any], calls: int, before: Callable[[], None] = lambda: None) -> float:
        """Seconds of a call, on average over ``calls`` back to back, after ``before``."""
        before()
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(calls):
                run()
            end.record()
            end.synchronize()
            return max(float(start.elapsed_time(end)) * 1e-3, 1e-9) / calls  # events count milliseconds
        quietest = math.inf
        for _ in range(ATTEMPTS):
            began, used = time.perf_counter(), time.process_time()
            for _ in range(calls):
                run()
            wall, used = time.perf_counter() - began, time.process_time() - used
            if not self._single or used >= UNDISTURBED * wall:
                return max(wall, 1e-9) / calls
            # with one thread, less processor time than wall time means that somebody else ran
            quietest = min(quietest, used)
            before()
        return max(quietest, 1e-9) / calls


def capture(run: Callable[[], Any], calls: int = 1) -> Callable[[], Any] | None:
    """``run``, so many times in a row, as a CUDA graph; None where it cannot be captured (it waits, say).

    It is captured on the current stream, which must be the one that a backward's forward ran on: autograd goes back to
    that one.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with warnings.catch_warnings(), torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # the gradient of a view is one
            for _ in range(calls):
                run()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def summary(samples: list[float], stack: str) -> Timing:
    """Median, deviation and best of some samples."""
    return Timing(statistics.median(samples), statistics.pstdev(samples), len(samples), stack, min(samples))
