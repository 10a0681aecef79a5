"""The learned correction of physics: a Gaussian process over log seconds, of which a system is one part.

The correction of a case is a sum of what all systems share (by library, collective, link and size), what devices of one
name share, what one system has of its own (its α, its 1/β; the same by collective and library), and what one curve has.
How much of each is fitted. A system never seen has the first parts' means and the others' variances; a few measurements
move α, 1/β and the curves by as much as they tell. Entry points: ``covariance``, ``condition``.

Source: Rasmussen and Williams, "Gaussian processes for machine learning" (2006), chapter 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learned_cost.collectives.physics import Facts
from learned_cost.collectives.rows import Cases, Floats, Ints

# Logs of deviations (of log seconds) and of lengths; lengths of sizes, devices, nodes, rates and clocks count in
# doublings, a penalty is what another name adds to the squared distance. Most likely values on the open data;
# clock, devices, own_devices, library, collective, nodes and shared by leaving systems out.
SCALES: Mapping[str, float] = {
    "shared": -0.60, "shared_size": 1.86, "shared_share": -0.17, "devices": 1.50, "nodes": -1.00, "rate": -0.35,
    "clock": -2.00, "blocks": 0.01, "library": 2.50, "collective": 2.50, "link": 0.82, "device": -3.00,
    "device_size": 1.92, "alpha": -2.00, "own_devices": 0.0, "beta": -2.06, "group_alpha": -1.45,
    "group_beta": -2.14, "curve": -1.74,
    "curve_size": 0.53, "curve_devices": -0.25, "curve_name": 1.66, "curve_version": -0.03, "own": -1.97,
    "own_size": 1.03, "noise": -3.76,
}  # fmt: skip
Theta = Mapping[str, float]


@dataclass(frozen=True)
class Points:
    """Where the process is: columns of one length, of cases. Names are codes into a vocabulary.

    Attributes:
        share: of the seconds that physics gives, that which is latency.
        curve: of one system, collective, library, version, dtype and counts.
    """

    share: Floats
    size: Floats
    devices: Floats
    nodes: Floats
    rate: Floats
    clock: Floats
    blocks: Floats
    library: Ints
    collective: Ints
    link: Ints
    system: Ints
    device: Ints
    name: Ints
    version: Ints
    curve: Ints

    def __len__(self) -> int:
        return len(self.size)

    def take(self, rows: NDArray[np.integer] | NDArray[np.bool_] | slice) -> Points:
        """Some of them."""
        return Points(*(getattr(self, column.name)[rows] for column in fields(self)))


@dataclass
class Vocabulary:
    """Names as codes, by column; names are learned as they come."""

    codes: dict[str, dict[str, int]]

    def of(self, column: str, names: NDArray[np.object_]) -> Ints:
        """Codes of names in a column; new names get new codes."""
        known = self.codes.setdefault(column, {})
        return np.array([known.setdefault(name, len(known)) for name in names.tolist()], dtype=np.int64)

    def copy(self) -> Vocabulary:
        """One to learn names that are not kept."""
        return Vocabulary({column: dict(names) for column, names in self.codes.items()})


def points_of(cases: Cases, facts: Facts, share: Floats, vocabulary: Vocabulary) -> Points:
    """Cases as points; their names join the vocabulary."""
    systems = np.array([f"{a}|{b}" for a, b in zip(cases.system, cases.gpu, strict=True)], dtype=object)
    versions = np.array([f"{a}|{b}" for a, b in zip(cases.version, cases.dtype, strict=True)], dtype=object)
    parts = zip(systems, cases.collective, cases.library, versions, cases.n, cases.per_node, cases.nodes, strict=True)
    curves = np.array([f"{a}|{b}|{c}|{d}|{e:g}|{f:g}|{g:g}" for a, b, c, d, e, f, g in parts], dtype=object)
    return Points(
        share,
        facts.size,
        facts.devices,
        facts.nodes,
        facts.rate,
        facts.clock,
        facts.blocks,
        facts.library,
        facts.collective,
        facts.link,
        vocabulary.of("system", systems),
        vocabulary.of("device", cases.gpu),
        vocabulary.of("name", cases.library),
        vocabulary.of("version", versions),
        vocabulary.of("curve", curves),
    )


def covariance(one: Points, two: Points, theta: Theta, *, narrow: bool = False) -> Floats:
    """[one, two] of the process without noise; ``narrow`` is float32."""
    e = {key: float(np.exp(value)) for key, value in theta.items()}
    result: NDArray[Any] = np.empty((len(one), len(two)), dtype=np.float32 if narrow else np.float64)  # Any: width
    block = max(1, 2_000_000 // max(len(two), 1))
    for begin in range(0, len(one), block):
        rows = slice(begin, begin + block)
        result[rows] = _block(one.take(rows), two, e)
    return result


def _block(one: Points, two: Points, e: Mapping[str, float]) -> Floats:
    kind = _other(one, two, "library") * e["library"] + _other(one, two, "collective") * e["collective"]
    width = np.abs(one.size[:, None] - two.size[None, :])
    counts = kind + sum(_gap(one, two, name, e[name]) for name in ("devices", "nodes", "blocks"))
    device = np.exp(-0.5 * (counts + (width / e["device_size"]) ** 2))
    total = e["device"] ** 2 * ~_other(one, two, "device") * device
    far = counts + _gap(one, two, "rate", e["rate"]) + _gap(one, two, "clock", e["clock"])
    far += _other(one, two, "link") * e["link"] + (width / e["shared_size"]) ** 2
    far += _gap(one, two, "share", e["shared_share"])
    total += e["shared"] ** 2 * np.exp(-0.5 * far)
    apart = _other(one, two, "system")
    if not apart.all():
        total += np.where(apart, 0.0, _within(one, two, e, kind, width))
    return np.asarray(total, dtype=np.float64)


def _within(one: Points, two: Points, e: Mapping[str, float], kind: Floats, width: Floats) -> Floats:
    """What points of one system share beyond that."""
    latency = one.share[:, None] * two.share[None, :]
    moving = (1 - one.share)[:, None] * (1 - two.share)[None, :]
    counts = _gap(one, two, "devices", e["own_devices"]) + _gap(one, two, "nodes", e["own_devices"])
    own = np.exp(-0.5 * counts) * (e["alpha"] ** 2 * latency + e["beta"] ** 2 * moving)
    own += np.exp(-0.5 * (counts + kind)) * (e["group_alpha"] ** 2 * latency + e["group_beta"] ** 2 * moving)
    near = kind + (width / e["curve_size"]) ** 2
    near += _gap(one, two, "devices", e["curve_devices"]) + _gap(one, two, "nodes", e["curve_devices"])
    near += _other(one, two, "name") * e["curve_name"] + _other(one, two, "version") * e["curve_version"]
    own += e["curve"] ** 2 * np.exp(-0.5 * near)
    own += e["own"] ** 2 * ~_other(one, two, "curve") * np.exp(-width / e["own_size"])
    return np.asarray(own)


def _gap(one: Points, two: Points, name: str, length: float) -> Floats:
    """Squared distances, in lengths."""
    squared: Floats = ((getattr(one, name)[:, None] - getattr(two, name)[None, :]) / length) ** 2
    return squared


def _other(one: Points, two: Points, name: str) -> NDArray[np.bool_]:
    """Where names differ."""
    other: NDArray[np.bool_] = getattr(one, name)[:, None] != getattr(two, name)[None, :]
    return other
