"""Which weights an emitted program gathers at once, read off a PCG: those of a block, by their names.

A unit is gathered for each use (ZeRO-3) or, where several micro-batches of a pipeline share copies, once a step
(ZeRO-1): its gradients are then scattered behind the last of them.

What belongs to no numbered block is a unit before the first one, and another behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ir.graph import Node
from ir.mesh import JOINT
from ir.transition import Communication, Transition

NUMBERED = re.compile(r"^(?:.*?\.)?(\d+)\.")
"""What the names of a block's parameters begin with: ``transformer.h.3.``"""

Key = tuple[str, str, str, bool]
"""The block, the axis, the type, and whether it is gathered once a step."""


def moves_units(transition: Transition, axis: str) -> bool:
    """True of an operator that gathers parameters where they rest, and scatters their gradients."""
    both = transition.forward, transition.backward
    return both == (Communication.ALL_GATHER, Communication.REDUCE_SCATTER) and JOINT not in axis


def joins_unit(move: Node, *, several: bool) -> bool:
    """True of a trained parameter gathered from where it rests; ``several``: micro-batches in flight share copies."""
    if move.op.kind != "parallel" or not move.operands[0].is_param:
        return False
    param = move.operands[0]
    kept = several and not param.attr("regather")
    return moves_units(move.op.transition, move.attr("axis")) and bool(
        param.attr("trainable") and (kept or param.attr("regather"))
    )


def gathered_once(move: Node, *, several: bool) -> bool:
    """True of such a parameter whose copy is kept for all micro-batches of a step."""
    return joins_unit(move, several=several) and not move.operands[0].attr("regather")


def gathered_units(reads: Iterable[Node], *, several: bool) -> dict[Node, Key]:
    """The unit of each move that joins one, among the values that a program reads, in order; the first read decides."""
    found: dict[Node, Key] = {}
    blocks = False
    for move in reads:
        if move in found or not joins_unit(move, several=several):
            continue
        param = move.operands[0]
        match = NUMBERED.match(str(param.attr("name")))
        blocks = blocks or match is not None
        block = match[0] if match else "behind" if blocks else "before"
        found[move] = (block, str(move.attr("axis")), str(param.type.dtype), not param.attr("regather"))
    return found
