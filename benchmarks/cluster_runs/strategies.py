"""The competitors: how each is made, and what it is tuned over. Entry point: ``STRATEGIES``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cluster_runs.clusters import Cluster
from benchmarks.cluster_runs.pipelines import Pipeline
from benchmarks.cluster_runs.tensor_parallel import TensorParallel
from benchmarks.cluster_runs.trainers import (
    DataParallel,
    FullyShard,
    Package,
    Place,
    Settings,
    TableHybrid,
    Trainer,
)

MICRO, BUCKETS = (1, 2, 4, 8), (25, 4, 1)
OWN = "pdv"
Choices = Mapping[str, tuple[Any, ...]]  # Any: numbers and names


@dataclass(frozen=True)
class Strategy:
    """A family of programs: its fixed settings, and each tuned dimension with its choices, the first one to start from.

    ``only``: names of the tasks that it is for; empty: all.
    """

    name: str
    make: Callable[[Place, Settings], Trainer]
    fixed: Settings = field(default_factory=dict)
    tuned: Choices = field(default_factory=dict)
    only: tuple[str, ...] = ()

    def start(self) -> Settings:
        """Where tuning starts."""
        return {**self.fixed, **{name: choices[0] for name, choices in self.tuned.items()}}

    def dimensions(self, best: Settings) -> Iterator[Iterator[Settings]]:
        """One dimension after the other, each from the best so far, which the caller keeps up to date in ``best``."""
        for name, choices in self.tuned.items():
            yield ({**best, name: choice} for choice in choices[1:])

    def allows(self, settings: Settings, rows: int, world: int) -> bool:
        """Whether these settings make a program: micro-batches are equal, and 1F1B needs as many as stages."""
        blocks = world // int(settings.get("ways") or settings.get("stages") or 1)
        early = settings.get("schedule") == "1f1b" and settings["micro"] < settings["stages"]
        return rows % (blocks * settings.get("micro", 1)) == 0 and not early


_PIPELINE: Choices = {"micro": (4, 8, 2, 1), "parts": ("balanced", "equal"), "schedule": ("1f1b", "gpipe")}
STRATEGIES = (  # those first that may be far ahead: what is then far behind is not tuned further
    Strategy("PP4", Pipeline, {"stages": 4}, {**_PIPELINE, "path": ((0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0))}),
    Strategy(
        "PP2xDP2", Pipeline, {"stages": 2},
        {"across": (True, False), "order": ("adjacent", "strided"), **_PIPELINE, "bucket": BUCKETS},
    ),
    Strategy("table hybrid", TableHybrid, {}, {"bucket": BUCKETS}, only=("recommender",)),
    Strategy("DDP", DataParallel, {}, {"bucket": BUCKETS, "micro": MICRO}),
    Strategy("FSDP2", FullyShard, {"shape": "flat"}, {"reshard": (False, True), "micro": MICRO}),
    Strategy(
        "HSDP", FullyShard, {"shape": "hosts"},
        {"order": ("adjacent", "strided"), "reshard": (False, True), "micro": MICRO},
    ),
    Strategy("TP4", TensorParallel, {"ways": 4, "bucket": 25}, {"micro": MICRO}),
    Strategy(
        "TP2xDP2", TensorParallel, {"ways": 2},
        {"order": ("adjacent", "strided"), "bucket": BUCKETS, "micro": MICRO},
    ),
)  # fmt: skip


def strategies_for(task: str, cluster: Cluster) -> list[Strategy]:
    """Those that fit a task; on a cluster whose ranks are all alike, their order is not tuned."""
    alike = len(cluster.processes) in (1, cluster.size) and not cluster.pairs and len(set(cluster.rates)) == 1
    dropped = {"order", "path"} if alike and not cluster.shares else set()
    found = [one for one in STRATEGIES if not one.only or task in one.only]
    return [
        Strategy(one.name, one.make, one.fixed, {k: v for k, v in one.tuned.items() if k not in dropped}, one.only)
        for one in found
    ]


def packages_in(folder: str, names: Iterable[str]) -> list[Strategy]:
    """Emitted packages: the plan found, and candidates that were pinned."""
    return [
        Strategy(OWN if name == "plan" else f"{OWN} {name}", Package, {"package": f"{folder}/{name}"}) for name in names
    ]


def is_own(name: str) -> bool:
    """Whether a program is one of pdv's."""
    return name.split(maxsplit=1)[0] == OWN
