"""Decides which frontend reads a model; the result is canonical whichever it was."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ir.errors import ModelError, ShapeError, UsageError
from ir.evaluation.bounds import bounds
from ir.evaluation.id_ranges import are_computed, becomes_integer
from ir.graph import Graph, Node
from pdv.frontend.program import Dims, Program
from pdv.frontend.tables import with_tables
from pdv.frontend.unsorted import unsort
from pdv.passes import canonicalize

if TYPE_CHECKING:
    import torch

    from pdv.frontend.torch.dynamic_shapes import DynamicShapes
    from pdv.frontend.torch.module import ExampleInputs


def load_program(
    model: str | os.PathLike[str] | torch.nn.Module | torch.export.ExportedProgram | Program,
    example_inputs: ExampleInputs | None = None,
    *,
    batch: int | None = None,
    dims: Dims | None = None,
    dynamic_shapes: DynamicShapes | None = None,
    checkpoint: Path | None = None,
) -> Program:
    """The canonical program of an ONNX file, an exported program, or a module with example inputs; one is its own.

    batch: the size of the dynamic batch dim of an ONNX model, or of dim 0 of a module's example inputs.
    dims: at which number each other size that the model leaves open is planned, by its name in the model; of a file
        also the values of inputs that are shapes, axes and the like, and are no inputs of the program then.
    dynamic_shapes: which sizes a module leaves open, as ``torch.export.export`` takes them; checkpoint: of the module
        of which a file was exported, by which is known what the exporter computed of its weights.

    Raises:
        ModelError: if the model cannot be read or is not valid.
        UnsupportedOperatorsError: naming every operator that has no declaration.
        UsageError: if the arguments do not go together.
    """
    if dynamic_shapes is not None and isinstance(model, Program | str | os.PathLike):
        raise UsageError(
            "dynamic_shapes are about a module", "A file says itself what it leaves open", "Leave them out"
        )
    if isinstance(model, Program):
        if dims:
            raise UsageError(f"the program has no open size called {next(iter(dims))!r}", mend="Leave dims out")
        program = model
    elif isinstance(model, str | os.PathLike):
        try:
            program = _load_file(Path(model), batch, dims or {}, checkpoint)
        except ShapeError as error:
            raise ModelError(f"{model}: {error.what}", error.allowed, error.mend) from error
    else:
        from pdv.frontend.torch.module import load_module_or_export

        program = load_module_or_export(
            model, example_inputs, batch=batch, dims=_sizes(dims or {}), dynamic_shapes=dynamic_shapes
        )
    check_updates(program.graph)
    canonical = with_tables(program.map(_canonical))
    check_draws(program.graph, canonical.graph)
    check_steering(canonical.graph, canonical.lines)
    check_elements(canonical.graph)
    return canonical


def _canonical(graph: Graph) -> Graph:
    """Canonical, without sorts whose rows are put back."""
    found = canonicalize(graph)
    apart = unsort(found)
    return found if apart is found else canonicalize(apart)


def check_draws(read: Graph, canonical: Graph) -> None:
    """No two values that are dropped out became one.

    Raises:
        ModelError: if some did.
    """
    if canonical.draws != read.draws:
        raise ModelError(
            "the model drops out two values that are equal, and their masks would be one",
            "Each value that is dropped out is another",
            "Drop out one of them, or pass in a mask",
        )


def check_elements(graph: Graph) -> None:
    """What is computed has elements: nobody can cut a tensor without any.

    Raises:
        ModelError: naming one that has none.
    """
    for node in graph.nodes:
        if not node.type.num_elements:
            what = f"{node.name or node.op.name!r} is a tensor without elements, of shape {list(node.type.shape)}"
            raise ModelError(what, "At least one element in all that depends on inputs and weights", "Leave it out")


def check_steering(graph: Graph, lines: Mapping[str, str]) -> None:
    """Rows are chosen by integers that random values leave in the tables, so that a run on these says something.

    They are computed of integers, whatever lies between, or bounded by the program (``clamp(0, rows - 1)``). Inputs of
    floats may hold numbers of rows, as they are (``x[:, 0].long()`` of features): whole ones are drawn.

    lines: of the model's source, by names of values.

    Raises:
        ModelError: naming where a model does otherwise.
    """
    made: set[Node] = set()
    free: set[Node] = set()  # floats that are inputs or parameters, or computed of such
    for node in graph.nodes:
        if node.type.dtype.is_floating and (free & {*node.operands} if node.operands else not node.is_const):
            free.add(node)
        of_floats = becomes_integer(node) and are_computed(node) and node.operands[0] in free
        if of_floats or (not node.type.dtype.is_floating and made & {*node.operands}):
            made.add(node)
        if node.op.kind == "index" and node.operands[1] in made and not _stays_in(node):
            rows = node.loops.extents["v"]
            raise ModelError(
                f"rows are chosen by numbers computed of floats, at {lines.get(node.name) or node.name or 'a value'}, "
                f"which may lie beyond the {rows} rows that there are",
                "Integers that are inputs or constants, or made of such; columns of an input of floats, as they are; "
                "others between bounds that the model itself has",
                f"Bound them where they are used, as by rows.clamp(0, {rows - 1}), or pass them as integers",
            )


def _stays_in(lookup: Node) -> bool:
    low, high = bounds(lookup.operands[1])
    return low >= 0 and high < lookup.loops.extents["v"]


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
        elif value.is_const:
            why = "is overwritten with a constant"
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


def _sizes(dims: Dims) -> dict[str, int]:
    """The sizes of a module, which has no inputs that are fixed here.

    Raises:
        UsageError: if one is no number.
    """
    for name, size in dims.items():
        if not isinstance(size, int):
            raise UsageError(f"{name} = {size} is no size", "Of a module, one number for each open size")
    return {name: size for name, size in dims.items() if isinstance(size, int)}


def _load_file(path: Path, batch: int | None, dims: Dims, checkpoint: Path | None) -> Program:
    match path.suffix.lower():
        case ".onnx":
            from pdv.frontend.onnx.model import load_onnx

            return load_onnx(path, batch=batch, dims=dims, checkpoint=checkpoint)
        case ".pt2" | ".pt" | ".pth" | ".ckpt":
            raise ModelError(
                f"{path} is a pickle: reading one runs the code in it",
                "Allowed: .onnx files; in Python also modules and exported programs",
                "If you trust it, load it yourself (torch.export.load) and pass the program to pdv.optimize",
            )
        case suffix:
            raise UsageError(f"{path} has the suffix {suffix!r}", "Allowed: .onnx", "Export the model to ONNX first")
