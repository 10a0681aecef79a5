"""Links between the processes of a torchrun, measured level by level: gloo between CPUs, NCCL between GPUs.

A level is the groups {start, start + stride, ...} of `span` ranks, all at once, as a mesh axis would have them. Times
are those of the slowest rank. Entry points: ``measure_links`` in each process of a torchrun, ``measure_here`` to start
the processes on this machine.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ir.files.signals import handled
from learned_cost.profile.collectives import FACTORS, agree, collective_call, slowest_seconds

SIZES = tuple(1024 * 4**power for power in range(8))  # 1 KiB to 16 MiB
TELLING = 3.0  # times as long as the smallest of a collective: its largest size says how fast bytes are
LONGEST = 5.0  # times the budget, where by then no size was as long
PAIR_BYTES = 2**22
MAX_PAIRS = 28  # those of eight ranks


@dataclass(frozen=True, slots=True)
class LevelAsked:
    """A level by its name; its groups by the distance of neighbours and the ranks that a group spans."""

    name: str
    stride: int
    span: int


@dataclass(frozen=True, slots=True)
class LinkRow:
    """Seconds of one collective of ``num_bytes`` (as ``FACTORS`` count them) among ``size`` ranks of a level."""

    level: str
    collective: str
    size: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """All rows, bytes/s of each pair alone where there are few, and the backend."""

    rows: tuple[LinkRow, ...]
    pairs: tuple[tuple[int, int, float], ...]
    backend: str


def devices_here(device: str) -> tuple[str, int]:
    """cpu or cuda (where "": cuda, if there is one), and how many GPUs or cores this machine has."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return kind, torch.cuda.device_count() if kind == "cuda" else len(os.sched_getaffinity(0))


def measure_here(levels: Sequence[LevelAsked], device: str, budget_s: float, processes: int) -> Measured:
    """``measure_links`` in so many processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (tuple(levels), device, budget_s, processes, folder)
        with handled(_end_in_order, signal.SIGTERM):  # by way of what is to be done at exit, which ends daemons
            mp.spawn(_one_process, arguments, nprocs=processes, daemon=True)  # type: ignore[attr-defined, no-untyped-call]
        told = json.loads((Path(folder) / "measured.json").read_text(encoding="utf-8"))
    rows = tuple(LinkRow(**row) for row in told["rows"])
    return Measured(rows, tuple((a, b, rate) for a, b, rate in told["pairs"]), told["backend"])


def _end_in_order(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _one_process(
    rank: int, levels: Sequence[LevelAsked], device: str, budget_s: float, processes: int, folder: str
) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    found = measure_links(levels, device, budget_s, rendezvous=(f"file://{folder}/store", rank, processes))
    if rank == 0:
        (Path(folder) / "measured.json").write_text(json.dumps(asdict(found)), encoding="utf-8")


def measure_links(
    levels: Sequence[LevelAsked], device: str, budget_s: float, rendezvous: tuple[str, int, int] | None = None
) -> Measured:
    """Measure in one process of several; every rank gets the same result.

    A level whose time is over is measured at fewer sizes, the largest left out. ``rendezvous`` is where the processes
    meet, this one's rank, and how many there are; default: as torchrun says.
    """
    here = torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        here = torch.device("cuda", torch.cuda.current_device())
    backend = "nccl" if device == "cuda" else "gloo"
    if rendezvous is None:
        dist.init_process_group(backend)
    else:
        method, rank, processes = rendezvous
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=processes)
    try:
        rows: list[LinkRow] = []
        for level in levels:
            rows += _level(level, here, budget_s / len(levels))
        return Measured(tuple(rows), tuple(_pairs(here)), dist.get_backend())
    finally:
        dist.destroy_process_group()


def _level(level: LevelAsked, device: torch.device, budget_s: float) -> list[LinkRow]:
    world, rank = dist.get_world_size(), dist.get_rank()
    own = None
    for block in range(0, world, level.span):
        for start in range(block, block + level.stride):
            ranks = list(range(start, block + level.span, level.stride))
            group = dist.new_group(ranks)  # every rank makes every group
            own = group if rank in ranks else own
    assert own is not None, f"rank {rank} is in no group of {level}"
    size, started, rows = level.span // level.stride, time.monotonic(), list[LinkRow]()
    for num_bytes in SIZES:
        spent_s = time.monotonic() - started
        if not agree(spent_s < budget_s or (spent_s < LONGEST * budget_s and not tell_rates(rows)), device):
            break
        count = max(num_bytes // 4 // size, 1) * size
        for name in FACTORS:
            seconds = statistics.median(slowest_seconds(collective_call(name, count, device, own), device))
            rows.append(LinkRow(level.name, name, size, count * 4, seconds))
    return rows


def tell_rates(rows: Sequence[LinkRow]) -> bool:
    """Whether the largest size of each collective took so much longer than the smallest that bytes tell, not calls."""
    by_name: dict[str, list[float]] = {}
    for row in rows:
        by_name.setdefault(row.collective, []).append(row.seconds)
    return bool(rows) and all(seconds[-1] >= TELLING * seconds[0] for seconds in by_name.values())


def _pairs(device: torch.device) -> list[tuple[int, int, float]]:
    """Bytes/s of each pair, the others idle."""
    world, rank = dist.get_world_size(), dist.get_rank()
    found: list[tuple[int, int, float]] = []
    if world * (world - 1) // 2 > MAX_PAIRS or world < 3:
        return found
    for first, second in itertools.combinations(range(world), 2):
        group = dist.new_group([first, second])
        call = collective_call("send_recv", PAIR_BYTES // 4, device, group) if rank in {first, second} else lambda: None
        found.append((first, second, PAIR_BYTES / statistics.median(slowest_seconds(call, device))))
    return found
