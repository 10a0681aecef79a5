"""Moves between two shardings, one operator for each axis that changes: what a hand-written plan does."""

from __future__ import annotations

from dataclasses import dataclass

from ir.graph import Node
from ir.ops.parallel import move
from ir.sharding import Invariant, Partial, Shard, Sharding, State
from ir.types import TensorType
from pdv.pcg.redistribute import Chain, Redistribution
from pdv.pcg.states import MoveStep


@dataclass
class StraightMoves(Redistribution):
    """The shortest chain rather than the cheapest; four axes cost no more than one."""

    def chain(self, tensor: TensorType, before: Sharding, after: Sharding, *, gradient: bool) -> Chain | None:
        """One operator an axis, sums first, then from the inner axis to the outer as far as cuts allow."""
        del tensor, gradient  # what it costs is not asked
        steps: list[MoveStep] = []
        states = list(before)
        while states != list(after):
            position = self._next(states, after)
            assert len(steps) <= 4 * len(states), f"no way from {before} to {after}"
            if position is None:
                if not self._loosen(states, after, steps):
                    return None
                continue
            self._step(states, position, after[position], steps)
        return Chain(0.0, 0.0, tuple(steps))

    def _step(self, states: list[State], position: int, target: State, steps: list[MoveStep]) -> None:
        found = move(states[position], target)
        assert found is not None, (states, position, target)
        steps.append(MoveStep(found[0], tuple(found[1].items()), self.mesh.axes[position].name))
        states[position] = target

    def _next(self, states: list[State], after: Sharding) -> int | None:
        """An axis that may change now: those with a sum to take first, for it makes tensors no larger."""
        changing = [place for place in reversed(range(len(states))) if states[place] != after[place]]
        changing.sort(key=lambda place: not isinstance(states[place], Partial))
        for place in changing:
            if not self._is_blocked(states, after, place) and move(states[place], after[place]) is not None:
                return place
        return None

    def _is_blocked(self, states: list[State], after: Sharding, place: int) -> bool:
        """True if an inner axis cuts the dim in question, or if an outer one has to cut or gather it first."""
        inner = states[place + 1 :]
        if any(isinstance(state, Shard) and state in inner for state in (states[place], after[place])):
            return True
        waiting = [outer for outer in range(place) if states[outer] != after[outer]]
        return isinstance(after[place], Shard) and any(after[place] in (states[at], after[at]) for at in waiting)

    def _loosen(self, states: list[State], after: Sharding, steps: list[MoveStep]) -> bool:
        """Undo an inner cut that is in the way of an outer axis."""
        for place in reversed(range(len(states))):
            outer = [state for at in range(place) if states[at] != after[at] for state in (states[at], after[at])]
            if isinstance(states[place], Shard) and states[place] in outer:
                self._step(states, place, Invariant(), steps)
                return True
        return False


def as_made(value: Node, made: Sharding) -> Sharding:
    """An output leaves as it was made, pending sums taken: the loss works on the cut vocabulary (Megatron-LM)."""
    return tuple(Invariant() if isinstance(state, Partial) else state for state in made)
