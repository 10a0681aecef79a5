"""The cluster as the program sees it: named axes of equal devices, slowest link first."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis: ``size`` groups of devices under one name."""

    name: str
    size: int

    def __post_init__(self) -> None:
        assert self.size >= 1, f"axis {self.name} has size {self.size}"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes from the slowest link to the fastest; rank = row-major index over them."""

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

    def size(self, name: str) -> int:
        """Size of the axis called ``name``."""
        return self.axes[self.index(name)].size

    def __str__(self) -> str:
        return "x".join(f"{axis.name}={axis.size}" for axis in self.axes) or "single"
