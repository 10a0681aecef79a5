"""The most memory that a piece of code has allocated in tensors at once, as torch's own allocators count it.

On a CPU: every allocation and release that torch's profiler reports (``profile_memory``), kernels' work space included,
on top of the tensors that were there before. On a GPU: ``torch.cuda.max_memory_allocated``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

WARM_UP = 2  # steps: the first one makes the optimizer's state


def peak_bytes(run: Callable[[], Any], there: Iterable[Tensor]) -> int:
    """Bytes of tensors at once, at most, while ``run`` runs; ``there``: those allocated before."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated())
    return held_bytes(there) + peak_of(changes(run))


def peak_of(deltas: Iterable[int]) -> int:
    """The largest of the sums so far."""
    return max(0, max(accumulate(deltas), default=0))


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Of the memory that tensors lie in, each counted once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def changes(run: Callable[[], Any]) -> list[int]:
    """Bytes of each allocation (release: negative) on the CPU, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())  # stable: as they were reported
    return [event.nbytes() for event in events]


def training_peak(model: Any, inputs: tuple[Tensor, ...], target: Tensor, repeats: int = 8) -> int:
    """Of a step of AdamW, as torch takes it by default (fused it needs less), once the optimizer's state is there.

    The least of some: gloo's threads let go of a collective's tensors when they next get a turn, which on a busy
    machine can be any time later.

    model: an emitted one; target: class ids of each row of its output.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model.train_step(inputs, target, _cross_entropy)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    moments = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    there = [*model.parameters(), *model.buffers(), *moments, *inputs, target]
    return min(peak_bytes(step, there) for _ in range(repeats))


def _cross_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum"), target.numel()
