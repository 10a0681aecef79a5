"""How long something takes on a device: CUDA events on a GPU, the process's clock on a CPU. Entry point: ``measure``.

A sample is a few calls back to back, long enough for the clock, as a training step queues them; what is reported is the
median over samples and their quartiles.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

SAMPLE_S = 2e-3  # a thousand times the resolution of CUDA events (0.5 us, CUDA runtime API: cudaEventElapsedTime)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: median and quartiles over ``samples``."""

    median_s: float
    low_s: float
    high_s: float
    samples: int


def measure(run: Callable[[], object], device: torch.device, *, samples: int = 9, limit_s: float = 0.3) -> Timing:
    """Time ``run`` after a warm-up, within about ``limit_s`` (three samples are taken even if they need longer)."""
    sample(run, device)
    probe_s = sample(run, device, 3)
    calls = min(1000, math.ceil(SAMPLE_S / probe_s))
    count = max(3, min(samples, int(limit_s / (probe_s * calls))))
    return summary([sample(run, device, calls) for _ in range(count)])


def sample(run: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Seconds of one call, on average over ``calls`` back to back."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        elapsed_s = float(start.elapsed_time(end)) * 1e-3  # events count milliseconds
        return max(elapsed_s, 1e-9) / calls
    started = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - started) / calls


def summary(seconds: list[float]) -> Timing:
    """Median and quartiles of some samples."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(middle, low, high, len(seconds))
