"""Simulate published runs, a few processes beside each other; entry point: `simulate_runs`.

Runs of one model and cluster share what is equal (`pdv.manual.configuration` remembers it), so they are kept
together. A run that cannot be simulated becomes a `Refused` with the reason.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from benchmarks.published.runs import Refused, Run
from ir.cost_model import CostModel
from ir.errors import PdvError, UsageError
from ir.mesh import Mesh
from ir.types import DType
from pdv.cluster import Cluster, Device
from pdv.cost.comm import AxisLink
from pdv.problem.workload import Workload
from pdv.simulate.calibration import Calibration

DRAWS = 8


@dataclass(frozen=True, slots=True)
class Simulated:
    """What the simulator says of a run; ``chosen`` is what the row left open, as decided here."""

    run: Run
    step_s: float
    std_s: float
    memory_bytes: float
    fits: bool
    breakdown: Mapping[str, float]
    chosen: str


def simulate_runs(runs: Sequence[Run], calibration: Calibration, cost: str, jobs: int) -> list[Simulated | Refused]:
    """In the order of ``runs``; of those that state the same one is simulated."""
    alike = [run.stated for run in runs]
    first = {key: i for i, key in reversed([*enumerate(alike)])}
    together = sorted(first.values(), key=lambda i: (runs[i].arch, repr(runs[i].cluster), i))
    parts = [part for part in _parts(together, runs) if part]
    tasks = [([runs[i] for i in part], calibration, cost) for part in parts]
    if jobs == 1:
        answers = [_simulated(*task) for task in tasks]
    else:
        with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=8) as pool:
            answers = pool.starmap(_simulated, tasks, chunksize=1)
    found: dict[int, Simulated | Refused] = {}
    for part, answer in zip(parts, answers, strict=True):
        found.update(zip(part, answer, strict=True))
    return [_as(found[first[key]], run) for run, key in zip(runs, alike, strict=True)]


def _as(answer: Simulated | Refused, run: Run) -> Simulated | Refused:
    """What was said of a run that states the same, of this one."""
    if isinstance(answer, Refused):
        return replace(answer, number=run.number, set=run.set)
    return replace(answer, run=run)


def _parts(order: Sequence[int], runs: Sequence[Run], size: int = 24) -> Iterator[list[int]]:
    """Runs of the same model together, not too many in one part."""
    part: list[int] = []
    for i in order:
        if part and (runs[part[-1]].arch != runs[i].arch or len(part) >= size):
            yield part
            part = []
        part.append(i)
    yield part


def _simulated(runs: Sequence[Run], calibration: Calibration, cost: str) -> list[Simulated | Refused]:
    return [_one(run, calibration, cost) for run in runs]


def _one(run: Run, calibration: Calibration, cost: str) -> Simulated | Refused:
    """The fastest that fits of what the row leaves open; settings that no program allows are passed over."""
    found: list[Simulated] = []
    why = "no settings that it leaves open go together"
    fitting: set[str] = set()  # settings of which less recomputation fits, which is the faster
    for opened in openings(run):
        others = repr({name: value for name, value in opened.items() if name != "recompute"})
        if others in fitting:
            continue
        try:
            found.append(_priced(run, opened, calibration, cost))
            fitting |= {others} if found[-1].fits else set()
        except PdvError as error:
            why = str(error)
        except Exception:  # noqa: BLE001  # a fault of ours in one row must not lose the others; it is told with them
            return Refused(run.number, run.set, f"our fault: {traceback.format_exc(limit=-3)}")
    return min(found, key=lambda s: (not s.fits, s.step_s)) if found else Refused(run.number, run.set, why)


def fastest(run: Run, calibration: Calibration, cost: str) -> dict[str, Any]:
    """What the row leaves open, as `simulate_runs` decides it.

    Raises:
        PdvError: if no settings go together.
    """
    from pdv.memory import step_memory
    from pdv.simulate.step import simulate

    found: list[tuple[bool, float, int, dict[str, Any]]] = []
    for number, opened in enumerate(openings(run)):
        try:
            made = workload_of(run, opened, cost)
        except PdvError:
            continue
        time = simulate(made, calibration=calibration, draws=0).step_s
        found.append((not step_memory(made).fits, time, number, opened))
    if not found:
        raise UsageError(f"row {run.number}: no settings that it leaves open go together")
    return min(found)[3]


def openings(run: Run) -> list[dict[str, Any]]:
    """Settings to choose among for what a row leaves open: micro-batches by powers of two, chunks of a stage."""
    data = run.manual.get("dp", 1)
    micro = [run.micro_batch] if run.micro_batch else [2**k for k in range(6) if (run.batch // data) % 2**k == 0]
    stages, layers = run.manual.get("pp", 1), int(run.arch.split("layers=")[1].split(",")[0])
    even = [v for v in (1, 2, 3, 4) if 0 in (layers % (stages * v), (layers + 2) % (stages * v))]
    virtual = [run.virtual] if run.virtual else even or [1]
    if stages == 1:
        virtual = [1]
    found = []
    for size in micro:
        for chunks in virtual:
            order = "interleaved" if chunks > 1 and run.manual["schedule"] == "interleaved" else "1f1b"
            count = chunks if order == "interleaved" else 1
            settings = {"micro_batch": size, "vp": count, "schedule": order} | ends(layers, stages * count)
            found += [settings | {"recompute": again} for again in run.recompute] or [settings]
    return found


def ends(layers: int, chunks: int) -> dict[str, Any]:
    """One layer fewer in the first and the last chunk, where that makes the others equal.

    So Megatron-LM counts embedding and loss (``account_for_embedding_in_pipeline_split``, ``_for_loss_``), and
    torchtitan by default: Llama's 126 layers were chosen for it (Grattafiori et al., 2024, section 3.3.2).
    """
    if chunks == 1 or layers % chunks == 0 or (layers + 2) % chunks:
        return {}
    each = (layers + 2) // chunks
    return {"partition": (each - 1, *[each] * (chunks - 2), each - 1)}


def _priced(run: Run, opened: Mapping[str, Any], calibration: Calibration, cost: str) -> Simulated:
    from pdv.memory import step_memory
    from pdv.simulate.step import simulate

    made = workload_of(run, opened, cost)
    simulation = simulate(made, calibration=calibration, draws=DRAWS)
    memory = step_memory(made)
    chosen = " ".join(f"{name}={value}" for name, value in opened.items() if run.manual.get(name) != value)
    return Simulated(
        run, simulation.step_s, simulation.std_s,
        memory.worst.reserved_bytes if run.reserved else memory.worst.total_bytes, memory.fits,
        simulation.totals, chosen,
    )  # fmt: skip


@cache
def priced_by(cost: str, device: Device) -> CostModel:
    """The cost model of a device; it remembers the kernels that it has priced."""
    from pdv.prices import cost_model

    return cost_model(cost, [device])


def axes_by(cost: str, cluster: Cluster, mesh: Mesh, stages: int) -> tuple[tuple[AxisLink, ...], ...]:
    """By stage, the links of a mesh's axes, with what a cost model knows of their collectives."""
    from pdv.prices import stage_axes

    (device,) = dict.fromkeys(entry.device for entry in cluster.classes)
    return stage_axes(priced_by(cost, device), cluster, mesh, stages)


def workload_of(run: Run, opened: Mapping[str, Any], cost: str) -> Workload:
    """The run as the command line would make it."""
    from pdv.cluster import load_cluster
    from pdv.frontend.arch.description import arch
    from pdv.frontend.arch.graph import graph
    from pdv.manual.configuration import Configuration, workload

    model, cluster = arch(run.arch), load_cluster(run.cluster)
    settings = {**run.manual, **opened, "batch": run.batch}
    configuration = Configuration.model_validate(settings)

    # Both halves run at one rate on tensor cores; of bfloat16 more kernels are measured.
    lists = all("bfloat16" in entry.device.peak_flops for entry in cluster.classes)
    dtype = DType.F32 if run.single else DType.BF16 if lists else DType.F16
    return workload(
        lambda batch: graph(model, batch, dtype, tp=configuration.tp),
        configuration,
        cluster,
        partial(priced_by, cost),
        partial(axes_by, cost),
    )
