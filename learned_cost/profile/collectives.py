"""Collectives between the processes of a torchrun, as rows: gloo between CPUs, NCCL between GPUs.

``bytes`` is what nccl-tests calls size: of the whole buffer that a rank has before (all_reduce, reduce_scatter,
all_to_all, send_recv) or after (all_gather). A call takes as long as its slowest rank. On CPUs each call comes behind
a product, as in a step: gloo's threads then wait for a core, and ranks for each other. There smaller groups are
measured, too, all at once: two processes of four meet slower than two that have the cores for themselves. Their system
is named by both. Entry point: ``run``.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learned_cost.data.measured import ON_CORES
from learned_cost.profile.detect import cores_for
from learned_cost.profile.rows import FOLDS, Setting
from learned_cost.profile.store import Row, Store

SIZES = tuple(256 * 2**i for i in range(19))  # 256 B to 64 MiB
SAMPLES = 7
SAMPLE_S = 1e-2
CALLS = 12  # of a sample at least, where that takes less than MANY_S: one call alone is its slowest rank's start, too
MANY_S = 0.2
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
    until, world = time.monotonic() + budget_s, dist.get_world_size()
    systems = {world: system}
    if device.type == "cpu" and world <= per_node:
        systems |= {size: f"{system}-by-{size}" for size in range(2, world) if world % size == 0}
    groups = {size: _own_group(size) for size in systems}
    if dist.get_rank():
        return sum(1 for _ in _measure(device, set(), until, groups))
    with Store(folder, "collectives") as store:
        of_run = [row for row in store.read() if row.get("run") and row.get("system") in systems.values()]
        done: set[tuple[object, ...]] = {(row["collective"], row["bytes"], row["n_devices"]) for row in of_run}
        count = 0
        store.reserve()
        for name, num_bytes, size, seconds in _measure(device, done, until, groups):
            store.append(_row(setting, name, num_bytes, size, seconds, per_node, systems[size]))
            count += 1
            store.reserve()
    return count


def _own_group(size: int) -> dist.ProcessGroup | None:
    """Of so many ranks behind each other, that of this one; None: of all."""
    world = dist.get_world_size()
    if size == world:
        return None
    starts = range(0, world, size)
    every: list[dist.ProcessGroup] = [dist.new_group(list(range(start, start + size))) for start in starts]
    return every[dist.get_rank() // size]


def _measure(
    device: torch.device,
    done: set[tuple[object, ...]],
    until: float,
    groups: Mapping[int, dist.ProcessGroup | None],
) -> Iterator[tuple[str, int, int, list[float]]]:
    """Name, bytes, ranks of a group and samples of each; ranks go the way that rank 0 decides."""
    too_long: set[tuple[str, int]] = set()
    for num_bytes, name, ranks in itertools.product(SIZES, FACTORS, groups):
        count = max(num_bytes // 4 // ranks, 1) * ranks
        known = (name, ranks) in too_long or (name, count * 4, ranks) in done
        if not agree(not known and time.monotonic() < until, device) or (name == "send_recv" and ranks % 2):
            continue
        seconds = slowest_seconds(collective_call(name, count, device, groups[ranks]), device)
        if statistics.median(seconds) > MOST_S:
            too_long.add((name, ranks))
        yield name, count * 4, ranks, seconds


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
    calls = max(1, min(200, int(SAMPLE_S / first)), min(CALLS, int(MANY_S / first)))
    return [sample(calls) for _ in range(SAMPLES if first < 0.3 else 3)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row(setting: Setting, name: str, size: int, ranks: int, seconds: list[float], per_node: int, system: str) -> Row:
    """ranks: of a group; processes of a node are all that there are, if these are fewer than it has devices."""
    world, median = dist.get_world_size(), statistics.median(seconds)
    columns: dict[str, Any] = setting.columns()  # Any: text and numbers
    shared = ("source", "gpu", "threads", "versions", "driver", "host", "run", "date", "split", "suspect", "n_dup")
    nodes = -(-world // per_node)
    text = f"{name} {size} {ranks} {per_node}"
    return {
        **{key: columns[key] for key in shared},
        "system": system,
        "interconnect": _interconnect(setting, nodes),
        "collective": name,
        "algo_lib": dist.get_backend(),
        "lib_version": torch.__version__,
        "dtype": "fp32",
        "n_devices": ranks,
        "devices_per_node": min(world, per_node),
        "n_nodes": nodes,
        "cores": _cores(setting),
        "bytes": size,
        "latency_us": median * 1e6,
        "std_us": statistics.pstdev(seconds) * 1e6,
        "min_us": min(seconds) * 1e6,
        "max_us": max(seconds) * 1e6,
        "busbw_gbs": FACTORS[name](ranks) * size / median * 1e-9,
        "repeats": len(seconds),
        "fold": int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % FOLDS,
    }


def _cores(setting: Setting) -> int | None:
    """For how many processes this machine has cores, where these are what was measured."""
    return cores_for(setting.threads) if setting.record.kind == "cpu" else None


def _interconnect(setting: Setting, nodes: int) -> str:
    if setting.record.kind == "cpu":
        return ON_CORES if nodes == 1 else "network"
    return setting.record.link or "unknown"
