"""From a cluster file to a `Cluster`, or to one error that names file, line and mend. Entry point: `load_cluster`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ir.errors import ClusterError
from pdv.cluster import schema
from pdv.cluster.build import assemble_cluster
from pdv.cluster.checks import find_warnings
from pdv.cluster.description import Cluster
from pdv.cluster.fields import limits_of
from pdv.cluster.meshes import check_pinned_mesh, with_wired_links
from pdv.cluster.routing.wires import check_reached
from pdv.cluster.source import Place, Source, common_mistake, read_yaml
from pdv.cluster.units import shorten

PARTS = {  # factors of a device, and what to write
    "efficiency": "the share of the peak, like 0.8",
    "share": "the part of its time, like 0.5",
    "speed": "what it is of the known one's, like 0.9",
}


def load_cluster(description: str | Path | Mapping[str, object] | Cluster) -> Cluster:
    """The cluster of a YAML file, of the same data as a mapping, or `description` itself if it is a cluster already.

    Raises:
        ClusterError: naming the file, the line, the value, and the mend.
    """
    if isinstance(description, Cluster):
        return description
    if isinstance(description, Mapping):
        return build_cluster(Source("cluster", dict(description), {}), default_name="cluster")
    path = Path(description)
    return build_cluster(read_yaml(path), default_name=path.stem)


def build_cluster(source: Source, default_name: str) -> Cluster:
    """The cluster that `source` describes. Raises as `load_cluster`."""
    if not isinstance(source.data, dict):
        raise ClusterError(
            f"{source.where(())}: a cluster is a mapping, not {_kind(source.data)}", mend="Start with `nodes:`"
        )
    try:
        spec = schema.ClusterSpec.model_validate(source.data)
    except ValidationError as error:
        raise _one_error(error, source) from None
    shape = assemble_cluster(spec, source)
    mesh = None if spec.mesh is None else tuple(spec.mesh.items())
    cluster = Cluster(
        spec.name or _clean(default_name),
        shape.levels,
        shape.classes,
        shape.nodes,
        shape.network,
        rails=spec.network is not None and spec.network.rails,
        wires=shape.wires,
        mesh=mesh,
    )
    if cluster.wires:
        check_reached(cluster, source.where(("links",)))
        cluster = with_wired_links(cluster)
    cluster = replace(cluster, warnings=find_warnings(cluster, spec, source))
    check_pinned_mesh(cluster, source.where(("mesh",)))
    return cluster


def problems(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All errors of a file as messages without their slug, and all warnings; no warnings where there are errors."""
    try:
        source = read_yaml(path)
        if isinstance(source.data, dict):
            schema.ClusterSpec.model_validate(source.data)
        return (), build_cluster(source, path.stem).warnings
    except ValidationError as error:
        return tuple(str(told).removeprefix("bad-cluster: ") for told in _errors(error, source)), ()
    except ClusterError as error:
        return (str(error).removeprefix("bad-cluster: "),), ()


def _one_error(error: ValidationError, source: Source) -> ClusterError:
    """The first problem by line; the others are counted, so that the list does not bury the mend."""
    first, *others = _errors(error, source)
    if not others:
        return first
    return ClusterError(f"{first.what} (and {len(others)} more problems)", first.allowed, first.mend)


def _errors(error: ValidationError, source: Source) -> list[ClusterError]:
    """Every problem, by line."""
    told = []
    for place, problem in source.by_line(error):
        what, allowed, mend = common_mistake(problem, place, _known_keys) or _explain(problem, place)
        told.append(ClusterError(f"{source.where(place)}: {what}", allowed, mend))
    return told


def _explain(problem: dict[str, Any], place: Place) -> tuple[str, str, str]:  # pydantic's error details are untyped
    """What, allowed and mend for one error of pydantic."""
    kind, value = problem["type"], problem["input"]
    shown = _kind(value) if isinstance(value, dict | list) else shorten(value)
    if place and place[-1] in PARTS:
        return f"{shown} is no {place[-1]}", _allowed(place), f"Write {PARTS[str(place[-1])]}"
    if kind in {"greater_than_equal", "less_than_equal"}:
        return f"{shown} is out of range", _allowed(place), ""
    if kind == "int_type":
        return f"{shown} is no whole number", _allowed(place), "Write digits without quotes"
    if kind in {"too_short", "too_long"} and value != []:
        limit = problem["ctx"]["min_length" if kind == "too_short" else "max_length"]
        return f"a list of {len(value)}", f"Allowed: {'at least' if kind == 'too_short' else 'at most'} {limit}", ""
    if kind in {"list_type", "too_short"}:
        return (
            f"{shown} without items" if value == [] else f"{shown} instead of a list",
            "",
            "Start each item with `- `",
        )
    if kind in {"dict_type", "model_type"}:
        return f"{shown} instead of a mapping", "", "Write key: value"
    return f"{shown} is not allowed here", str(problem["msg"]), ""


def _allowed(place: Place) -> str:
    """The range of the number at `place`, as its field, or that of the mapping which it is in, declares it."""
    for at in range(len(place) - 1, -1, -1):
        field = _model_at(place[:at]).model_fields.get(str(place[at]))
        if limits := dict(limits_of(field)):
            return f"Allowed: {limits['ge']:g} to {limits['le']:g}"
    return ""


def _known_keys(place: Place) -> list[str]:
    """The keys that the mapping at `place` may have."""
    return list(_model_at(place).model_fields)


def _model_at(place: Place) -> type[BaseModel]:
    """What the mapping at `place` is."""
    inner = [step for step in place if isinstance(step, str)]
    models: dict[str, type[BaseModel]] = {
        "nodes": schema.NodeSpec,
        "device": schema.DeviceSpec,
        "link": schema.LinkSpec,
        "network": schema.NetworkSpec,
        "parts": schema.PartSpec,
        "links": schema.WireSpec,
        "switches": schema.SwitchSpec,
    }
    return models.get(inner[-1], schema.ClusterSpec) if inner else schema.ClusterSpec


def _kind(value: object) -> str:
    return {dict: "a mapping", list: "a list", str: "a text", bool: "a truth value"}.get(type(value), "a single value")


def _clean(name: str) -> str:
    """A file's stem as a cluster's name."""
    return (
        "".join(char if char.isascii() and (char.isalnum() or char in "_.-") else "-" for char in name)[:64]
        or "cluster"
    )
