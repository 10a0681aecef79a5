"""The ways by which a model reaches pdv: as a module, and as a file that our own export or torch's exporters wrote.

A file is exported in training mode from the module with its arguments, without a cache of keys and values, which torch
2.13 cannot write. What is read of it is held against the module: outputs, gradients and state (pdv/check/reading.py).
Entry points: ``export``, ``differs``.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
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
        source = _as_in_file(_with_constants(source, module, program), program)
    try:
        check_reading(program.graph, source, train=True)
    except ModelError as error:
        return error.what
    return ""


_CHANGED = re.compile(r"parametrizations\.(\w+)\.original$")


class _Rows(torch.nn.Module):
    """A table, of the rows that a file has of it and all others."""

    def __init__(self, places: torch.Tensor) -> None:
        super().__init__()
        self.places = places

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [n, d] -> [as many as places go to, d]."""
        return rows.new_zeros(int(self.places.max()) + 1, rows.shape[1]).index_copy(0, self.places, rows)


class _Shaped(torch.nn.Module):
    """A parameter of a shape, of which the file has another, with dims of size one."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: of as many elements -> [*shape]."""
        return x.reshape(self.shape)


class _AsInFile(Source):
    """A module whose parameters are of the shapes that a file has of them, under their own names."""

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers."""
        return {_CHANGED.sub(r"\1", name): x for name, x in super().held.items()}

    def in_float64(self) -> Source:
        """The same, of float64 throughout."""
        wide = super().in_float64()
        return _AsInFile(wide.module, wide.args, wide.kwargs)


def _with_constants(source: Source, module: torch.nn.Module, program: Program) -> Source:
    """A module in which what is frozen, and a constant of the file, is what it was when it was exported.

    The copy of a module has other values where a parameter is one number throughout.
    """
    before = {name: x for name, x in module.named_parameters() if not x.requires_grad}
    with torch.no_grad():
        for name, own in source.module.named_parameters():
            if name in before and name not in program.weights.names and name not in program.names:
                own.copy_(before[name])
    return source


def _as_in_file(source: Source, program: Program) -> Source:
    """The module with tables of the rows that the file has, and parameters of the shapes that they have there."""
    for name, own in list(source.module.named_parameters()):
        path, _, leaf = name.rpartition(".")
        stored = torch.from_numpy(program.weights.load(name).copy()) if name in program.weights.names else own
        if stored.shape == own.shape:
            continue
        part = source.module.get_submodule(path)
        if stored.numel() == own.numel():
            assert stored.squeeze().shape == own.squeeze().shape, name
            change: torch.nn.Module = _Shaped(own.shape)
        else:
            change = _Rows((own.detach()[None] == stored[:, None]).all(-1).int().argmax(1))
        setattr(part, leaf, torch.nn.Parameter(stored, requires_grad=own.requires_grad))
        torch.nn.utils.parametrize.register_parametrization(part, leaf, change, unsafe=True)
    return _AsInFile(source.module, source.args, source.kwargs)
