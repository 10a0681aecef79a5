"""Where a step goes: what the ranks say to each other, and how long they wait for it; and what links carry."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.cluster_runs.trainers import Trainer

SCHEDULED = Path("/proc/thread-self/schedstat")  # ns on a core, ns waiting for one, turns (Linux)
SMALL, LARGE = 1024, 2**19  # elements: 4 KiB tell latency, 2 MiB bandwidth


def thread_times() -> tuple[float, float, float]:
    """Seconds of the clock, of this thread on a core, and of its waiting for one."""
    queued = SCHEDULED.read_text().split()[1] if SCHEDULED.exists() else "0"
    return time.perf_counter(), time.thread_time(), int(queued) * 1e-9


def profile_step(trainer: Trainer, slowest: Callable[[list[float]], list[float]]) -> dict[str, Any]:
    """One step: calls of each collective on this rank; of the slowest rank, seconds of forward and backward on a core,
    waiting for a core (other ranks have it) and blocked (waiting for what others send), and of the optimizer.
    """
    dist.barrier()
    start = thread_times()
    trainer.train()
    trained = thread_times()
    trainer.update()
    clock, on_core, queued = (b - a for a, b in zip(start, trained, strict=True))
    optimizer_s = time.perf_counter() - trained[0]
    train_s, on_core_s, queued_s, blocked_s, optimizer_s = slowest(
        [clock, on_core, queued, clock - on_core - queued, optimizer_s]
    )
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        trainer.train()
        trainer.update()
    names = [event.name.removeprefix("gloo:") for event in seen.events() if event.name.startswith("gloo:")]
    return {
        "train_s": train_s, "on_core_s": on_core_s, "queued_s": queued_s, "blocked_s": blocked_s,
        "optimizer_s": optimizer_s, "collectives": dict(Counter(names)),
    }  # fmt: skip


def measure_links(slowest: Callable[[list[float]], list[float]]) -> dict[str, float]:
    """What each pair of ranks carries alone in one direction, and all-reduces of all: Mbit/s, and seconds."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, float] = {}
    for a in range(world):
        for b in range(a + 1, world):
            seconds = slowest([min(_send(a, b, rank) for _ in range(3))])[0]
            found[f"{a}-{b} mbit_per_s"] = LARGE * 32 / seconds / 1e6
    for name, count in (("4 KiB", SMALL), ("2 MiB", LARGE)):
        x = torch.ones(count)
        times = []
        for _ in range(5):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(x)
            times.append(time.perf_counter() - started)
        found[f"all_reduce {name} s"] = min(slowest(times))
    return found


def _send(a: int, b: int, rank: int) -> float:
    x = torch.ones(LARGE)
    dist.barrier()
    started = time.perf_counter()
    if rank == a:
        dist.send(x, b)
    if rank == b:
        dist.recv(x, a)
    return time.perf_counter() - started
