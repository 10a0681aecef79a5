"""A decoder's forward pass of some positions, keys and values of earlier ones kept: a program beside the package's own.

It is made of the package's plan (``pdv.pcg.over_time``), reads the weights of the model that it is given, and is cut
along the same axes. Entry point: ``decoder_of``.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ir.errors import PdvError
from pdv.emit.emission import Emission, module_texts
from pdv.emit.package import WEIGHTS, emission_of
from pdv.loops.pieces import Piece, local_of, pieces_of, share
from pdv.pcg.over_time import TIME, over_time
from pdv.plan.package import import_package
from pdv.plan.running import running_of
from pdv.report.loaded import load_plan


class Moment:
    """The axis of time of a program: which positions it is at, and what it kept of others.

    It stands where programs have an axis of the mesh; a block of positions is what a rank has of it.
    """

    name = TIME

    def __init__(self, gathers: int) -> None:
        self.total = self.block = 1
        self.at = 0
        self._gathers, self._turn = gathers, 0
        self._kept: dict[int, Tensor] = {}

    @property
    def size(self) -> int:
        """In how many blocks all positions are."""
        return self.total // self.block

    @property
    def rank(self) -> int:
        """The number of this one."""
        return self.at // self.block

    def move(self, at: int, block: int, total: int) -> None:
        """As of a decoder."""
        self.at, self.block, self.total, self._turn = at, block, total, 0

    def forget(self) -> None:
        """As nothing had been."""
        self._kept.clear()

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """Of all positions, those of now."""
        size = x.size(dim) // self.size
        return x.narrow(dim, self.rank * size, size)

    def keep(self, x: Tensor, dim: int) -> Tensor:
        """Those of now, with what there is of others; the last of a pass, its output, is left as it is."""
        turn = self._turn = self._turn + 1
        if turn == self._gathers:
            return x
        if turn not in self._kept:
            self._kept[turn] = x.new_zeros(*x.shape[:dim], x.size(dim) * self.size, *x.shape[dim + 1 :])
        self.cut(self._kept[turn], dim).copy_(x)
        return self._kept[turn]


@dataclass(frozen=True)
class Decoder:
    """The program: a module that takes all ids of [rows, positions], and the moment that says which are read."""

    module: Any  # Any: an emitted model
    moment: Moment


class _Weights:
    """What a program takes for its mesh: the axes of a model that there is, one of time, and that model's tensors."""

    def __init__(self, model: Any, moment: Moment, pieces: list[Piece]) -> None:
        self._mesh, self._moment = model.mesh, moment
        self._held = {(_key(piece.whole), piece.cuts): local_of(piece.tensor).detach() for piece in pieces}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mesh, name)

    def __getitem__(self, name: str) -> Any:
        return self._moment if name == TIME else self._mesh[name]

    def parameter(self, stored: Any, cuts: Any = None) -> Tensor:
        """What this rank holds of one."""
        return self._held[_key(stored), tuple((cuts or {}).items()) if self._mesh.device_mesh else ()]

    buffer = parameter


def _key(view: Any) -> tuple[Any, ...]:  # Any: a view of stored tensors, of a class of either package
    parts = () if view.base is None else getattr(view.base, "parts", (view.base,))
    return view.name, view.dims, view.base_shape, tuple(_key(part) for part in parts)


def decoder_of(model: Any) -> Decoder | None:  # Any: an emitted model
    """The decoder of a package for inference; None where there is no plan, or no such program of it."""
    found = None
    with suppress(PdvError, OSError, KeyError, ValueError):
        if model.mesh.rounding is None:
            found = _write_decoder(model, Path(inspect.getfile(type(model))).parent)
    return found if all(share(found is not None)) else None


def _write_decoder(model: Any, folder: Path) -> Decoder | None:
    plan = load_plan(folder)
    if plan.problem.train:
        return None
    running = running_of(plan.problem, plan.derived, plan.stages, plan.execution)
    made = emission_of(plan.derived.pcg, plan.problem.mesh, plan.document, running)
    (ids,) = made.graph.inputs
    graph, mesh = over_time(made.graph, made.mesh, ids.type.shape[1])
    pieces = pieces_of(model)
    files = pieces[0].whole.file
    emission = Emission.of(graph, mesh, train=True, sizes=made.sizes)  # values computed of weights are there already
    text = emission.body(lambda name: tuple(files.get_slice(name).get_shape()))
    moment = Moment(sum(node.op.transition.gathers and node.attr("axis") == TIME for node in graph.nodes))
    program = _import(text, moment)
    held = _Weights(model, moment, pieces)
    return Decoder(program.Model(held, program.Weights(folder / WEIGHTS)).eval(), moment)


def _import(text: str, moment: Moment) -> Any:  # Any: a module made at run time
    """A program whose moves along time are those of a moment."""
    with tempfile.TemporaryDirectory(prefix="pdv-decoder-") as scratch:
        for name, content in module_texts(text).items():
            (Path(scratch) / name).write_text(content, encoding="utf-8")
        program: Any = sys.modules[f"{import_package(Path(scratch)).__name__}.model"]
    for name, move in (
        ("partition", moment.cut), ("combine", moment.keep), ("all_gather", moment.keep), ("replicate", _same),
    ):  # fmt: skip
        if hasattr(program, name):
            setattr(program, name, partial(_move, moment, move, getattr(program, name)))
    program.local = _same
    return program


def _same(x: Tensor, *axes: Any) -> Tensor:
    del axes
    return x


def _move(moment: Moment, own: Any, others: Any, x: Tensor, *where: Any, **options: Any) -> Tensor:
    """A move of a program, along time or else as its package has it; where: dim and axis, or the axis alone."""
    found: Tensor = own(x, *where[:-1]) if where[-1] is moment else others(x, *where, **options)
    return found
