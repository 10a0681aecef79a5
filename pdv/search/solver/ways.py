"""The ways to run an operator on a mesh, one split per axis, whatever its sizes are. Entry point: ``ways_of``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ir.mesh import Mesh
from ir.operator import Split
from ir.sharding import Partial, Sharding
from ir.verify import split_degrees
from pdv.pcg.states import Flags, Indices, state_graph

Cut = tuple[tuple[str, int], ...]
"""By loop that is cut, into how many parts."""


class Way(NamedTuple):
    """One split on each axis: how loops are cut, what it needs and what it makes."""

    splits: tuple[Split, ...]
    cut: Cut
    needs: tuple[Sharding, ...]
    result: Sharding


@dataclass(frozen=True)
class Ways:
    """All ways to take one split on each axis.

    ``cuts``: the first way that cuts loops so; [operands and result, ways] ``vertices`` of the states
    (``state_graph``), and whether a state is ``partial`` on some axis.
    """

    ways: tuple[Way, ...]
    cuts: Mapping[Cut, tuple[Split, ...]]
    vertices: Indices
    partial: Flags


@lru_cache(maxsize=1 << 12)  # searches ask for the same operators in other sizes
def ways_of(options: tuple[tuple[Split, ...], ...], mesh: Mesh, ranks: tuple[int, ...]) -> Ways:
    """Of ``options`` by axis; ``ranks`` are of the operands and the result."""
    found: list[Way] = []
    cuts: dict[Cut, tuple[Split, ...]] = {}
    for splits in itertools.product(*options):
        needs = tuple([tuple([split.operands[at] for split in splits]) for at in range(len(ranks) - 1)])
        cut = tuple(sorted(split_degrees(splits, mesh).items()))
        found.append(Way(splits, cut, needs, tuple([split.result for split in splits])))
        cuts.setdefault(cut, splits)
    states = [[(*way.needs, way.result)[at] for way in found] for at in range(len(ranks))]
    indices = [state_graph(mesh, rank).index for rank in ranks]
    vertices = [[index[state] for state in each] for index, each in zip(indices, states, strict=True)]
    partial = [[Partial() in state for state in each] for each in states]
    return Ways(tuple(found), cuts, np.array(vertices, dtype=np.int64), np.array(partial, dtype=bool))
