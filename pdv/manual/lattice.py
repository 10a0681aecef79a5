"""The best configurations of a lattice of degrees: all of them estimated, the most promising simulated.

Equal layers make a step almost affine in their number, so that a model of two layers and one of three, on the devices
of one stage, say what a deep one takes in a pipeline: estimates cost milliseconds at any depth. They only order the
lattice; what is answered is simulated in full. Entry point: ``best``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from ir.cost_model import CostModel
from ir.types import DType
from pdv.cluster import Cluster, Device
from pdv.frontend.arch.description import Arch, with_layers
from pdv.frontend.arch.graph import graph
from pdv.manual.configuration import AxesOf, Configuration, workload
from pdv.memory import StepMemory, step_memory
from pdv.problem.workload import Recompute, Workload
from pdv.simulate.result import Simulation
from pdv.simulate.step import simulate

ComputeOf = Callable[[Device], CostModel]
SLACK = 1.0  # of a device's memory, that an estimate may take before it is believed not to fit; they are mostly low
FEW = (2, 3)  # layers of the models that are looked at; a single one is no stack of layers
PER_LAYER = ("weights", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class Lattice:
    """Which degrees are tried; data parallelism takes the devices that are left.

    ``settings``: what all configurations say beside them.
    """

    tp: Sequence[int] = (1, 2, 4, 8)
    pp: Sequence[int] = (1, 2, 4, 8, 16, 32)
    vp: Sequence[int] = (1, 2, 4, 8)
    cp: Sequence[int] = (1,)
    ep: Sequence[int] = (1,)
    micro_batch: Sequence[int] = (1, 2)
    recompute: Sequence[Recompute] = ("none", "selective", "full")
    zero: Literal[0, 1, 2, 3] = 1
    settings: tuple[tuple[str, object], ...] = (("fused", True), ("precision", "mixed"))


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a configuration would take: seconds of a step, and bytes of its first stage."""

    given: Configuration
    step_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class SimulatedConfiguration:
    """A configuration, simulated."""

    given: Configuration
    work: Workload
    simulation: Simulation
    memory: StepMemory


@dataclass(frozen=True, slots=True)
class _Layer:
    """One micro-batch of a model as base + layers x each, and what is due once a step."""

    base_s: float
    each_s: float
    base_tail_s: float
    each_tail_s: float
    base_bytes: float
    each_bytes: float  # whatever the micro-batches: weights, gradients, optimizer state
    each_saved_bytes: float  # of one micro-batch in flight


def points(arch: Arch, devices: int, batch: int, lattice: Lattice) -> Iterator[Configuration]:
    """The lattice's configurations that this model, batch and number of devices admit.

    Gradients are summed beside backward but for context parallelism, whose own collectives would wait behind them, and
    with them every earlier stage.
    """
    degrees = itertools.product(lattice.tp, lattice.pp, lattice.cp, lattice.ep, lattice.micro_batch)
    for tp, pp, cp, ep, micro in degrees:
        dp, left = divmod(devices, tp * pp * cp)
        whole = not left and not dp % ep and not batch % (dp * micro)
        if not whole or arch.heads % tp or arch.kv_heads % tp or arch.seq % (cp * tp) or arch.experts % ep:
            continue
        for vp, recompute in itertools.product(lattice.vp, lattice.recompute):
            count = batch // (dp * micro)
            if pp * vp > arch.layers or (vp > 1 and (pp == 1 or count % pp)):
                continue
            given = Configuration(
                tp=tp,
                pp=pp,
                dp=dp,
                cp=cp,
                ep=ep,
                zero=lattice.zero if dp > 1 else 0,
                recompute=recompute,
                schedule="interleaved" if vp > 1 else "1f1b",
                vp=vp,
                micro_batch=micro,
                batch=batch,
                sp=tp > 1,
            )
            yield given.model_copy(update=dict(lattice.settings))


def best(
    arch: Arch,
    cluster_of: Callable[[int], Cluster],
    devices: int,
    batch: int,
    compute_of: ComputeOf,
    axes_of: AxesOf,
    lattice: Lattice | None = None,
    *,
    dtype: DType = DType.BF16,
    keep: int = 2,
    tries: int = 8,
) -> list[SimulatedConfiguration]:
    """The ``keep`` first configurations that fit, of the order in which they are estimated; the fastest first.

    Args:
        arch: the model.
        cluster_of: the cluster of a number of devices.
        devices: how many.
        batch: samples of a step.
        compute_of: the cost model of a device.
        axes_of: what prices collectives, as ``workload`` takes it.
        lattice: what to try.
        dtype: of weights and activations.
        keep: how many to simulate that fit.
        tries: how many to simulate at most.
    """
    estimates = estimate_lattice(arch, cluster_of, devices, batch, compute_of, axes_of, lattice or Lattice(), dtype)
    limit = cluster_of(devices).memory_bytes * SLACK
    hopeful = sorted((e for e in estimates if e.memory_bytes <= limit), key=lambda e: (e.step_s, e.given.text()))
    found: list[SimulatedConfiguration] = []
    for estimate in hopeful[:tries]:
        work = _work(arch, estimate.given, cluster_of(devices), compute_of, axes_of, dtype)
        memory = step_memory(work)
        if memory.fits:
            found.append(SimulatedConfiguration(estimate.given, work, simulate(work), memory))
        if len(found) == keep:
            break
    return sorted(found, key=lambda choice: choice.simulation.step_s)


def estimate_lattice(
    arch: Arch,
    cluster_of: Callable[[int], Cluster],
    devices: int,
    batch: int,
    compute_of: ComputeOf,
    axes_of: AxesOf,
    lattice: Lattice,
    dtype: DType = DType.BF16,
) -> list[Estimate]:
    """Every configuration of the lattice, estimated; what was worked out for another batch or schedule is kept."""
    found = []
    for given in points(arch, devices, batch, lattice):
        alone = {"pp": 1, "vp": 1, "schedule": "1f1b", "batch": 2 * given.data * given.micro_batch}
        one = given.model_copy(update=alone)
        layer = _layer(arch, one, cluster_of(devices // given.pp), compute_of, axes_of, dtype)
        found.append(_estimate(arch, given, layer))
    return found


@lru_cache(maxsize=8)
def _few(
    arch: Arch, plain: Configuration, cluster: Cluster, compute_of: ComputeOf, axes_of: AxesOf, dtype: DType
) -> tuple[Workload, ...]:
    """The model with few layers on the devices of one stage."""
    return tuple(_work(with_layers(arch, count), plain, cluster, compute_of, axes_of, dtype) for count in FEW)


def _work(
    arch: Arch, given: Configuration, cluster: Cluster, compute_of: ComputeOf, axes_of: AxesOf, dtype: DType
) -> Workload:
    return workload(lambda samples: graph(arch, samples, dtype, tp=given.tp), given, cluster, compute_of, axes_of)


@lru_cache(maxsize=1 << 12)
def _layer(
    arch: Arch, one: Configuration, cluster: Cluster, compute_of: ComputeOf, axes_of: AxesOf, dtype: DType
) -> _Layer:
    """From steps of ``FEW`` layers, of one and two micro-batches."""
    times, kinds = [], []
    for work in _few(arch, one.model_copy(update={"recompute": "none"}), cluster, compute_of, axes_of, dtype):
        runs = [
            replace(work, execution=replace(work.execution, micro_batches=count, recompute=one.recompute))
            for count in (1, 2)
        ]
        once, twice = (simulate(run, draws=0).step_s for run in runs)
        times.append((twice - once, 2 * once - twice))
        worst = step_memory(runs[1]).worst
        kept = sum(worst.by_kind.get(name, 0.0) for name in PER_LAYER)
        kinds.append((worst.total_bytes, kept, worst.by_kind.get("activations", 0.0)))
    (less_s, less_tail_s), (more_s, more_tail_s) = times
    (less, less_kept, less_saved), (_, more_kept, more_saved) = kinds
    few, each, saved = FEW[0], more_kept - less_kept, max(0.0, more_saved - less_saved)
    return _Layer(
        less_s - few * (more_s - less_s),
        more_s - less_s,
        less_tail_s - few * (more_tail_s - less_tail_s),
        more_tail_s - less_tail_s,
        less - few * (each + saved),
        each,
        saved,
    )


def _estimate(arch: Arch, given: Configuration, layer: _Layer) -> Estimate:
    """Of a pipeline whose slowest stage has the head: (m + (p - 1) / v) micro-batches (Narayanan et al., 2.2)."""
    held = -(-arch.layers // given.pp)
    count = given.micro_batches
    stage_s = held * layer.each_s + layer.base_s
    step_s = (count + (given.pp - 1) / given.vp) * stage_s + held * layer.each_tail_s + layer.base_tail_s
    flight = min(count, given.pp) if given.vp == 1 else given.pp * (1 + (given.pp - 1) / (given.pp * given.vp))
    memory = layer.base_bytes + held * (layer.each_bytes + flight * layer.each_saved_bytes)
    return Estimate(given, step_s, memory)
