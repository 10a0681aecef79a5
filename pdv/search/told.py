"""What a watch is told of a search over several meshes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdv.watch import Standing, Watch


@dataclass
class Told:
    """What a watch was told of a search over ``meshes``."""

    watch: Watch
    meshes: int
    best_s: float | None = None
    bound_s: float | None = None

    def met(self, number: int) -> Callable[[float, float], None]:
        """To be called, in the search of a mesh, with each better plan that it meets."""
        self._tell(number, self.best_s)
        return lambda cpu_s, cost_s: self._tell(number, cost_s if self.best_s is None else min(cost_s, self.best_s))

    def took(self, number: int, seconds: float, bound_s: float) -> None:
        """Tell of a plan that fits, and of the bound over its mesh and those before."""
        self.best_s = seconds if self.best_s is None else min(seconds, self.best_s)
        self.bound_s = bound_s if self.bound_s is None else min(bound_s, self.bound_s)
        self._tell(number, self.best_s)

    def _tell(self, number: int, best_s: float | None) -> None:
        self.watch.tell(Standing(f"mesh {number + 1} of {self.meshes}", best_s, self.bound_s))
