"""Which weights an emitted program gathers at once (ZeRO-3), read off a PCG: those of a block, by their names.

What belongs to no numbered block is a unit before the first one, and another behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ir.graph import Node
from ir.mesh import JOINT
from ir.transition import Communication

NUMBERED = re.compile(r"^(?:.*?\.)?(\d+)\.")
"""What the names of a block's parameters begin with: ``transformer.h.3.``"""

Key = tuple[str, str, str]
"""The block, the axis, the type."""


def joins_unit(move: Node) -> bool:
    """True of a trained parameter gathered from where it rests, for each use, whose gradients are scattered."""
    if move.op.kind != "parallel" or not move.operands[0].is_param or JOINT in move.attr("axis"):
        return False
    param, both = move.operands[0], (move.op.transition.forward, move.op.transition.backward)
    scattered = both == (Communication.ALL_GATHER, Communication.REDUCE_SCATTER)
    return scattered and bool(param.attr("regather") and param.attr("trainable"))


def gathered_units(reads: Iterable[Node]) -> dict[Node, Key]:
    """The unit of each move that joins one, among the values that a program reads, in order; the first read decides."""
    found: dict[Node, Key] = {}
    blocks = False
    for move in reads:
        if move in found or not joins_unit(move):
            continue
        param = move.operands[0]
        match = NUMBERED.match(str(param.attr("name")))
        blocks = blocks or match is not None
        block = match[0] if match else "behind" if blocks else "before"
        found[move] = (block, str(move.attr("axis")), str(param.type.dtype))
    return found
