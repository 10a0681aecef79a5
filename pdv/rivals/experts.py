"""Plans that experts write by hand, each in its best mesh: DDP, FSDP, tensor parallelism, hybrids and pipelines.

Each is a pin on what the search may choose, and is completed in the best way that keeps it; sources of the techniques:
pdv/pins/techniques.py.
Entry point: ``experts``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ir.mesh import Mesh
from pdv import config
from pdv.cluster import candidate_meshes
from pdv.pins import load_pins
from pdv.pipelines.pinned import Pinned
from pdv.pipelines.search import search_pipelines
from pdv.planning.problems import plan_problems
from pdv.problem import Problem
from pdv.rivals.setting import LEFT_OUT, WITHIN_S, Row, Setting, row
from pdv.search.best import BestPlan
from pdv.search.meshes import search_mesh
from pdv.search.strategies import STRATEGIES
from pdv.search.strategies.budget import Budget

ALONE: Mapping[str, str] = {"DDP": "ddp", "FSDP": "fsdp", "TP": "tensor", "TP with sequences cut": "tensor+sequence"}
OUTSIDE: Mapping[str, str] = {"DDP": "ddp", "FSDP": "fsdp"}
INSIDE: Mapping[str, str] = {"TP": "tensor", "TP with sequences cut": "tensor+sequence"}
MOST_STAGES = 16


def experts(setting: Setting) -> list[Row]:
    """One row a kind of plan, the fastest first; those that do not fit, and those that there are not, behind."""
    rows = [_best(name, list(ways), setting) for name, ways in _kinds(setting).items()]
    if setting.mode == "train":
        rows += [row(f"PP, {count} stages", partial(_pipeline, setting, count), setting.cluster, setting)
                 for count in _stage_counts(setting)]  # fmt: skip
    return sorted(rows, key=lambda one: (one["step_s"] is None, not one.get("fits"), one["step_s"] or 0.0))


def _kinds(setting: Setting) -> dict[str, list[tuple[Mesh, dict[str, str]]]]:
    """By kind, the meshes that it may have, with the technique of each axis; of one role on all axes, one mesh."""
    meshes = [entry.mesh for entry in candidate_meshes(setting.cluster, config.MAX_MESH_AXES)]
    found: dict[str, list[tuple[Mesh, dict[str, str]]]] = {}
    for name, technique in ALONE.items():
        found[name] = [(mesh, {axis.name: technique for axis in mesh.axes}) for mesh in meshes[:1] if mesh.axes]
    for mesh in (mesh for mesh in meshes if len(mesh.axes) == 2):
        outer, inner = (axis.name for axis in mesh.axes)
        for name, technique in OUTSIDE.items():
            for other, within in INSIDE.items():
                found.setdefault(f"{name} × {other}", []).append((mesh, {outer: technique, inner: within}))
    return {name: ways for name, ways in found.items() if ways}


def _best(name: str, ways: Sequence[tuple[Mesh, dict[str, str]]], setting: Setting) -> Row:
    """The fastest that fits, or else the fastest."""
    rows = [row(name, partial(_pinned, setting, mesh, of), setting.cluster, setting) for mesh, of in ways]
    made = [one for one in rows if one["step_s"] is not None]
    return min(made, key=lambda one: (not one["fits"], one["step_s"]), default=_without(rows[0], ways))


def _without(none: Row, ways: Sequence[tuple[Mesh, dict[str, str]]]) -> Row:
    """Memory is no limit here: if there is no plan, a loop does not divide."""
    meshes = ", ".join(str(mesh) for mesh, _ in ways)
    return none if none["why"] == LEFT_OUT else {**none, "why": f"no loop of this kind divides on {meshes}"}


def _pinned(setting: Setting, mesh: Mesh, techniques: Mapping[str, str]) -> BestPlan:
    """The best plan on a mesh whose axes do what they are told."""
    sizes = {axis.name: axis.size for axis in mesh.axes}
    pins = load_pins({"mesh": sizes, "techniques": dict(techniques)})
    (problem,) = _problems(setting, mesh)
    problem = replace(problem, pins=pins.on(problem.graph, mesh), memory_limit=math.inf)
    return search_mesh(problem, budget=Budget(WITHIN_S))


def _problems(setting: Setting, mesh: Mesh | None = None) -> Iterator[Problem]:
    for problem in plan_problems(
        setting.graph,
        setting.cluster,
        mode=setting.mode,
        memory_limit=setting.memory_limit,
        compute=setting.compute,
    ):
        if mesh is None or problem.mesh == mesh:
            yield problem


def _pipeline(setting: Setting, stages: int) -> BestPlan | None:
    """The best pipeline of so many stages, whatever is inside."""
    problem = next(_problems(setting))
    return search_pipelines(problem, setting.cluster, WITHIN_S, STRATEGIES[config.SEARCH], Pinned(stages=stages))


def _stage_counts(setting: Setting) -> list[int]:
    """Two, one for each group of the outermost level, and as many as the plan has."""
    devices = setting.cluster.num_devices
    outer = setting.cluster.levels[0].size if setting.cluster.levels else 1
    return sorted({n for n in (2, outer, setting.stages) if 1 < n <= min(devices, MOST_STAGES) and devices % n == 0})
