"""The field's techniques as what they demand of one mesh axis. The search knows none of them; pins may demand them.

Sources: DDP (Li et al., VLDB'20), ZeRO and FSDP (Rajbhandari et al., SC'20; Zhao et al., VLDB'23), Megatron's tensor
parallelism (Shoeybi et al., 2019) and sequence parallelism (Korthikanti et al., MLSys'23, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ir.graph import Node
from ir.operator import Split
from ir.sharding import Invariant, Shard, State
from pdv.pins.constraint import no_traces
from pdv.pins.roles import Role, RoleOf
from pdv.pins.weights import Weights

At = Literal["whole", "cut"]
Followers = Callable[[Node], bool]


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


def splits_allowed(
    technique: Technique, size: int, role: RoleOf, followers: Followers
) -> Callable[[Node, Split], bool]:
    """The operators' part of a technique along an axis of ``size``; ``followers``: those that it is about."""

    def allowed(node: Node, option: Split) -> bool:
        if technique.inside is not None:
            lone = node.op.kind == "stencil" and followers(node)
            of_megatron = megatron(node, option, size, role, sequence=technique.inside == "sequence")
            return of_megatron and (not lone or available(option, node, size))
        wanted = {
            other.loop
            for other in node.op.splits(node.loops)
            if available(other, node, size) and role(node, other) in technique.roles
        }
        if wanted:
            return option.loop in wanted
        return technique.others or option.label == "none"

    return allowed


def find_followers(technique: Technique, size: int, role: RoleOf, nodes: Iterable[Node]) -> Followers | None:
    """The operators that a technique is about, in a program and its rewrites; None if there are none to follow it.

    Those of Megatron's are products, attention and lookups; of a program without them, convolutions that divide.
    """
    if technique.inside is None:

        def has_role(node: Node) -> bool:
            cuts = (split for split in node.op.splits(node.loops) if available(split, node, size))
            return any(role(node, split) in technique.roles for split in cuts)

        return has_role if any(map(has_role, nodes)) else None

    def is_inside(node: Node) -> bool:
        return is_product(node, role.weights) or node.op.has_scores or node.op.looks_up_rows

    def is_convolution(node: Node) -> bool:
        if is_inside(node):  # what a rewrite makes of one
            return True
        if node.op.kind != "stencil" or not role.weights.matrices(node):
            return False
        cuts = (split for split in node.op.splits(node.loops) if available(split, node, size))
        return any(megatron(node, split, size, role, sequence=False) for split in cuts)

    listed = list(nodes)
    return next((kind for kind in (is_inside, is_convolution) if any(map(kind, listed))), None)


def follows(technique: Technique, node: Node, option: Split, role: RoleOf, followers: Followers) -> bool:
    """Whether a cut that the technique allows is one that it asks for."""
    if technique.inside is not None:
        return option.loop is not None and followers(node)
    return role(node, option) in technique.roles


def traces_of(technique: Technique, weights: Weights) -> Callable[[Node], frozenset[Hashable]]:
    """What rewrites must leave: what is multiplied by column or row is so multiplied, by whatever operator."""

    def traces(node: Node) -> frozenset[Hashable]:
        return weights.read(node) if is_product(node, weights) else scores_of(node)

    return traces if technique.inside is not None else no_traces


def scores_of(node: Node) -> frozenset[Hashable]:
    """What a rewrite must leave of attention where it is told from other operators: it can be unfolded into these."""
    return frozenset({(node.op.name, node.type)} if node.op.has_scores else ())


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


def megatron(node: Node, option: Split, size: int, role: RoleOf, *, sequence: bool) -> bool:
    """Products by column or row, attention by heads; norms and residual sums repeated, or cut along the sequence."""
    result = option.result
    if is_product(node, role.weights):
        return option.loop in _loops_of_weights(node, role.weights)
    if node.op.has_scores:
        return result == Shard(1)
    if node.op.looks_up_rows:
        rows = str(node.op.offset_loop)
        return option.label == (rows if node.loops.extents[rows] % size == 0 else "none")
    if node.op.is_row_norm:
        return result == Shard(1) if sequence else option.label == "none"
    return node in role.weights or not (cuts_samples(option) or role(node, option) == "data")


def is_product(node: Node, weights: Weights) -> bool:
    """True of a sum of products with a matrix of weights, whatever the operator is called."""
    return node.op.is_dense or (node.op.kind == "contraction" and bool(weights.matrices(node)))


def _loops_of_weights(node: Node, weights: Weights) -> frozenset[str]:
    """Columns and rows of a product's weights; not what activations and results have as well, such as experts."""
    loops, places = node.loops, weights.matrices(node)
    if not places:  # two activations, multiplied by what is written for layers
        return frozenset({"n", "k"})
    everywhere = [*loops.operands, loops.result]
    held = {name for name in loops.extents if any(loops.holds(loops.operands[at], name) for at in places)}
    return frozenset(name for name in held if not all(loops.holds(dims, name) for dims in everywhere))


def cuts_samples(split: Split) -> bool:
    """True for a cut of dim 0 of an activation: of the result, or of what a sum runs over."""
    if split.loop is None:
        return False
    if isinstance(split.result, Shard):
        return split.result.dim == 0
    return split.operands[0] == Shard(0) and not isinstance(split.operands[-1], Shard)
