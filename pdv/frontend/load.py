"""Decides which frontend reads a model; the result is canonical whichever it was."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ir.errors import ModelError, UsageError
from ir.graph import Graph, Node
from pdv.frontend.program import Program
from pdv.passes import canonicalize

if TYPE_CHECKING:
    import torch

    from pdv.frontend.module import ExampleInputs

ModelSource = "str | os.PathLike[str] | torch.nn.Module | torch.export.ExportedProgram"


def load_program(
    model: str | os.PathLike[str] | torch.nn.Module | torch.export.ExportedProgram | Program,
    example_inputs: ExampleInputs | None = None,
    *,
    batch: int | None = None,
) -> Program:
    """The canonical program of an ONNX file, an exported program, or a module with example inputs; one is its own.

    batch: the size of the dynamic batch dim of an ONNX model, or of dim 0 of a module's example inputs.

    Raises:
        ModelError: if the model cannot be read or is not valid.
        UnsupportedOperatorsError: naming every operator that has no declaration.
        UsageError: if the arguments do not go together.
    """
    if isinstance(model, Program):
        program = model
    elif isinstance(model, str | os.PathLike):
        program = _load_file(Path(model), batch)
    else:
        from pdv.frontend.module import load_module_or_export

        program = load_module_or_export(model, example_inputs, batch=batch)
    check_updates(program.graph)
    if program.again is None:
        return replace(program, graph=canonicalize(program.graph))
    again = program.again
    return Program(canonicalize(program.graph), program.weights, lambda shapes: canonicalize(again(shapes)))


def check_updates(graph: Graph) -> None:
    """Buffers move as running statistics do: each is read, and overwritten with a computed value of its own.

    Raises:
        ModelError: naming a buffer that does not.
    """
    read = {param.attr("name") for param in graph.params}
    taken: set[Node] = set()
    for name, value in graph.updates:
        why = ""
        if name not in read:
            why = "is overwritten, and never read"
        elif value.is_leaf:
            why = f"is overwritten with {value.name or value.op.name!r} as it is"
        elif value in taken:
            why = "is overwritten with the same value as another"
        if why:
            raise ModelError(
                f"the buffer {name!r} {why}",
                "Buffers that are read, and overwritten with a value computed for them",
                "Return the value instead, and keep it in your training loop",
            )
        taken.add(value)


def _load_file(path: Path, batch: int | None) -> Program:
    match path.suffix.lower():
        case ".onnx":
            from pdv.frontend.onnx import load_onnx

            return load_onnx(path, batch=batch)
        case ".pt2" | ".pt" | ".pth" | ".ckpt":
            raise ModelError(
                f"{path} is a pickle: reading one runs the code in it",
                "Allowed: .onnx files; in Python also modules and exported programs",
                "If you trust it, load it yourself (torch.export.load) and pass the program to pdv.optimize",
            )
        case suffix:
            raise UsageError(f"{path} has the suffix {suffix!r}", "Allowed: .onnx", "Export the model to ONNX first")
