"""What a parallel operator does along its axis: all of it follows from the states before and after.

Decides: its dual, what its ranks send forward and backward, along which dims blocks are joined and cut. Which operators
there are is declared in ``ir/ops/parallel.py``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from ir.sharding import Invariant, Partial, Replicate, Shard, State, gradient_kind

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
COLLECTIVES: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
Attrs = Mapping[str, Hashable]


class Communication(Enum):
    """What the ranks of an axis do with what they hold; the first two call no collective."""

    NONE = None
    SLICE = "slice"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"

    @property
    def collective(self) -> Collective | None:
        """The collective that is called, if one is."""
        return next((name for name in COLLECTIVES if name == self.value), None)

    def copies(self, joined: int) -> tuple[int, int]:
        """How often an emitted program copies what a rank had, and what it has then, beside the collective.

        What is gathered along dim 0 (``joined``) lies in order as it arrives; behind other dims the blocks are put
        together. Blocks that are scattered or exchanged are laid side by side first, and a sum is taken in a copy.
        """
        match self:
            case Communication.SLICE:
                return 0, 1
            case Communication.ALL_REDUCE | Communication.REDUCE_SCATTER:
                return 1, 0
            case Communication.ALL_GATHER:
                return 0, int(joined > 0)
            case Communication.ALL_TO_ALL:
                return 1, int(joined > 0)
            case _:
                return 0, 0


@dataclass(frozen=True, slots=True)
class Transition:
    """The kinds of state before and after, along one axis; attributes of a node (``dim``, ``to_dim``) name the dims."""

    before: type[State]
    after: type[State]

    @property
    def dims(self) -> tuple[str, ...]:
        """The attributes that name the dims of ``Shard`` states, in order."""
        return ("dim", "to_dim")[: [self.before, self.after].count(Shard)]

    def states(self, attrs: Attrs) -> tuple[State, State]:
        """The states before and after of a node with these attributes."""
        dims = iter(self.dims)
        before, after = (
            Shard(_dim(attrs, next(dims))) if kind is Shard else _WHOLE[kind] for kind in (self.before, self.after)
        )
        return before, after

    @property
    def forward(self) -> Communication:
        """What ranks do to the value."""
        cut = self.after is Shard
        if self.before is Shard:
            return Communication.ALL_TO_ALL if cut else Communication.ALL_GATHER
        if self.before is Partial:
            return Communication.REDUCE_SCATTER if cut else Communication.ALL_REDUCE
        return Communication.SLICE if cut else Communication.NONE

    @property
    def backward(self) -> Communication:
        """What ranks do to the gradient: that of the dual."""
        return self.dual.forward

    @property
    def communications(self) -> tuple[Communication, Communication]:
        """Forward and backward."""
        return self.forward, self.backward

    @property
    def dual(self) -> Transition:
        """What happens to the gradient; each operator's dual is an operator."""
        return Transition(gradient_kind(self.after), gradient_kind(self.before))

    @property
    def sums(self) -> bool:
        """True if it takes a pending sum."""
        return self.before is Partial

    @property
    def fetches(self) -> bool:
        """True if the result is a copy of blocks that other ranks hold."""
        return self.before is Shard

    @property
    def gathers(self) -> bool:
        """True if each rank gets the whole tensor from the blocks of all."""
        return self.fetches and self.after is not Shard

    @property
    def only_names(self) -> bool:
        """True if the value stays as it is, and its state alone is named differently."""
        return self.before is not self.after and self.forward is Communication.NONE

    def joined_dims(self, attrs: Attrs) -> tuple[int, int]:
        """The dims along which blocks are joined, forward and backward; 0 where none are."""
        before, after = self.states(attrs)
        return _dim_of(before), _dim_of(after)


STAYS = Transition(Invariant, Invariant)
"""Of operators that compute: they change no state along an axis by themselves."""

_WHOLE: Mapping[type[State], State] = {kind: kind() for kind in (Invariant, Replicate, Partial)}


def _dim(attrs: Attrs, name: str) -> int:
    dim = attrs[name]
    assert isinstance(dim, int), attrs
    return dim


def _dim_of(state: State) -> int:
    return state.dim if isinstance(state, Shard) else 0
