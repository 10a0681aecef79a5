"""What parallel operators do to the arrays of all ranks, forward and backward: their transitions, executable."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ir.evaluation.einsum import Data
from ir.mesh import Mesh
from ir.ops.parallel import OPS as PARALLEL
from ir.sharding import Partial, Shard, Sharding, State, gradient_state
from ir.transition import Transition

Total = Callable[[Data, tuple[int, ...]], Data]


@dataclass(frozen=True, slots=True)
class Group:
    """Mesh axes, slow to fast, as seen from arrays [trials · ranks, ...]; ``total`` sums in the field."""

    mesh: Mesh
    axes: tuple[int, ...]
    trials: int
    total: Total

    @property
    def size(self) -> int:
        """Ranks along the axes."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def gather(self, x: Data, dim: int) -> Data:
        """Every rank gets the blocks of its group, joined along ``dim``: those of the inner axes first."""
        for axis in reversed(self.axes):
            x = self._gather(x, axis, dim)
        return x

    def slice(self, x: Data, dim: int) -> Data:
        """Every rank keeps its block along ``dim``."""
        for axis in self.axes:
            x = self._slice(x, axis, dim)
        return x

    def sum(self, x: Data) -> Data:
        """Every rank gets the sum over its group."""
        split, places = self._split(x), tuple(1 + axis for axis in self.axes)
        return self._join(np.broadcast_to(np.expand_dims(self.total(split, places), places), split.shape))

    def _gather(self, x: Data, axis: int, dim: int) -> Data:
        size, at = self.mesh.shape[axis], 1 + axis
        split = self._split(x)
        blocks = np.moveaxis(split, at, self._rank + dim)  # the axis now stands before dim
        whole = blocks.reshape(*blocks.shape[: self._rank + dim], size * x.shape[dim + 1], *x.shape[dim + 2 :])
        shape = (*split.shape[:at], size, *whole.shape[at:])
        return self._join(np.broadcast_to(np.expand_dims(whole, at), shape))

    def _slice(self, x: Data, axis: int, dim: int) -> Data:
        size, place = self.mesh.shape[axis], 1 + axis
        split = self._split(x)
        at = self._rank + dim + 1
        blocks = split.reshape(*split.shape[:at], size, split.shape[at] // size, *split.shape[at + 1 :])
        # the diagonal of (axis, block number), put back where the axis was
        return self._join(np.moveaxis(np.diagonal(blocks, axis1=place, axis2=at), -1, place))

    @property
    def _rank(self) -> int:
        return len(self.mesh.axes)

    def _split(self, x: Data) -> Data:
        return x.reshape(self.trials, *self.mesh.shape, *x.shape[1:])

    def _join(self, x: Data) -> Data:
        return x.reshape(-1, *x.shape[1 + self._rank :])


Move = Callable[[Group, Data, Mapping[str, Any]], Data]


def _run(group: Group, x: Data, before: State, after: State) -> Data:
    """Take x from a state to another: pending sums are taken, blocks joined, blocks cut."""
    if isinstance(before, Partial):
        x = group.sum(x)
    if isinstance(before, Shard):
        x = group.gather(x, before.dim)
    return group.slice(x, after.dim) if isinstance(after, Shard) else x


def _moves(transition: Transition) -> tuple[Move, Move]:
    """What a parallel operator does to values, and to gradients."""

    def forward(group: Group, x: Data, attrs: Mapping[str, Any]) -> Data:
        return _run(group, x, *transition.states(attrs))

    def backward(group: Group, x: Data, attrs: Mapping[str, Any]) -> Data:
        before, after = transition.states(attrs)
        return _run(group, x, gradient_state(after), gradient_state(before))

    return forward, backward


MOVES: Mapping[str, tuple[Move, Move]] = MappingProxyType({op.name: _moves(op.transition) for op in PARALLEL})
"""Parallel operator -> what it does forward, and to the gradient."""


def cut(x: Data, sharding: Sharding, mesh: Mesh) -> Data:
    """[trials, *global] -> [trials · ranks, *local]: what each rank holds of x; Shard blocks, else the whole."""
    ranks = np.broadcast_to(x[:, None], (x.shape[0], mesh.num_devices, *x.shape[1:]))
    pieces = ranks.reshape(-1, *x.shape[1:])
    for axis, state in enumerate(sharding):  # outer axes first
        if isinstance(state, Shard):
            pieces = Group(mesh, (axis,), x.shape[0], _no_sum).slice(pieces, state.dim)
    return pieces


def _no_sum(x: Data, axes: tuple[int, ...]) -> Data:
    raise AssertionError("cutting sums nothing")
