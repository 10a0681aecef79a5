"""Proof that a program runs slice by slice along an axis of time: each rank of it gets nothing of later ranks.

Gathered blocks of later ranks are zero, forward and backward, so programs agree only if these change nothing. That
attention does not look ahead is a law that a field does not know, exp(-inf) == 0: here softmax is zero where a row has
-inf, as is what it gives of gradients there. Entry point: ``verify_in_time``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from ir.errors import VerificationError
from ir.evaluation.collectives import MOVES, Group, Move
from ir.evaluation.einsum import Data
from ir.evaluation.modular import PrimeField
from ir.graph import Graph
from ir.mesh import Mesh
from ir.proof.exact import FULL_SIZE, Proof, verify_equal
from ir.proof.smaller_mesh import MOST_RANKS
from ir.scaling.scale import shared_constants
from ir.tape import Known

FEW_ELEMENTS = 1 << 20  # of all values on all ranks


class VanishingField(PrimeField):
    """A prime field in which functions of rows that are zero at -inf (``Known.vanishes``) are so."""

    def row(self, function: Known, x: Data) -> tuple[Data, Callable[[Data], Data]]:
        """See PrimeField; a row that is -inf alone is zero, too."""
        y, pullback = super().row(function, x)
        if not function.vanishes:
            return y, pullback
        infinite, _ = self.constant(float("-inf"))
        per_trial = np.repeat(infinite.reshape(-1), len(x) // self.trials).reshape(-1, *(1,) * (x.ndim - 1))
        same = (x == per_trial).reshape(self.trials, -1, *x.shape[1:]).all(axis=0)  # in all trials, as arguments are
        kept = np.concatenate([~same] * self.trials)
        return y * kept, lambda g: pullback(g * kept) * kept


def verify_in_time(source: Graph, sliced: Graph, mesh: Mesh, axis: str, *, gradients: bool = True) -> Proof:
    """Prove ``sliced`` on ``mesh`` equal to ``source``, its ranks along ``axis`` one after the other.

    At small sizes a mask that is a constant is any mask: by one that says who sees whom a small program alone, at its
    own sizes, is proved.

    Raises:
        ShardingError: if ``sliced`` is no legal PCG.
        VerificationError: naming the first output or parameter that differs.
    """
    prove = partial(
        verify_equal, source, sliced, mesh, gradients=gradients, moves=_moves_in_time(axis), field_of=VanishingField
    )
    elements = sum(node.type.num_elements for node in sliced.nodes) * mesh.num_devices
    try:
        return prove()
    except VerificationError:
        if elements > FEW_ELEMENTS or mesh.num_devices > MOST_RANKS:
            raise
        return prove(scale=False)


def is_of_any_mask(proof: Proof, source: Graph, sliced: Graph) -> bool:
    """Whether a proof looked at no constant's values: at small sizes, where those of both programs are symbols."""
    has_constants = any(node.is_const and node.type.num_elements > 1 for node in (*source.nodes, *sliced.nodes))
    return FULL_SIZE not in proof.scaled and (not has_constants or bool(shared_constants((source, sliced))))


def _moves_in_time(axis: str) -> Mapping[str, tuple[Move, Move]]:
    """What parallel operators do where along the axis nothing is known of later ranks; outputs are combined at last."""

    def gathering(forward: Move, backward: Move) -> tuple[Move, Move]:
        def gather(group: Group, x: Data, attrs: Mapping[str, Any]) -> Data:
            whole = forward(group, x, attrs)
            return _without_later(group, whole, int(attrs["dim"])) if _is_along(group, axis) else whole

        def scatter(group: Group, x: Data, attrs: Mapping[str, Any]) -> Data:
            known = _without_later(group, x, int(attrs["dim"])) if _is_along(group, axis) else x
            return backward(group, known, attrs)

        return gather, scatter

    return MappingProxyType({**MOVES, "all_gather": gathering(*MOVES["all_gather"])})


def _is_along(group: Group, axis: str) -> bool:
    return [group.mesh.axes[place].name for place in group.axes] == [axis]


def _without_later(group: Group, x: Data, dim: int) -> Data:
    """[trials · ranks, ...] with zeros where blocks along ``dim`` are of later ranks of the group."""
    (place,) = group.axes
    count = group.mesh.shape[place]
    ranks = np.indices(group.mesh.shape)[place].reshape(-1)
    blocks = np.arange(x.shape[1 + dim]) // (x.shape[1 + dim] // count)
    kept = np.tile(blocks[None] <= ranks[:, None], (group.trials, 1))
    found: Data = x * kept.reshape(len(kept), *(1,) * dim, -1, *(1,) * (x.ndim - dim - 2))
    return found
