"""What a package for inference computed of weights when it was written, computed again of other weights.

A table of positions, or a convolution's weight scaled by a norm's, is one stored tensor there, which
``pdv.emit.analysis.fold`` made. How it came about is what the plan says, replayed. Entry point: ``computed_of``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ir.dims import Shape
from ir.errors import PdvError, WeightsError
from ir.graph import Node, is_column
from ir.views import readings, shape_before
from pdv.emit.analysis.fold import value_of
from pdv.emit.package import emission_of
from pdv.emit.templates.stored import HeldSlice
from pdv.frontend.program import Weights
from pdv.loops.pieces import Piece, notes_of, shape_of
from pdv.plan.running import running_of
from pdv.report.loaded import load_plan


@dataclass(frozen=True)
class Computed:
    """Stored tensors that are values of the source's weights, by name."""

    nodes: Mapping[str, Node]

    def sources(self, piece: Piece) -> dict[str, Shape]:
        """The source's tensors that a parameter is made of, and their shapes."""
        found: dict[str, Shape] = {}
        for name in piece.names:
            if name not in self.nodes:
                found[name] = shape_of(piece, name)
            else:
                found |= _read_by(self.nodes[name])
        return found

    def of(self, file: Any) -> Any:  # Any: what gives tensors and slices of them by the source's names
        """The same file, which has these values, too."""
        return _Computing(file, self.nodes) if self.nodes else file


def computed_of(model: Any, pieces: Sequence[Piece]) -> Computed:  # Any: an emitted model
    """What of a model's tensors is no weight of the source.

    Raises:
        WeightsError: if its package, which says how they came about, is not there any more.
    """
    names = notes_of(pieces).get("computed")
    if not names:
        return Computed({})
    folder = Path(inspect.getfile(type(model))).parent
    try:
        plan = load_plan(folder)
    except PdvError as error:
        raise WeightsError(
            f"{names[0]} was computed of other weights when the package was written, and {folder}, which says how, "
            f"cannot be read ({error.what})"
        ) from error
    running = running_of(plan.problem, plan.derived, plan.stages, plan.execution)
    made = emission_of(plan.derived.pcg, plan.problem.mesh, plan.document, running).computed
    return Computed({name: made[name] for name in names if name in made})


@dataclass(frozen=True)
class _Computing:
    """A file, and values of its tensors."""

    file: Any
    nodes: Mapping[str, Node]

    def get_tensor(self, name: str) -> Tensor:
        """All of one."""
        if name not in self.nodes:
            found: Tensor = self.file.get_tensor(name)
            return found
        node = self.nodes[name]
        weights = Weights({source: partial(self._array, source) for source in _read_by(node)})
        return torch.from_numpy(np.ascontiguousarray(value_of(node, weights)))

    def get_slice(self, name: str) -> Any:
        """One of which parts are read."""
        return HeldSlice(self.get_tensor(name)) if name in self.nodes else self.file.get_slice(name)

    def _array(self, name: str) -> Any:
        return self.file.get_tensor(name).double().numpy()


def _read_by(node: Node) -> dict[str, Shape]:
    """The stored tensors that a value is made of, and their shapes."""
    found: dict[str, Shape] = {}
    stack, seen = [node], {node}
    while stack:
        one = stack.pop()
        for source, view, shape in readings(one) if one.is_param else ():
            before = shape[:1] if is_column(one) else shape_before(shape, view)
            if before is None:
                what = f"{source} is read in another shape than it has, and what was computed of it, too"
                raise WeightsError(what, "A package that was planned with these weights", "Plan it with them")
            found[source] = before
        stack.extend(operand for operand in one.operands if operand not in seen)
        seen.update(one.operands)
    return found
