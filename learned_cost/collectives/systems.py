"""How a system that the model was not trained on may deviate from it, so that a few measurements tell of all others.

Decides how alike the deviations of two collectives of one system are: a sum of few causes, each in proportion to the
share of the seconds that it acts on (starts and steps, bytes) and the same for all that it names. Entry point:
``deviations``, without the noise of a measurement.

Source: Rasmussen and Williams, "Gaussian processes for machine learning" (2006), chapter 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from learned_cost.collectives.process import Points
from learned_cost.collectives.rows import LINKS, Floats


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why a system is slower or faster than foretold.

    Attributes:
        std: of log seconds of what it acts on alone.
        acts_on: "latency", "bytes" or "all".
        same: names that two collectives share for it to be the same in both.
        link: of which links; "" for each by itself.
        devices: over how many doublings of them it is alike (0: any number), or GROWS: with each doubling after two.
        size: over how many doublings of bytes it is alike (0: any).
    """

    std: float
    acts_on: str
    same: tuple[str, ...] = ()
    link: str = ""
    devices: float = 0.0
    size: float = 0.0


GROWS = -1.0
NEAR_NODES = 1.0  # doublings of nodes over which every cause is alike
NEAR_BLOCKS = 0.7  # of the logarithm of SMs that copy, for causes that are alike in size
# Chosen on what the model missed of each system when that was left out (docs/collectives.md).
CAUSES = (
    Cause(0.2, "latency"),
    Cause(0.41, "latency", ("library",)),
    Cause(0.23, "latency", ("library", "collective"), devices=1.0),
    Cause(0.14, "latency", ("name", "version")),
    Cause(0.23, "bytes", ("link",)),
    Cause(0.25, "bytes", ("link", "library")),
    Cause(0.19, "bytes", ("link", "collective")),
    Cause(0.25, "bytes", ("link", "name", "version"), devices=1.0),
    Cause(0.90, "bytes", link="pcie", devices=GROWS),
    Cause(0.37, "bytes", link="between"),
    Cause(0.14, "all", ("link", "library", "collective"), size=2.0),
    Cause(0.11, "all", ("link", "library", "collective", "name", "version"), devices=1.0, size=2.0),
)
OWN, OWN_SIZE = 0.14, 2.8  # of a curve by itself; doublings of bytes over which it is alike
NOISE = 0.03**2  # variance of a measurement


def deviations(one: Points, two: Points) -> Floats:
    """[one, two] covariance of log seconds; none between systems."""
    result = np.zeros((len(one), len(two)))
    inside = one.system[:, None] == two.system[None, :]
    if not inside.any():
        return result
    nodes = np.exp(-0.5 * _gap(one.nodes, two.nodes, NEAR_NODES))
    width = np.abs(one.size[:, None] - two.size[None, :])
    for cause in CAUSES:
        result += _alike(cause, one, two, width) * nodes
    result += OWN**2 * (one.curve[:, None] == two.curve[None, :]) * np.exp(-width / OWN_SIZE)
    return np.asarray(np.where(inside, result, 0.0))


def _alike(cause: Cause, one: Points, two: Points, width: Floats) -> Floats:
    alike = np.outer(_weight(cause, one), _weight(cause, two))
    for name in cause.same:
        alike *= getattr(one, name)[:, None] == getattr(two, name)[None, :]
    if cause.devices > 0:
        alike *= np.exp(-0.5 * _gap(one.devices, two.devices, cause.devices))
    if cause.size > 0:
        alike *= np.exp(-0.5 * ((width / cause.size) ** 2 + _gap(one.blocks, two.blocks, NEAR_BLOCKS)))
    return np.asarray(alike)


def _weight(cause: Cause, points: Points) -> Floats:
    """[points] deviation of each by this cause."""
    acts: Mapping[str, Floats] = {"latency": points.share, "bytes": 1.0 - points.share, "all": np.ones(len(points))}
    weight = cause.std * acts[cause.acts_on]
    if cause.link:
        weight = weight * (points.link == LINKS.index(cause.link))
    if cause.devices == GROWS:
        weight = weight * (points.devices - 1.0)
    return np.asarray(weight)


def _gap(one: Floats, two: Floats, length: float) -> Floats:
    return np.asarray(((one[:, None] - two[None, :]) / length) ** 2)
