"""A plain module with example inputs, by way of `torch.export`. Entry point: `load_module_or_export`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map

from ir.dims import Shape
from ir.errors import ModelError, UsageError, first_line
from ir.graph import Graph
from pdv.frontend.program import Program
from pdv.frontend.torch_export import load_exported_program

ExampleInputs = torch.Tensor | Sequence[Any] | Mapping[str, Any]  # Any: what the module's forward takes
"""One tensor, the positional arguments, or the keyword arguments of a module's forward."""


def load_module_or_export(
    model: torch.nn.Module | ExportedProgram, example_inputs: ExampleInputs | None = None, *, batch: int | None = None
) -> Program:
    """The program of a module in the mode (training or not) that it is in, or of an exported program.

    batch: repeat or cut dim 0 of every example tensor to this size.

    Raises:
        UsageError: if example inputs are missing, or given for a program that has its own.
        ModelError: if `torch.export` cannot trace the module.
    """
    if isinstance(model, ExportedProgram):
        if example_inputs is not None or batch is not None:
            raise UsageError(
                "an exported program has its own inputs", "Neither example_inputs nor batch", "Export it at this batch"
            )
        return load_exported_program(model)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"a model of type {type(model).__name__}", "A path, an ExportedProgram or an nn.Module")
    if example_inputs is None:
        raise UsageError("a module without example_inputs", "", "Pass a batch as the training loop would")
    program = load_exported_program(export_module(model, example_inputs, batch=batch))

    def again(shapes: Mapping[str, Shape]) -> Graph:
        wanted = [shapes[node.attr("name")] for node in program.graph.inputs]
        given = tree_map(lambda value: _resize(value, batch), example_inputs)
        return load_exported_program(export_module(model, resized(given, wanted))).graph

    return replace(program, again=again)


def export_module(
    module: torch.nn.Module, example_inputs: ExampleInputs, *, batch: int | None = None
) -> ExportedProgram:
    """`torch.export.export` with its many failures as one error.

    Raises:
        ModelError: naming the module and the first line of torch's reason.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example_inputs, Mapping):
        kwargs = {name: _resize(value, batch) for name, value in example_inputs.items()}
    elif isinstance(example_inputs, torch.Tensor):
        args = (_resize(example_inputs, batch),)
    else:
        args = tuple(_resize(value, batch) for value in example_inputs)
    try:
        return torch.export.export(module, args, kwargs, strict=False)
    except Exception as error:  # torch.export raises whatever the model's own code raises
        raise ModelError(
            f"{type(module).__name__} cannot be exported: {first_line(error)}",
            "",
            "See that torch.export.export(module, example_inputs) works",
        ) from error


def resized(inputs: ExampleInputs, shapes: Sequence[Shape]) -> ExampleInputs:
    """The inputs with their tensors repeated, or cut, to these shapes, in order.

    Raises:
        ModelError: if there are other tensors than shapes.
    """
    left = list(shapes)
    if sum(isinstance(value, torch.Tensor) for value in tree_leaves(inputs)) != len(left):
        raise ModelError("the module takes other tensors than its example inputs")

    def to_shape(value: Any) -> Any:  # Any: example inputs need not be tensors
        if not isinstance(value, torch.Tensor):
            return value
        for dim, size in enumerate(left.pop(0)):
            value = value.index_select(dim, torch.arange(size, device=value.device) % value.size(dim))
        return value

    found: ExampleInputs = tree_map(to_shape, inputs)
    return found


def _resize(value: Any, batch: int | None) -> Any:  # Any: example inputs need not be tensors
    if batch is None or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return value[torch.arange(batch, device=value.device) % value.size(0)]
