"""The field's techniques as what they demand of one mesh axis. The search knows none of them; pins may demand them.

Sources: DDP (Li et al., VLDB'20), ZeRO and FSDP (Rajbhandari et al., SC'20; Zhao et al., VLDB'23), Megatron's tensor
parallelism (Shoeybi et al., 2019) and sequence parallelism (Korthikanti et al., MLSys'23, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ir.graph import Node
from ir.operator import Split
from ir.sharding import Invariant, Shard, State
from pdv.pins.roles import Role, RoleOf

At = Literal["whole", "cut"]


@dataclass(frozen=True, slots=True)
class Technique:
    """What one axis must do.

    Attributes:
        roles: an operator with a cut of one of these roles takes one; others do the same work everywhere.
        rest: where parameters rest along the axis, if that is fixed.
        regather: whether copies gathered along the axis are dropped after forward, if that is fixed.
        others: whether operators without such a cut are free instead.
        inside: Megatron's plan, ``"sequence"`` with norms cut along the sequence.
    """

    roles: tuple[Role, ...] = ()
    rest: At | None = None
    regather: bool | None = None
    others: bool = False
    inside: Literal["tensor", "sequence"] | None = None


TECHNIQUES: Mapping[str, Technique] = {
    "ddp": Technique(("data",), rest="whole"),
    "zero-2": Technique(("data",), rest="cut", regather=False),
    "zero-3": Technique(("data",), rest="cut", regather=True),
    "fsdp": Technique(("data",), rest="cut", regather=True),
    "tensor": Technique(inside="tensor"),
    "megatron": Technique(inside="tensor"),
    "tensor+sequence": Technique(inside="sequence"),
    "context": Technique(("sequence", "context")),
    "expert": Technique(("expert",), others=True),
}


def splits_allowed(technique: Technique, size: int, role: RoleOf) -> Callable[[Node, Split], bool]:
    """The operators' part of a technique along an axis of ``size``."""

    def allowed(node: Node, option: Split) -> bool:
        if technique.inside is not None:
            return megatron(node, option, size, sequence=technique.inside == "sequence")
        wanted = {
            other.loop
            for other in node.op.splits(node.loops)
            if available(other, node, size) and role(node, other) in technique.roles
        }
        if wanted:
            return option.loop in wanted
        return technique.others or option.label == "none"

    return allowed


def is_followed(technique: Technique, size: int, role: RoleOf, nodes: Iterable[Node]) -> bool:
    """Whether any operator has a cut that the technique is about, and that divides."""
    if not technique.roles:
        return True
    cuts = ((node, split) for node in nodes for split in node.op.splits(node.loops))
    return any(available(split, node, size) and role(node, split) in technique.roles for node, split in cuts)


def available(split: Split, node: Node, size: int) -> bool:
    """Whether a cut's loop divides."""
    return split.loop is not None and node.loops.extents[split.loop] % size == 0


def rests_so(technique: Technique, size: int) -> Callable[[Node, State], bool]:
    """The parameters' part: whole, or cut wherever a dim divides."""

    def allowed(param: Node, state: State) -> bool:
        match technique.rest:
            case "whole":
                return isinstance(state, Invariant)
            case "cut":
                return isinstance(state, Shard) or all(extent % size for extent in param.type.shape)
        return True

    return allowed


def megatron(node: Node, option: Split, size: int, *, sequence: bool) -> bool:
    """Products by column or row, attention by heads; norms and residual sums repeated, or cut along the sequence."""
    result = option.result
    if node.op.is_dense:
        return option.loop in ("n", "k")
    if node.op.has_scores:
        return result == Shard(1)
    if node.op.looks_up_rows:
        rows = str(node.op.offset_loop)
        return option.label == (rows if node.loops.extents[rows] % size == 0 else "none")
    if node.op.is_row_norm:
        return result == Shard(1) if sequence else option.label == "none"
    return not cuts_samples(option)


def cuts_samples(split: Split) -> bool:
    """True for a cut of dim 0 of an activation: of the result, or of what a sum runs over."""
    if split.loop is None:
        return False
    if isinstance(split.result, Shard):
        return split.result.dim == 0
    return split.operands[0] == Shard(0) and not isinstance(split.operands[-1], Shard)
