"""Copies that the emitted program makes around its collectives, one by one as ``pdv/emit/templates/parallel.py`` does.

Frameworks that reduce in place and gather into the result's own memory (Megatron-LM's mappings) make none.
"""

from __future__ import annotations

from ir.ops.parallel import transition_of
from ir.transition import Communication
from pdv.simulate.lowering.entries import Entry

READ_AND_WRITTEN = 2


def copied_bytes(entry: Entry, way: int) -> tuple[float, int]:
    """Read and written beside a move's collective, forward (``way`` 0) or backward (1); and by how many kernels.

    What is gathered along dim 0 lies in order as it arrives; behind other dims the blocks are put together. Blocks
    that are scattered or exchanged are laid side by side first, and a sum is taken in a copy.
    """
    before, after = (entry.held, entry.bytes) if way == 0 else (entry.bytes, entry.held)
    together = after if entry.dims[way] else 0.0
    match transition_of(entry.name).communications[way]:
        case Communication.SLICE:
            copies = [after]
        case Communication.ALL_REDUCE | Communication.REDUCE_SCATTER:
            copies = [before]
        case Communication.ALL_GATHER:
            copies = [together]
        case Communication.ALL_TO_ALL:
            copies = [before, together]
        case _:
            copies = []
    made = [size for size in copies if size]
    return READ_AND_WRITTEN * sum(made), len(made)
