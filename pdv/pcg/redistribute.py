"""redistribute(x, before, after): the cheapest chain of parallel operators between two shardings.

Each step is one operator on one axis, each legal by the states it leaves; a chain of them is a composition of
the cancellation and fusion laws of DESIGN section 3, so its order never changes what it computes, only what it costs.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

from ir.mesh import Mesh
from ir.ops.parallel import move
from ir.sharding import Invariant, Partial, Replicate, Shard, Sharding, State, fits, format_sharding, local_bytes
from ir.types import TensorType
from pdv.cost.comm import AxisLink, move_seconds


class Step(NamedTuple):
    """One parallel operator: its name, its dims, its axis."""

    name: str
    dims: tuple[tuple[str, int], ...]
    axis: str


class Chain(NamedTuple):
    """A sequence of steps and what it costs (seconds; backward only where the tensor carries a gradient)."""

    forward_s: float
    backward_s: float
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass
class Redistribution:
    """Cheapest chains on one mesh, remembered by (shape, type, gradient, before)."""

    mesh: Mesh
    axes: tuple[AxisLink, ...]
    _found: dict[tuple[TensorType, bool, Sharding], dict[Sharding, Chain]] = field(default_factory=dict)

    def chain(self, tensor: TensorType, before: Sharding, after: Sharding, *, gradient: bool) -> Chain | None:
        """The cheapest chain, or None if there is none (nothing leaves Replicate, nothing enters Partial)."""
        return self.from_(tensor, before, gradient=gradient).get(after)

    def from_(self, tensor: TensorType, before: Sharding, *, gradient: bool) -> dict[Sharding, Chain]:
        """Cheapest chains from ``before`` to every sharding that can be reached (Dijkstra; ties by text)."""
        key = (tensor, gradient, before)
        if key not in self._found:
            self._found[key] = self._search(tensor, before, gradient)
        return self._found[key]

    def _search(self, tensor: TensorType, before: Sharding, gradient: bool) -> dict[Sharding, Chain]:
        done: dict[Sharding, Chain] = {}
        queue = [(0.0, 0, format_sharding(before), before, Chain(0.0, 0.0, ()))]
        while queue:
            _, _, _, sharding, chain = heapq.heappop(queue)
            if sharding in done:
                continue
            done[sharding] = chain
            for after, step, (forward_s, backward_s) in self._moves(tensor, sharding):
                if after in done:
                    continue
                back = backward_s if gradient else 0.0
                longer = Chain(chain.forward_s + forward_s, chain.backward_s + back, (*chain.steps, step))
                heapq.heappush(queue, (longer.seconds, len(longer.steps), format_sharding(after), after, longer))
        return done

    def _moves(self, tensor: TensorType, sharding: Sharding) -> list[tuple[Sharding, Step, tuple[float, float]]]:
        moves = []
        targets: list[State] = [Invariant(), Replicate(), *(Shard(dim) for dim in range(tensor.rank))]
        held = local_bytes(tensor, sharding, self.mesh)
        for position, axis in enumerate(self.mesh.axes):
            before = sharding[position]
            inner = sharding[position + 1 :]
            if isinstance(before, Shard) and before in inner:
                continue  # the inner cut of the same dim has to go first
            for target in targets:
                after = (*sharding[:position], target, *inner)
                found = move(before, target)
                if (
                    found is None
                    or (isinstance(target, Shard) and target in inner)
                    or not fits(tensor, after, self.mesh)
                ):
                    continue
                name, dims = found
                seconds = move_seconds(name, self.axes[position], held)
                moves.append((after, Step(name, tuple(dims.items()), axis.name), seconds))
        return moves


def all_shardings(tensor: TensorType, mesh: Mesh, states: tuple[State, ...] | None = None) -> tuple[Sharding, ...]:
    """Every sharding of a tensor that divides evenly (over ``states``, by default all but Replicate)."""
    options = states or (Invariant(), *(Shard(dim) for dim in range(tensor.rank)), Partial())
    found: list[Sharding] = [()]
    for _ in mesh.axes:
        found = [(*sharding, state) for sharding in found for state in options]
    return tuple(sharding for sharding in found if fits(tensor, sharding, mesh))
