"""What moving a tensor along an axis allocates, forward and backward: the emitted program's collectives, one by one.

Read in ``pdv/emit/templates/parallel.py``; a framework that reduces in place and gathers into the result's own memory
(Megatron-LM's mappings) allocates the results alone. On a CPU gloo gathers into a tensor of its own first, and sums a
copy of what it scatters (ProcessGroupGloo.cpp; ``_allgather_base``, ``reduce_scatter_tensor_coalesced``).
"""

from __future__ import annotations

from dataclasses import dataclass

from ir.graph import Node
from ir.memory.layout import Layout, fresh
from ir.transition import Communication


@dataclass(frozen=True, slots=True)
class Move:
    """``alias``: the result is the operand's memory; ``beside``: bytes of buffers while it runs."""

    alias: bool
    beside: float = 0.0


ALIAS = Move(alias=True)


@dataclass(frozen=True, slots=True)
class Backend:
    """``eager``: the emitted program's own collectives; ``gloo``: run by it."""

    eager: bool
    gloo: bool


def forward_move(node: Node, before: Layout, after: float, dim: int, backend: Backend) -> Move:
    """``before``: the operand; ``after``: bytes of the result; ``dim``: along which it is gathered."""
    return _move(node.op.transition.forward, before, before.elements * node.type.dtype.itemsize, after, dim, backend)


def backward_move(node: Node, grad_bytes: float, after: float, dim: int, backend: Backend) -> Move:
    """The same of the dual, on a gradient of ``grad_bytes``."""
    return _move(node.op.transition.backward, fresh((1,)), grad_bytes, after, dim, backend)


def _move(what: Communication, before: Layout, num_bytes: float, after: float, dim: int, backend: Backend) -> Move:
    eager = backend.eager
    match what:
        case Communication.NONE:
            return ALIAS
        case Communication.SLICE | Communication.ALL_REDUCE:
            return Move(alias=not eager)
        case Communication.ALL_GATHER:
            copied = 0.0 if before.contiguous else num_bytes
            second = after if dim or backend.gloo else 0.0  # gloo's is gone when blocks are put together
            return Move(alias=False, beside=copied + second if eager else 0.0)
        case Communication.REDUCE_SCATTER:
            return Move(alias=False, beside=num_bytes * (1 + backend.gloo) if eager else 0.0)
        case Communication.ALL_TO_ALL:
            return Move(alias=False, beside=num_bytes + (after if dim else 0.0))


def gathered_dim(node: Node, *, backward: bool) -> int:
    """The dim along which a move (its dual) gathers; behind dim 0 the blocks are put together in a second buffer."""
    return node.op.transition.joined_dims(node.attrs)[backward]
