"""Where a step goes: what the ranks say to each other, and how long they wait for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.cluster_runs.trainers import Trainer


def profile_step(trainer: Trainer, slowest: Callable[[list[float]], list[float]]) -> dict[str, Any]:
    """Calls of each collective in one step on this rank, and of the slowest rank: seconds blocked and of the optimizer.

    Blocked is what a rank's thread neither computes nor copies: it waits for others, or for a core.
    """
    dist.barrier()
    started, cpu = time.perf_counter(), time.thread_time()
    trainer.train()
    trained, computed = time.perf_counter(), time.thread_time()
    trainer.update()
    times = [trained - started, trained - started - (computed - cpu), time.perf_counter() - trained]
    train_s, blocked_s, optimizer_s = slowest(times)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        trainer.train()
        trainer.update()
    names = [event.name for event in seen.events() if event.name.startswith("gloo:")]
    return {
        "train_s": train_s, "blocked_s": blocked_s, "optimizer_s": optimizer_s, "collectives": dict(Counter(names)),
    }  # fmt: skip
