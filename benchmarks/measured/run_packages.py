"""Step times of many packages on one pool of processes. Entry points: ``run_packages``, ``run_collectives``.

A step is ``train_step`` and AdamW, as a training script writes it. All packages of a group are built, then stepped by
turns, so that what else the machine does meets all alike. Reported is the lower quartile of each one's steps on the
slowest rank: such disturbance moves it least.
"""

from __future__ import annotations

import datetime as dt
import importlib
import itertools
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from learned_cost.profile.collectives import collective_call, slowest_seconds

WARM = 2
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LEAST = 4  # rounds
Row = dict[str, Any]  # Any: JSON
Array = np.ndarray[Any, Any]


def on_ranks(worker: Callable[..., list[Row]], processes: int, *arguments: object) -> list[Row]:
    """What rank 0 of ``worker(*arguments)`` returns; its rows are written as they come, so a dead rank is an error."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        ranks = [
            context.Process(target=_rank, args=(worker, arguments, rank, processes, folder, answers), daemon=True)
            for rank in range(processes)
        ]
        for rank in ranks:
            rank.start()
        try:
            ok, found = answers.get(timeout=470)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    if not ok:
        raise RuntimeError(f"a rank failed: {found}")
    rows: list[Row] = found
    return rows


def _rank(
    worker: Callable[..., list[Row]], arguments: Sequence[object], rank: int, size: int, folder: str, answers: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    if "lo" in [name for _, name in socket.if_nameindex()]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store, timeout = f"file://{Path(folder) / 'store'}", dt.timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
        rows = worker(*arguments)
        if rank == 0:
            answers.put((True, rows))
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent shall see it
        answers.put((False, repr(error)))
    time.sleep(600)  # the parent ends all ranks at once: gloo's teardown may wait for peers


def run_packages(packages: Sequence[tuple[str, str]], inputs: Sequence[Array], loss: str, seconds: float) -> list[Row]:
    """On each rank: (key, directory) of packages of one model, in rounds for about so many seconds."""
    import torch

    tensors = tuple(torch.from_numpy(array) for array in inputs)
    ready = [_Trained(Path(directory), tensors, loss) for _, directory in packages]
    for _ in range(WARM):
        for one in ready:
            one.step()
    deadline = time.monotonic() + seconds
    while len(ready[0].times) < LEAST or _largest(float(time.monotonic() < deadline)):
        for one in ready:
            one.step()
            one.times.append(one.step())  # the step before it brought this model's weights into the caches
    return [{"key": key, **one.row()} for (key, _), one in zip(packages, ready, strict=True)]


class _Trained:
    """One package with its optimizer, and the seconds of its steps: the whole step and what precedes the optimizer."""

    def __init__(self, directory: Path, inputs: tuple[Any, ...], loss: str) -> None:
        import torch

        sys.path.insert(0, str(directory.parent))
        self._model = importlib.import_module(directory.name).build(device="cpu")
        sys.path.pop(0)
        with torch.no_grad():
            shape = list(self._model(*inputs).shape)
        self._inputs = inputs
        self._target, self._loss = _target(loss, [inputs[0].size(0), *shape[1:]])
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self.times: list[tuple[float, float, float]] = []

    def step(self) -> tuple[float, float, float]:
        """(whole step, forward to backward, CPU time of this rank)."""
        started, cpu = time.perf_counter(), time.process_time()
        self._model.train_step(self._inputs, self._target, self._loss)
        trained = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - started, trained - started, time.process_time() - cpu

    def row(self) -> Row:
        """The lower quartile of each, the largest of all ranks; and the median."""
        whole, train, cpu = ([time[part] for time in self.times] for part in range(3))
        return {
            "step_s": _largest(_lower(whole)), "median_s": _largest(statistics.median(whole)), "steps": len(whole),
            "train_s": _largest(_lower(train)), "cpu_s": _largest(_lower(cpu)),
        }  # fmt: skip


def _lower(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=4, method="inclusive")[0]


def _target(loss: str, shape: list[int]) -> tuple[Any, Callable[[Any, Any], Any]]:
    import torch
    from torch.nn.functional import cross_entropy, mse_loss

    generator = torch.Generator().manual_seed(1)
    if loss == "cross_entropy":
        target = torch.randint(1, shape[-1], shape[:-1], generator=generator)
        return target, lambda logits, wanted: (
            cross_entropy(logits.flatten(0, -2), wanted.flatten(), reduction="sum"),
            wanted.numel(),
        )
    return torch.randn(shape, generator=generator), mse_loss


def _largest(seconds: float) -> float:
    """Over the ranks."""
    import torch
    import torch.distributed as dist

    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


def run_collectives(sizes: Sequence[int]) -> list[Row]:
    """On each rank: the collectives that emitted programs use, by bytes of the larger side and size of a group.

    All groups of a size run at the same time, as the groups of a mesh axis do.
    """
    import torch
    import torch.distributed as dist

    world, rank, device = dist.get_world_size(), dist.get_rank(), torch.device("cpu")
    rows = []
    for n in (n for n in range(2, world + 1) if world % n == 0):
        groups = [dist.new_group(list(range(start, start + n))) for start in range(0, world, n)]
        own = groups[rank // n]
        assert own is not None, "every rank is in one of them"
        for name, size in itertools.product(COLLECTIVES, sizes):
            seconds = slowest_seconds(collective_call(name, size // 4, device, own), device)
            rows.append({"collective": name, "bytes": size, "n": n, "latency_s": statistics.median(seconds)})
    return rows
