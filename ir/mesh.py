"""The cluster as the program sees it: named axes of equal devices, slowest link first."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

JOINT = "+"
"""Between the names of axes that are taken as one: ``"dp+tp"``."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis: ``size`` groups of devices under one name."""

    name: str
    size: int

    def __post_init__(self) -> None:
        assert self.size >= 1, f"axis {self.name} has size {self.size}"


@dataclass(frozen=True)
class Mesh:
    """Axes from the slowest link to the fastest; rank = row-major index over them.

    Several axes may be named as one, a *joint* axis, which a collective crosses at once; its ranks are row-major too.
    """

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        assert len(set(names)) == len(names), f"mesh axes share a name: {names}"

    @classmethod
    def of(cls, **sizes: int) -> Mesh:
        """``Mesh.of(dp=2, tp=4)``: axes in the order written."""
        return cls(tuple(Axis(name, size) for name, size in sizes.items()))

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes, slow to fast."""
        return tuple(axis.size for axis in self.axes)

    def index(self, name: str) -> int:
        """Position of the axis called ``name``.

        Raises:
            KeyError: if the mesh has no such axis.
        """
        for position, axis in enumerate(self.axes):
            if axis.name == name:
                return position
        raise KeyError(name)

    def positions(self, name: str) -> tuple[int, ...]:
        """Positions, slow to fast, of the axes that a name stands for: one, or those of a joint axis.

        Raises:
            KeyError: if the mesh has no such axis, or a joint axis names its axes in another order.
        """
        found = tuple(self.index(part) for part in name.split(JOINT))
        if any(before >= after for before, after in itertools.pairwise(found)):
            raise KeyError(name)
        return found

    def size(self, name: str) -> int:
        """Devices along an axis, or along a joint one."""
        return math.prod(self.axes[position].size for position in self.positions(name))

    @cached_property
    def spans(self) -> tuple[str, ...]:
        """What a collective may cross: the axes in order, then each joint axis of two or more with several devices."""
        names = [axis.name for axis in self.axes if axis.size > 1]
        counts = range(2, len(names) + 1)
        joint = [JOINT.join(found) for count in counts for found in itertools.combinations(names, count)]
        return (*(axis.name for axis in self.axes), *joint)

    def __str__(self) -> str:
        return "x".join(f"{axis.name}={axis.size}" for axis in self.axes) or "single"
