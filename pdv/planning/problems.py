"""The problems that a planning solves: one for each mesh of the cluster, with its pins, rules and limit of memory."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ir.cost_model import CostModel
from ir.errors import PinsError, UsageError, did_you_mean
from ir.graph import Graph
from pdv import config
from pdv.cluster import Cluster, candidate_meshes, load_cluster
from pdv.cluster.fields import axis_sizes
from pdv.cluster.units import ValueProblem
from pdv.cost.compute import ComputeModel
from pdv.pins import PinSet, load_pins
from pdv.pipelines.pinned import FREE, Pinned
from pdv.prices import priced_axes
from pdv.problem import Pins, Problem
from pdv.problem.formats import Products
from pdv.problem.precision import AS_EMITTED, MASTER, PRECISIONS, ROUNDED, RUN_PRECISIONS, Precision
from pdv.problem.workload import BUCKET_BYTES
from pdv.rewrite.algebra import RULES
from pdv.rewrite.rule import Rule


def plan_problems(
    graph: Graph,
    cluster: Cluster,
    *,
    mode: config.Mode,
    memory_limit: float | None = None,
    pins: Pins | PinSet | None = None,
    rules: tuple[Rule, ...] = RULES,
    compute: CostModel | None = None,
    precision: Precision = AS_EMITTED,
    products: Products | None = None,
) -> tuple[Problem, ...]:
    """One problem per mesh that the cluster allows; by default what is on the smallest device limits memory.

    Raises:
        PinsError: if pins name what the graph or every mesh does not have.
    """
    limit = cluster.memory_bytes if memory_limit is None else memory_limit
    named = isinstance(pins, PinSet)  # what is pinned of one axis is not of the other
    meshes = candidate_meshes(cluster, config.MAX_MESH_AXES, mirrored=named)
    if isinstance(pins, PinSet):
        meshes = tuple(entry for entry in meshes if pins.speaks_of(entry.mesh)) or meshes[-1:]
    compute = compute or ComputeModel.of(cluster)
    return tuple(
        Problem(
            graph,
            candidate.mesh,
            priced_axes(cluster, compute, candidate),
            compute,
            mode,
            limit,
            pins.on(graph, candidate.mesh) if isinstance(pins, PinSet) else pins or Pins(),
            rules,
            bucket_bytes=BUCKET_BYTES,
            precision=precision,
            products=products,
        )
        for candidate in meshes
    )


def read_precision(name: str, dtype: str | None, mode: config.Mode) -> tuple[Precision, str | None]:
    """In which types training keeps parameters, by name, and in which it computes.

    Raises:
        UsageError: if there is none of that name, or it does not go with the others.
    """
    if name not in RUN_PRECISIONS:
        allowed = f"Allowed: {', '.join(RUN_PRECISIONS)}"
        raise UsageError(f"precision: {name!r} is not known", allowed, did_you_mean(name, RUN_PRECISIONS))
    if PRECISIONS[name].master == 0:
        return PRECISIONS[name], dtype
    if mode != "train" or dtype not in (None, ROUNDED.torch_name):
        found = "inference" if mode != "train" else dtype
        allowed = f"It is of training, and computes in {ROUNDED.torch_name} of parameters in {MASTER.torch_name}"
        raise UsageError(f"precision {name!r} with {found}", allowed, "Leave one of them out")
    return PRECISIONS[name], ROUNDED.torch_name


def load_target(
    cluster: str | os.PathLike[str] | Mapping[str, Any] | Cluster,
    mesh: Mapping[str, int] | None,
    pins: str | os.PathLike[str] | Mapping[str, Any] | PinSet | Pins | None,
    running: Pinned = FREE,
) -> tuple[Cluster, Pins | PinSet | None, Pinned]:
    """The cluster, with its mesh pinned to the one that the caller or the pins give, if any; the pins; how steps run.

    Where ``running`` says of how many stages, the mesh is that of a stage.

    Raises:
        UsageError: if the caller's mesh is none, or none of the cluster's.
        PinsError: if the pins' is so, or they fix another than the caller.
    """
    pins = pins if pins is None or isinstance(pins, Pins) else load_pins(pins)
    devices = load_cluster(Path(cluster) if isinstance(cluster, os.PathLike) else cluster)
    pinned = _pinned_mesh(mesh, pins)
    if running.says_how:
        own = pinned or (None if devices.mesh is None else dict(devices.mesh))
        running = replace(running, mesh=own)
    if running.stages not in (None, 1):
        return replace(devices, mesh=None), pins, running
    if pinned is None:
        return devices, pins, running
    sizes = list(pinned.values())
    if math.prod(sizes) != devices.num_devices:
        axes = ", ".join(f"{name}={size}" for name, size in pinned.items())
        allowed = f"{devices.name} has {devices.num_devices} devices"
        mend = "Choose axis sizes that multiply to it, or leave the mesh out"
        what = f"the mesh {axes} has {math.prod(sizes)} devices"
        if mesh is None and isinstance(pins, PinSet):
            raise PinsError(f"{pins.source.where(('mesh',))}: {what}", allowed, mend)
        raise UsageError(what, allowed, mend)
    return devices.with_mesh(pinned), pins, running


def _pinned_mesh(mesh: Mapping[str, int] | None, pins: Pins | PinSet | None) -> Mapping[str, int] | None:
    """The mesh that the caller or the pins fix, if any.

    Raises:
        UsageError: if the caller's has other names or sizes than a program can have.
        PinsError: if the pins' has, or they fix two.
    """
    pinned = pins.mesh if isinstance(pins, PinSet) else None
    try:
        _ = not mesh or axis_sizes(mesh)  # none: a stage is one device
    except ValueProblem as problem:
        raise UsageError(f"mesh: {problem.what}", problem.allowed) from None
    if isinstance(pins, PinSet) and pinned is not None:
        try:
            axis_sizes(pinned)
        except ValueProblem as problem:
            raise PinsError(f"{pins.source.where(('mesh',))}: {problem.what}", problem.allowed) from None
    if mesh is None or pinned is None or list(mesh.items()) == list(pinned.items()):
        return mesh or pinned
    said, asked = (", ".join(f"{axis}={size}" for axis, size in sizes.items()) for sizes in (pinned, mesh))
    raise PinsError(f"the pins say mesh {said}, the caller says {asked}", mend="Leave one of them out")
