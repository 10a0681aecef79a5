"""What an expert would write by hand, as pins: which loop each operator cuts along each axis, where weights rest.

Each of these is a *restriction* of the same space and is priced by the same model: the pinned search completes the
expert's plan in the best way that keeps it. Sources: DDP (Li et al., VLDB'20), FSDP (Zhao et al., VLDB'23), Megatron's
tensor parallelism (Shoeybi et al., 2019) and sequence parallelism (Korthikanti et al., MLSys'23, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from ir.graph import Node
from ir.mesh import Mesh
from ir.operator import Split
from ir.sharding import Invariant, Partial, Shard, State
from pdv.pins import RoleOf
from pdv.pins.techniques import megatron
from pdv.problem import Pins

Role = Literal["ddp", "fsdp", "tp", "tp+sp"]
SplitPin = Callable[[Node, Split, int], bool]


def expert(roles: Mapping[str, Role], mesh: Mesh) -> Pins:
    """Pins that give each mesh axis one role."""
    sizes = {axis.name: axis.size for axis in mesh.axes}
    data, follow = {name for name, role in roles.items() if role in ("ddp", "fsdp")}, RoleOf()

    def split(node: Node, axis: str, option: Split) -> bool:
        if axis in data:
            return _data(node, option, sizes[axis])
        return megatron(node, option, sizes[axis], follow, sequence=roles[axis] == "tp+sp")

    def storage(param: Node, axis: str, state: State) -> bool:
        match roles[axis]:
            case "ddp":
                return isinstance(state, Invariant)
            case "fsdp":
                cut = any(extent % sizes[axis] == 0 for extent in param.type.shape)
                return isinstance(state, Shard) if cut else True
            case _:
                return True

    regather: Literal["always", "never"] = "always" if "fsdp" in roles.values() else "never"
    return Pins(split, storage, regather, "+".join(f"{role}@{axis}" for axis, role in roles.items()))


def _data(node: Node, option: Split, size: int) -> bool:
    """Cut samples wherever there are any to cut."""
    available = any(_is_data(node, other, size) for other in node.op.splits(node.loops))
    return _is_data(node, option, size) if available else option.label == "none"


def _is_data(node: Node, option: Split, size: int) -> bool:
    if option.loop is None or node.loops.extents[option.loop] % size:
        return False
    first = node.operands[1] if node.op.name == "embedding" else node.operands[0]
    if first.op.name in ("param", "const"):
        return False
    if isinstance(option.result, Partial):  # statistics of batch normalisation
        return node.op.kind == "row" and option.operands[0] == Shard(0)
    state = option.operands[1] if node.op.name == "embedding" else option.operands[0]
    return option.result == Shard(0) and state == Shard(0)
