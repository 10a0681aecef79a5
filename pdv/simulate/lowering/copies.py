"""Copies that the emitted program makes around its collectives, one by one as ``pdv/emit/templates/parallel.py`` does.

Frameworks that reduce in place and gather into the result's own memory (Megatron-LM's mappings) make none.
"""

from __future__ import annotations

from ir.ops.parallel import transition_of
from pdv.simulate.lowering.entries import Entry

READ_AND_WRITTEN = 2


def copied_bytes(entry: Entry, way: int) -> tuple[float, int]:
    """Read and written beside a move's collective, forward (``way`` 0) or backward (1); and by how many kernels."""
    sizes = (entry.held, entry.bytes) if way == 0 else (entry.bytes, entry.held)
    copies = transition_of(entry.name).communications[way].copies(entry.dims[way])
    made = [size for size, count in zip(sizes, copies, strict=True) if size and count]
    return READ_AND_WRITTEN * sum(made), len(made)


def copied_by_unit(entry: Entry) -> float:
    """Read and written in a step of a weight that is gathered in a unit, once: joined with others, and so its gradient.

    What was gathered lies in blocks of all, and is joined to whole weights (``pdv/emit/templates/gathers.py``).
    """
    return READ_AND_WRITTEN * (entry.held + 2 * entry.bytes)
