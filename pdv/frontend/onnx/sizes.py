"""Sizes of the inputs of an ONNX model: those that it states, and those that it leaves open, by name.

Entry point: ``OnnxSizes``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir

from ir.dims import Shape
from ir.errors import ModelError, UsageError, first_line
from pdv.frontend.program import Array, Dims, OpenSize, size_name


def known_inputs(model: onnx_ir.Model, dims: Dims) -> dict[str, Array]:
    """The values of inputs that are named among sizes, in the inputs' own shapes and types; of those without elements.

    Raises:
        UsageError: if one does not fit its input, or a list is given for what is none.
    """
    open_sizes = {
        size.value
        for value in model.graph.inputs
        for size in (value.shape or ())
        if not isinstance(size, int) and size.value is not None
    }
    inputs = {value.name: value for value in model.graph.inputs if value.name and not value.is_initializer()}
    known = {
        name: np.zeros(value.shape.numpy(), value.dtype.numpy())
        for name, value in inputs.items()
        if value.dtype is not None and value.shape is not None and _is_empty(value.shape)
    }
    for name, given in dims.items():
        value = inputs.get(name)
        if name in open_sizes or value is None:
            if not isinstance(given, int):
                raise UsageError(f"{name!r} is given the value {given}, and is no input of the model")
            continue
        if value.dtype is None or value.shape is None:
            raise UsageError(f"input {name!r} has no shape or element type, and so cannot be given")
        try:
            array = np.asarray(given).astype(value.dtype.numpy())
            shape = [size if isinstance(size, int) else -1 for size in value.shape]
            known[name] = array.reshape(shape)
        except (TypeError, ValueError) as error:
            raise UsageError(f"input {name!r} cannot be {given}: {first_line(error)}") from error
    return known


def _is_empty(shape: onnx_ir.Shape) -> bool:
    """Whether a tensor of this shape has no elements, and so one value."""
    return all(isinstance(size, int) for size in shape) and 0 in shape


@dataclass
class OnnxSizes:
    """What each open dim is read at.

    Attributes:
        batch: the size of every dim 0 that is open and not in ``dims``.
        dims: sizes of the others, by name.
        found: the dims (input, dim) of each open size, by its name in the model.
    """

    path: Path
    batch: int | None
    dims: Mapping[str, int]
    found: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)
    _batches: set[str] = field(default_factory=set)
    _first: str = ""

    def shapes(self, inputs: Sequence[onnx_ir.Value]) -> list[Shape]:
        """The shapes of the inputs.

        Raises:
            ModelError: if one is not said, or not possible.
        """
        for value in inputs:
            if not isinstance(value.type, onnx_ir.TensorType | None):
                raise ModelError(f"input {value.name!r} is no tensor", "Tensors", "Pass the tensors in it one by one")
            if value.shape is None or value.dtype is None:
                raise ModelError(
                    f"input {value.name!r} has no shape or element type", "Static shapes", "Export it again"
                )
            for dim, size in enumerate(value.shape):
                if not isinstance(size, int):
                    self._find(value.name or "", dim, size.value)
        first = next((value for value in inputs if value.shape), None)
        self._first = next((name for name, places in self.found.items() if first and (first.name, 0) in places), "")
        missing = [name for name in self.found if name not in self._sizes]
        if missing:
            raise self._missing(missing)
        return [self._shape(value) for value in inputs]

    def check_used(self) -> None:
        """Whether every size that was given is one that the model leaves open.

        Raises:
            UsageError: naming those that it does.
        """
        unknown = [name for name in self.dims if name not in self.found]
        if unknown:
            allowed = ", ".join(self.found) or "none: all sizes are fixed"
            raise UsageError(
                f"{self.path} has no open size called {unknown[0]!r}", f"Open sizes: {allowed}", "Check the name"
            )
        if self.batch is not None and self.dims and self._first in self.dims:
            raise UsageError(
                f"{self._first} is the batch, and given twice", mend=f"Leave --batch or --dim {self._first} away"
            )

    def at(self, shapes: Mapping[str, Shape]) -> OnnxSizes:
        """The same model's, where inputs have these shapes."""
        dims = {name: shapes[places[0][0]][places[0][1]] for name, places in self.found.items()}
        return OnnxSizes(self.path, None, dims)

    def open_sizes(self) -> dict[str, OpenSize]:
        """The sizes that are open besides the batch, which is dim 0 of the first input, by names for a program."""
        named: dict[str, OpenSize] = {}
        for name, places in self.found.items():
            if name != self._first and name not in self._batches:
                named[size_name(name, named)] = OpenSize(tuple(places))
        return named

    def _find(self, where: str, dim: int, value: str | None) -> None:
        name = value or f"{where}.{dim}"
        self.found.setdefault(name, []).append((where, dim))
        if name in self.dims:
            self._sizes[name] = self.dims[name]
        elif dim == 0 and self.batch is not None:
            self._sizes.setdefault(name, self.batch)
            self._batches.add(name)

    def _missing(self, names: Sequence[str]) -> ModelError:
        where = "; ".join(
            f"{name} ({', '.join(f'dim {dim} of {node}' for node, dim in self.found[name])})" for name in names
        )
        batch = any(self.found[name][0][1] == 0 for name in names)
        others = [name for name in names if self.found[name][0][1] != 0]
        options = ["--batch N"] * batch + [f"--dim {name}=N" for name in others]
        return ModelError(
            f"{self.path} leaves sizes open and was given no number for {where}",
            "A size to plan at for each",
            f"Add {' '.join(options)} (from Python: batch=N, dims={{name: N}})",
        )

    def _shape(self, value: onnx_ir.Value) -> Shape:
        assert value.shape is not None, value
        sizes: list[int] = []
        for dim, size in enumerate(value.shape):
            found = size if isinstance(size, int) else self._sizes[size.value or f"{value.name}.{dim}"]
            if found < 1:
                raise ModelError(f"input {value.name!r} has size {found} in dim {dim}", "Every dim is at least 1")
            sizes.append(found)
        fixed = self.batch is not None and not self._batches  # else these are others: layers, one mask for all rows
        if fixed and sizes and isinstance(value.shape[0], int) and sizes[0] != self.batch:
            raise ModelError(
                f"input {value.name!r} has batch {sizes[0]}, not {self.batch}",
                f"Batch {sizes[0]}, which the model was exported with",
                "Leave --batch away, or export with a dynamic batch dim",
            )
        return tuple(sizes)
