"""Which sizes of its inputs an exported program leaves open, and what they are called.

Entry points: ``open_dims``, ``planned_shapes``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument
from torch.utils._pytree import tree_leaves

from ir.dims import Shape
from ir.errors import UsageError
from pdv.frontend.program import size_name

DynamicShapes = Mapping[str, Any] | Sequence[Any]  # Any: as torch.export takes them
"""The open dims of each argument, by name or in order: ``{"ids": {0: Dim("batch"), 1: Dim("sequence")}}``."""


NO_BOUND = 1 << 40  # torch's own bounds are beyond all sizes


@dataclass(frozen=True)
class NamedDims:
    """An open size: the dims (number of the input tensor, dim) that have it, and the largest that it may be."""

    places: tuple[tuple[int, int], ...]
    most: int | None


def open_dims(program: ExportedProgram, dynamic_shapes: DynamicShapes | None = None) -> dict[str, NamedDims]:
    """What a program leaves open: by the names in ``dynamic_shapes``, else ``rows``, ``s``, ``s_2``, … in order."""
    names = _names(dynamic_shapes)
    wanted = {
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)
    }
    inputs = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in wanted]
    places: dict[str, list[tuple[int, int]]] = {}
    called: dict[str, str] = {}
    for number, node in enumerate(inputs):
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                symbol = str(size)
                places.setdefault(symbol, []).append((number, dim))
                if (number, dim) in names:
                    called.setdefault(symbol, names[number, dim])
    limits = {str(symbol): _limit(bounds.upper) for symbol, bounds in program.range_constraints.items()}
    found: dict[str, NamedDims] = {}
    for symbol, dims in places.items():
        name = called.get(symbol) or size_name("s" if dims[0][1] else "rows", found)
        found[name] = NamedDims(tuple(dims), limits.get(symbol))
    return found


def planned_shapes(inputs: Any, found: Mapping[str, NamedDims], dims: Mapping[str, int]) -> list[Shape]:
    """The shapes of the tensors in ``inputs``, where open sizes are those of ``dims``.

    Raises:
        UsageError: naming a size that is not open.
    """
    shapes = [list(value.shape) for value in tree_leaves(inputs) if isinstance(value, torch.Tensor)]
    for name, size in dims.items():
        if name not in found:
            allowed = f"Open sizes: {', '.join(found) or 'none'}"
            raise UsageError(
                f"the model has no open size called {name!r}", allowed, "Name it in dynamic_shapes, by a Dim"
            )
        for number, dim in found[name].places:
            shapes[number][dim] = size
    return [tuple(shape) for shape in shapes]


def _names(dynamic_shapes: DynamicShapes | None) -> dict[tuple[int, int], str]:
    """(number of an argument, dim) -> what its size is called; arguments that hold several tensors are left out."""
    if dynamic_shapes is None:
        return {}
    each = dynamic_shapes.values() if isinstance(dynamic_shapes, Mapping) else dynamic_shapes
    found: dict[tuple[int, int], str] = {}
    for number, spec in enumerate(each):
        dims = spec.items() if isinstance(spec, Mapping) else enumerate(spec or ())
        for dim, size in dims:
            if isinstance(dim, int) and isinstance(name := getattr(size, "__name__", None), str):
                found[number, dim] = name
    return found


def _limit(upper: Any) -> int | None:  # Any: a sympy number, or infinity
    """A bound that somebody gave, or the model asks for."""
    return int(upper) if getattr(upper, "is_Integer", False) and upper < NO_BOUND else None
