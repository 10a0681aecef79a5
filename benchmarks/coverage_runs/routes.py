"""The ways by which a model reaches pdv: as a module, and as a file that our own export or torch's exporters wrote.

A file is exported in training mode from the module with its arguments, without a cache of keys and values, which torch
2.13 cannot write. What is read of it is held against the module: outputs, gradients and state (pdv/check/reading.py).
Entry points: ``export``, ``differs``.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ir.errors import ModelError
from pdv.check.module_run import Source
from pdv.check.reading import check_reading, copy_of
from pdv.frontend.onnx.export import export_onnx

if TYPE_CHECKING:
    from pdv.frontend.program import Program


class CannotExportError(Exception):
    """torch's own exporter gave up."""


def export(route: str, module: torch.nn.Module, inputs: Mapping[str, Any], path: Path) -> None:
    """Write the file of a module in training mode.

    Raises:
        CannotExportError: with the first line of torch's reason.
        ModelError: if our own export refuses the module.
    """
    if route == "own":
        export_onnx(module, inputs, path)
        return
    for part in module.modules():
        config = getattr(part, "config", None)
        if config is not None and getattr(config, "use_cache", False) is True:
            config.use_cache = False
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            if route in ("plain", "whole"):
                kept = route == "plain"  # what depends on small parameters alone is computed beforehand, or is not
                torch.onnx.export(module, (), path, kwargs=dict(inputs), dynamo=True, optimize=kept, verbose=False)
            else:
                tensors = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]
                training = torch.onnx.TrainingMode.TRAINING
                torch.onnx.export(module, (dict(inputs),), path, dynamo=False, training=training, input_names=tensors)
    except Exception as error:
        why = str(error.__cause__ or error).strip().partition("\n")[0]
        raise CannotExportError(why) from error


def differs(program: Program, module: torch.nn.Module, inputs: Mapping[str, Any]) -> str:
    """How what was read of a file differs from the module; empty if it does not."""
    source = copy_of(module, inputs, train=True)
    if isinstance(source, Source):
        source = _with_rows(source, program)
    try:
        check_reading(program.graph, source, train=True)
    except ModelError as error:
        return error.what
    return ""


_ROWS = ".parametrizations.weight.original"


class _Rows(torch.nn.Module):
    """A table, of the rows that a file has of it and all others."""

    def __init__(self, places: torch.Tensor) -> None:
        super().__init__()
        self.places = places

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [n, d] -> [as many as places go to, d]."""
        return rows.new_zeros(int(self.places.max()) + 1, rows.shape[1]).index_copy(0, self.places, rows)


class _SomeRows(Source):
    """A module whose tables have the rows that a file has of them, under their own names."""

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers."""
        return {
            f"{name.removesuffix(_ROWS)}.weight" if name.endswith(_ROWS) else name: x
            for name, x in super().held.items()
        }

    def in_float64(self) -> Source:
        """The same, of float64 throughout."""
        wide = super().in_float64()
        return _SomeRows(wide.module, wide.args, wide.kwargs, wide.padded)


def _with_rows(source: Source, program: Program) -> Source:
    """The module with tables of which the file has some rows as parameters of these rows."""
    stored = {name: torch.from_numpy(program.weights.load(name).copy()) for name in program.weights.names}
    for name, part in list(source.module.named_modules()):
        rows, table = stored.get(f"{name}.weight"), getattr(part, "weight", None)
        if isinstance(part, torch.nn.Embedding) and rows is not None and rows.shape != part.weight.shape:
            assert isinstance(table, torch.nn.Parameter), name
            places = (table.detach()[None] == rows[:, None]).all(-1).int().argmax(1)
            part.weight = torch.nn.Parameter(rows)
            torch.nn.utils.parametrize.register_parametrization(part, "weight", _Rows(places), unsafe=True)
    return _SomeRows(source.module, source.args, source.kwargs, source.padded)
