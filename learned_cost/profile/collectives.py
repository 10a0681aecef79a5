"""Collectives between the processes of a torchrun, as rows: gloo between CPUs, NCCL between GPUs.

``bytes`` is what nccl-tests calls size: of the whole buffer that a rank has before (all_reduce, reduce_scatter,
all_to_all, send_recv) or after (all_gather). A call takes as long as its slowest rank. On CPUs each call comes behind
a product, as in a step: gloo's threads then wait for a core, and ranks for each other. Entry point: ``run``.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learned_cost.profile.rows import FOLDS, Setting
from learned_cost.profile.store import Row, Store

SIZES = tuple(256 * 2**i for i in range(19))  # 256 B to 64 MiB
SAMPLES = 7
SAMPLE_S = 1e-2
BESIDE = 384  # rows and columns of the product before a call on a CPU: about a millisecond
LEAST_S = 1e-6  # what a clock tells
MOST_S = 3.0  # of a call, beyond which larger sizes are left out
FACTORS: dict[str, Callable[[int], float]] = {  # of bus bandwidth over bytes per second (nccl-tests, PERFORMANCE.md)
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1.0,
}


def run(folder: Path, setting: Setting, device: torch.device, *, budget_s: float, per_node: int, system: str) -> int:
    """Measure in the default group, which must be initialized; rank 0 keeps the rows. How many were measured.

    Raises:
        WriteError: on rank 0, if the disk is full.
    """
    until = time.monotonic() + budget_s
    if dist.get_rank():
        return sum(1 for _ in _measure(device, set(), until))
    with Store(folder, "collectives") as store:
        done = {_key(row) for row in store.read() if row.get("run") and row.get("system") == system}
        count = 0
        store.reserve()
        for name, size, seconds in _measure(device, done, until):
            store.append(_row(setting, name, size, seconds, per_node, system))
            count += 1
            store.reserve()
    return count


def _measure(
    device: torch.device, done: set[tuple[object, ...]], until: float
) -> Iterator[tuple[str, int, list[float]]]:
    """Name, bytes and samples of each; ranks go the way that rank 0 decides."""
    world = dist.get_world_size()
    too_long: set[str] = set()
    for size in SIZES:
        for name in FACTORS:
            count = max(size // 4 // world, 1) * world
            wanted = name not in too_long and (name, count * 4, world) not in done and time.monotonic() < until
            if not agree(wanted, device) or (name == "send_recv" and world % 2):
                continue
            seconds = slowest_seconds(collective_call(name, count, device), device)
            if statistics.median(seconds) > MOST_S:
                too_long.add(name)
            yield name, count * 4, seconds


def agree(value: bool, device: torch.device) -> bool:
    """What rank 0 says, on every rank."""
    told = torch.tensor([int(value)], device=device)
    dist.broadcast(told, 0)
    return bool(told.item())


def collective_call(
    name: str, count: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> Callable[[], object]:
    """A collective over ``count`` float32 of a rank's whole buffer, among a group (default: all)."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.zeros(count, device=device)
    part = torch.zeros(count // world, device=device)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed them
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    other = torch.zeros(count, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: gather(whole, part, group=group),
        "reduce_scatter": lambda: scatter(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send_recv": lambda: _exchange(whole, rank, group),
    }
    return calls[name]


def _exchange(whole: Tensor, rank: int, group: dist.ProcessGroup | None) -> None:
    """Even ranks of the group send to the next one, where there is one."""
    if rank % 2 == 0 and rank + 1 < dist.get_world_size(group):
        dist.send(whole, group_dst=rank + 1, group=group)
    elif rank % 2:
        dist.recv(whole, group_src=rank - 1, group=group)


def slowest_seconds(call: Callable[[], object], device: torch.device) -> list[float]:
    """Seconds of a call: the slowest rank's, sample by sample; all ranks make it at the same time.

    On CPUs it is what products take longer with a call behind each than without.
    """

    def slowest(calls: int, *works: Callable[[], object]) -> float:
        dist.barrier()
        _wait(device)
        began = time.perf_counter()
        for _ in range(calls):
            for work in works:
                work()
        _wait(device)
        seconds = torch.tensor([(time.perf_counter() - began) / calls], dtype=torch.float64, device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds.item())

    def sample(calls: int) -> float:
        return max(slowest(calls, *beside, call) - (slowest(calls, *beside) if beside else 0.0), LEAST_S)

    beside: tuple[Callable[[], object], ...] = ()
    if device.type == "cpu":
        factor = torch.ones(BESIDE, BESIDE)
        beside = (partial(torch.mm, factor, factor),)
    slowest(1, *beside, call)
    first = slowest(1, *beside, call)
    calls = max(1, min(200, int(SAMPLE_S / first)))
    return [sample(calls) for _ in range(SAMPLES if first < 0.3 else 3)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row(setting: Setting, name: str, size: int, seconds: list[float], per_node: int, system: str) -> Row:
    world, median = dist.get_world_size(), statistics.median(seconds)
    columns: dict[str, Any] = setting.columns()  # Any: text and numbers
    shared = ("source", "gpu", "threads", "versions", "driver", "host", "run", "date", "split", "suspect", "n_dup")
    nodes = -(-world // per_node)
    text = f"{name} {size} {world} {per_node}"
    return {
        **{key: columns[key] for key in shared},
        "system": system,
        "interconnect": _interconnect(setting, nodes),
        "collective": name,
        "algo_lib": dist.get_backend(),
        "lib_version": torch.__version__,
        "dtype": "fp32",
        "n_devices": world,
        "devices_per_node": min(world, per_node),
        "n_nodes": nodes,
        "bytes": size,
        "latency_us": median * 1e6,
        "std_us": statistics.pstdev(seconds) * 1e6,
        "min_us": min(seconds) * 1e6,
        "max_us": max(seconds) * 1e6,
        "busbw_gbs": FACTORS[name](world) * size / median * 1e-9,
        "repeats": len(seconds),
        "fold": int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % FOLDS,
    }


def _interconnect(setting: Setting, nodes: int) -> str:
    if setting.record.kind == "cpu":
        return "loopback" if nodes == 1 else "network"
    return setting.record.link or "unknown"


def _key(row: Row) -> tuple[object, ...]:
    return row["collective"], row["bytes"], row["n_devices"]
