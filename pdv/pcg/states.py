"""The shardings of tensors of one rank as vertices, parallel operators as the edges between. Entry: ``state_graph``."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ir.mesh import Mesh
from ir.ops.parallel import move, transition_of
from ir.sharding import (
    Invariant,
    Partial,
    Replicate,
    Shard,
    Sharding,
    State,
    inner_states,
    shard_degrees,
    with_states,
)
from ir.transition import Communication
from pdv.pcg.units import moves_units

Seconds = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


class MoveStep(NamedTuple):
    """One parallel operator: its name, its dims, its axis."""

    name: str
    dims: tuple[tuple[str, int], ...]
    axis: str


@dataclass(frozen=True)
class StateGraph:
    """The shardings of a tensor of one rank as vertices, the parallel operators as edges; edges sorted by target.

    Attributes:
        shardings: every sharding, whether or not a tensor's sizes divide.
        index: its number.
        degrees: [shardings, rank], into how many blocks each dim is cut.
        tails, heads: [edges] the shardings before and after.
        kinds: [edges] which of ``operators`` it is, as (name, axes).
        steps: [edges] the operator.
    """

    shardings: tuple[Sharding, ...]
    index: dict[Sharding, int]
    degrees: Indices
    tails: Indices
    heads: Indices
    kinds: Indices
    operators: tuple[tuple[str, str], ...]
    steps: tuple[MoveStep, ...]

    @classmethod
    def of(cls, mesh: Mesh, rank: int) -> StateGraph:
        """All states of ``rank`` dims on a mesh."""
        states: list[State] = [Invariant(), Replicate(), Partial(), *(Shard(dim) for dim in range(rank))]
        shardings = tuple(itertools.product(states, repeat=len(mesh.axes)))
        index = {sharding: number for number, sharding in enumerate(shardings)}
        edges = sorted(_edges(mesh, shardings, index, states))
        kinds = {kind: number for number, kind in enumerate(sorted({(step.name, step.axis) for *_, step in edges}))}
        degrees = np.array([shard_degrees(s, mesh, rank) for s in shardings]).reshape(len(shardings), rank)
        return cls(
            shardings,
            index,
            degrees,
            np.array([tail for _, tail, _, _ in edges], dtype=np.int64),
            np.array([head for head, *_ in edges], dtype=np.int64),
            np.array([kinds[step.name, step.axis] for *_, step in edges], dtype=np.int64),
            tuple(kinds),
            tuple(step for *_, step in edges),
        )

    @cached_property
    def alike(self) -> Indices:
        """[edges] equal where one operator moves equal shares of a tensor."""
        shares = self.degrees.prod(axis=1)[self.tails]
        return np.asarray(shares * len(self.operators) + self.kinds, dtype=np.int64)

    @cached_property
    def copies(self) -> Flags:
        """[shardings] whether some axis holds copies that are used differently."""
        return np.array([any(isinstance(state, Replicate) for state in s) for s in self.shardings], dtype=bool)

    @cached_property
    def gathers(self) -> Flags:
        """[edges] whether the operator's result is a copy that takes memory."""
        return np.array([transition_of(step.name).fetches for step in self.steps], dtype=bool)

    @cached_property
    def joins(self) -> Flags:
        """[edges] whether each rank gets the whole from the blocks of all."""
        return np.array([transition_of(step.name).gathers for step in self.steps], dtype=bool)

    @cached_property
    def of_units(self) -> Flags:
        """[edges] whether the operator gathers parameters a unit at a time, from where they rest."""
        return np.array([moves_units(transition_of(step.name), step.axis) for step in self.steps], dtype=bool)

    @cached_property
    def copied(self) -> Indices:
        """[edges, forward and backward, before and after] how often an emitted program copies what a rank has."""
        found = []
        for step in self.steps:
            transition = transition_of(step.name)
            dims = transition.joined_dims(dict(step.dims))
            ahead, behind = map(Communication.copies, transition.communications, dims)
            found.append((ahead, behind[::-1]))  # backward what was after is there before
        return np.array(found, dtype=np.int64).reshape(-1, 2, 2)

    @cached_property
    def names_only(self) -> Flags:
        """[edges] whether the operator only names a state."""
        return np.array([transition_of(step.name).only_names for step in self.steps], dtype=bool)


@lru_cache(maxsize=64)  # searches of equal meshes ask for the same
def state_graph(mesh: Mesh, rank: int) -> StateGraph:
    """``StateGraph.of``."""
    return StateGraph.of(mesh, rank)


def _edges(
    mesh: Mesh, shardings: tuple[Sharding, ...], index: dict[Sharding, int], states: list[State]
) -> list[tuple[int, int, int, MoveStep]]:
    """(head, tail, span, step) of every legal operator, on each axis and on axes in the same state as one."""
    edges = []
    spans = [(number, name, mesh.positions(name)) for number, name in enumerate(mesh.spans)]
    for tail, sharding in enumerate(shardings):
        for number, name, positions in spans:
            before, inner = sharding[positions[0]], inner_states(sharding, positions)
            if any(sharding[position] != before for position in positions[1:]):
                continue
            if isinstance(before, Shard) and before in inner:
                continue  # the inner cut of the same dim has to go first
            for target in states:
                found = move(before, target)
                if found is None or (isinstance(target, Shard) and target in inner):
                    continue
                head = index[with_states(sharding, positions, target)]
                edges.append((head, tail, number, MoveStep(found[0], tuple(found[1].items()), name)))
    return edges
