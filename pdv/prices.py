"""What prices local work and collectives: the cost model of a name, of a file, or of a saved plan."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from ir.cost_model import CostModel
from ir.errors import UsageError
from ir.mesh import Mesh
from pdv import config
from pdv.cluster import Cluster, Device
from pdv.cluster.meshes import MeshCandidate
from pdv.cluster.presets import LINKS
from pdv.cost.comm import CALLED_S, AxisLink, axis_link, calling_s
from pdv.cost.compute import ComputeModel
from pdv.cost.curves import Curves
from pdv.cost.stage_links import stage_links
from pdv.plan.devices import read_devices


def cost_model(choice: str | os.PathLike[str] | None, devices: Sequence[Device]) -> CostModel:
    """What prices local work on devices.

    ``choice`` is "auto", "analytic", "learned", "measured", a weight file, a folder of profiles, or None for the
    default. "auto" is the analytic model where no device has a record.

    Raises:
        UsageError: if ``choice`` is none of them.
        WeightsError, DataError: if the file or folder is damaged or foreign.
    """
    analytic = ComputeModel(tuple(devices))
    name = os.fspath(config.COST if choice is None else choice)
    if name == config.ANALYTIC:
        return analytic
    from learned_cost.choose import Described, choose_cost_model, is_recorded

    if name == config.AUTO and not any(is_recorded(device.name) for device in devices):
        return analytic

    described = [
        Described(
            device.name,
            device.kind,
            device.memory_bytes,
            tuple(device.peak_flops.items()),
            device.memory_bandwidth_bytes_per_s,
            device.pace if name in config.COSTS else device.share,  # files of one's own were measured here
        )
        for device in devices
    ]
    return choose_cost_model(name, described, analytic)


def priced_by(document: Mapping[str, Any], cost: str | os.PathLike[str] | None) -> CostModel:
    """The cost model that priced a plan, here again.

    Raises:
        UsageError: if the weights or profiles here are others.
    """
    facts = document.get("cost_model", {"name": config.ANALYTIC})
    name = facts["name"]
    model = cost_model(name if cost is None and name in config.COSTS else cost or name, read_devices(document))
    if name != config.ANALYTIC or cost is not None:
        here = model.provenance()
        for kind in ("weights", "profiles"):
            said, found = facts.get(kind), here.get(kind)
            if said != found:
                raise UsageError(
                    f"the plan was priced by {kind} {_file(said)}, here are {_file(found)}",
                    "The files that priced it",
                    "Name them with --cost FILE, or plan again",
                )
    return model


def _file(facts: Mapping[str, Any] | None) -> str:
    return "none" if facts is None else f"{facts['name']} ({str(facts['hash'])[:12]})"


def _with_curves(cluster: Cluster, compute: CostModel, axis: AxisLink) -> AxisLink:
    """The axis with its collectives as measured, where the cost model has that; else as learned, if the link is known.

    Of several classes of devices the slowest counts: all wait for it. What crosses several levels, or has a part of
    a link only, no curve knows. What was measured behind products on shared cores has a process's turn in it.
    """
    known = LINKS.get(axis.link.name)
    shared = known is not None and known.link != axis.link
    if isinstance(compute, ComputeModel) or len(axis.stages) > 1 or shared or axis.size < 2:
        return axis
    curves = _curves(cluster, compute, axis.link.name, axis.size)
    return axis if curves is None else replace(axis, curves=curves, called_s=min(axis.called_s, CALLED_S))


def priced_axes(cluster: Cluster, compute: CostModel, candidate: MeshCandidate) -> tuple[AxisLink, ...]:
    """The links of a mesh's axes, with what is known of their collectives."""
    pairs = zip(candidate.mesh.axes, candidate.routes, strict=True)
    called_s = calling_s(entry.device for entry in cluster.classes)
    axes = [axis_link(axis.size, route, library=cluster.library, called_s=called_s) for axis, route in pairs]
    return _with_known(cluster, compute, axes)


def stage_axes(compute: CostModel, cluster: Cluster, mesh: Mesh, stages: int) -> tuple[tuple[AxisLink, ...], ...]:
    """By stage, the links of a mesh's axes there, with what is known of their collectives."""
    links = stage_links(cluster, mesh, stages)
    known = {stage: _with_known(cluster, compute, stage) for stage in dict.fromkeys(links)}
    return tuple(known[stage] for stage in links)


def _with_known(cluster: Cluster, compute: CostModel, axes: Sequence[AxisLink]) -> tuple[AxisLink, ...]:
    """A mesh's axes with curves; those on one link also know them of the axes that they are together."""
    known = [_with_curves(cluster, compute, axis) for axis in axes]
    by_link: dict[str, list[AxisLink]] = {}
    for axis in known:
        if axis.curves is not None:
            by_link.setdefault(axis.link.name, []).append(axis)
    wider = {name: _wider(cluster, compute, name, of) for name, of in by_link.items() if len(of) > 1}
    return tuple(axis if axis.curves is None else replace(axis, wider=wider.get(axis.link.name, ())) for axis in known)


def _wider(cluster: Cluster, compute: CostModel, link: str, axes: Sequence[AxisLink]) -> tuple[tuple[int, Curves], ...]:
    several = [of for count in range(2, len(axes) + 1) for of in combinations(axes, count)]
    sizes = dict.fromkeys(math.prod(axis.size for axis in of) for of in several)
    found = ((size, _curves(cluster, compute, link, size)) for size in sizes)
    return tuple((size, curves) for size, curves in found if curves is not None)


def slowest_axes(axes: Sequence[tuple[AxisLink, ...]]) -> tuple[AxisLink, ...]:
    """By axis the slowest stage's links, for which the inside of all stages is chosen."""
    return tuple(min(of, key=_speed) for of in zip(*axes, strict=True))


def _speed(axis: AxisLink) -> tuple[float, float]:
    return axis.link.bandwidth_bytes_per_s, -axis.link.latency_s


def _curves(cluster: Cluster, compute: CostModel, link: str, size: int) -> Curves | None:
    from learned_cost.collectives.curves import INTERCONNECTS, axis_curve
    from learned_cost.estimator import MOVED_STD, KernelCosts

    classes = cluster.classes
    share = statistics.fmean([entry.device.share for entry in classes], [entry.count for entry in classes])
    measured = compute.move(INTERCONNECTS.get(link, link), size, share) if isinstance(compute, KernelCosts) else ()
    if measured:
        return Curves.of(measured, "measured", MOVED_STD)
    found = [axis_curve(entry.device.name, link, size, entry.device.share) for entry in cluster.classes]
    known = [entry for entry in found if entry is not None]
    if len(known) < len(found) or not known:
        return None
    rows = [
        (name, num_bytes, max(entry[0][place][2] for entry in known))
        for place, (name, num_bytes, _) in enumerate(known[0][0])
    ]
    return Curves.of(rows, "learned", max(entry[1] for entry in known))
