"""The program of a model that a caller hands over, checked against the model itself."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ir.errors import ModelError, UnsupportedOperatorsError, UsageError
from ir.graph import Graph, Node
from ir.types import DType
from ir.views import sources_of
from pdv.folders import text_of
from pdv.guard import Progress, note
from pdv.planning.frozen import freeze

if TYPE_CHECKING:
    from pdv.frontend.program import Program

_PROOF = (
    "of the newer exporter's files --weights FILE, with what the module had when it was exported, often has it back"
)
_OF_DROPOUT = (
    "its dropout is taken for that of training alone: behind model.eval() nothing is dropped. What is planned with "
    "--mode infer drops there, too, as is said of it"
)
_HOLDS_IDS = 4  # bytes of floats of which the numbers of most tables' rows are whole
_NOT_ASKED = "the reading was not checked, as was asked (--no-check)"


def read_model(
    model: Any,  # Any: a path, a module, an exported program, or a program
    inputs: Any,  # Any: what the module's forward takes
    dtype: str | None,
    progress: Progress,
    *,
    train: bool,
    check: bool = True,
    strict: bool = False,
    frozen: str | Sequence[str] = (),
    weights: str | os.PathLike[str] | None = None,
    **sizes: Any,  # Any: as ``load_program`` takes batch, dims and dynamic shapes
) -> tuple[Program, str]:
    """The program of a model, under the model's name and in the type asked for; and what a run against it showed.

    frozen: patterns of names of parameters that are not trained; weights: a checkpoint that has its stored tensors.
    check: whether it is run against the model; strict: whether operators without a declaration are refused.

    Raises:
        ModelError: if the program is not the module that was given.
        UnsupportedOperatorsError: naming operators that are run as they are, if that is not allowed.
        UsageError: naming a pattern by which nothing is frozen.
    """
    program, reading = _read_checked(model, inputs, progress, train=train, check=check, **sizes)
    if train and weights is not None and isinstance(model, str | os.PathLike) and is_doubtful(program):
        program, reading = _read_proved(program, reading, model, Path(weights), check=check, **sizes)
    if strict and program.opaque:
        raise UnsupportedOperatorsError(program.opaque)
    program = freeze(program, frozen)
    if train:
        check_trained(program)
    if weights is not None:
        from pdv.frontend.checkpoint import with_checkpoint

        program = with_checkpoint(program, Path(weights))
    doubts = (*program.doubts, *map(_of_sines, program.sines)) if train else ()
    reading = ". ".join(part for part in (reading, *program.notes, *doubts) if part)
    name = _name_of(model)
    has_modes = callable(model) and not hasattr(model, "graph_module")  # no file, nor an exported program
    if not train and not has_modes:
        program = program.map(_drawing)
    elif not has_modes and any(map(_drops, program.graph.nodes)):
        reading = ". ".join(part for part in (reading, _OF_DROPOUT) if part)
    program = program.map(lambda graph: _with_dtype(replace(graph, name=name), dtype))
    note(program.graph)
    return program, reading


def _drawing(graph: Graph) -> Graph:
    """The program of what has no other mode, run as it is: what it draws, it draws in evaluation, too."""
    if not graph.draws:
        return graph
    from pdv.frontend import masks
    from pdv.frontend.lowering import Lowering

    k = Lowering()
    k.drops_as_noise, k.noises = (
        True,
        max((int(node.attr("draw")) for node in graph.nodes if "draw" in node.attrs), default=0),
    )

    def make(node: Node, operands: tuple[Node, ...]) -> Node:
        if _drops(node):
            return masks.dropout(k, operands[0], node.attr("p"))
        if "trains" not in node.attrs:  # of what is drawn, whether in training alone
            return k.builder.copy(node, operands)
        return k.builder.apply(node.op, operands, {**node.attrs, "trains": False}, node.name)

    return k.builder.rebuild(graph, make)[0]


def _drops(node: Node) -> bool:
    return node.op.draws and bool(node.op.linear)


def _read_proved(
    before: Program,
    reading: str,
    model: Any,  # Any: as above
    weights: Path,
    *,
    check: bool,
    **sizes: Any,  # Any: as above
) -> tuple[Program, str]:
    """A file read once more, with the weights that show what its exporter computed of them, and run again.

    Where batch norms come back, the file has none in training mode, against which they could be run: there what was
    read without them was.
    """
    from pdv.check.file.reading import check_file
    from pdv.frontend import load_program

    program = load_program(model, checkpoint=weights, **sizes)
    if check and not before.folded:
        reading = check_file(program, Path(model).resolve())
    return program, reading


def _read_checked(
    model: Any,  # Any: as above
    inputs: Any,  # Any: as above
    progress: Progress,
    *,
    train: bool,
    check: bool,
    **sizes: Any,  # Any: as above
) -> tuple[Program, str]:
    """The program, and what a run against the model showed."""
    progress("reading the model", None)
    from pdv.frontend import load_program

    if isinstance(getattr(model, "graph", None), Graph):
        program, reading = load_program(model, inputs, **sizes), ""
    elif isinstance(model, str | os.PathLike):
        program, reading = load_program(model, inputs, **sizes), _NOT_ASKED
        if check:
            from pdv.check.file.reading import check_file

            note(program.graph)
            progress("running what was read against the model", None)
            reading = check_file(program, Path(model).resolve())
    else:
        from pdv.check.reading import NOT_RUN, check_reading, copy_of
        from pdv.check.trainable import check_trainable
        from pdv.frontend.torch.shared_memory import with_views
        from pdv.frontend.torch.tracing import chance, packed

        model, shared = with_views(model)
        if train and not check:
            check_trainable(model)
        source = copy_of(model, inputs, train=train) if check else ""
        program, reading = shared.name(load_program(model, inputs, **sizes)), _NOT_ASKED
        if check:
            progress("running what was read against the model", None)
            remedies = {chance.DRAWN: chance.REMEDY, packed.ALL_STEPS: packed.REMEDY}
            remedy = next((remedies[note] for note in program.notes if note in remedies), "")
            reading = check_reading(note(program.graph), source, train=train, remedy=remedy)
        if train and program.own_backward and (not check or reading.startswith(NOT_RUN)):
            reading = ". ".join((reading, _of_own_backward(program.own_backward, check=check)))
    return program, reading


def state_document(program: Program) -> dict[str, dict[str, object]]:
    """``state`` of plan.json: what the source's state has beside the tensors that the program reads, if anything."""
    read = {source for param in program.graph.params for source in sources_of(param)}
    names = {name: [source, view] for name, (source, view) in sorted(program.names.items()) if source in read}
    unread, joint = sorted(program.weights.unread), sorted(program.joint & read)
    known = {*read, *names}
    frozen = sorted(program.frozen & known) if any(param.attr("trainable") for param in program.graph.params) else []
    said: dict[str, object] = {"names": names, "unread": unread, "joint": joint, "frozen": frozen}
    state = {key: value for key, value in said.items() if value}
    return {"state": state} if state else {}


def is_doubtful(program: Program) -> bool:
    """Whether training the program might not train the model, as far as the file says."""
    return bool(program.absent or program.untold or program.folded)


def check_trained(program: Program) -> None:
    """Whether training the program trains the model.

    Raises:
        ModelError: if parts of the model were folded into others.
    """
    if program.folded:
        raise _folded(program.folded)
    if program.quantized:
        raise _of_integers(program.quantized)
    if program.absent or program.untold:
        raise _computed((*program.absent, *program.untold.values()), tuple(program.untold))
    if not any(param.attr("trainable") for param in program.graph.params):
        raise ModelError(
            ": ".join(("the model has no parameters to train", *program.doubts[:1])),
            "At least one that is not frozen; for inference (--mode infer) none is needed",
            'Plan it with --mode infer (mode="infer"), or unfreeze what is to be trained',
        )


def _of_sines(name: str) -> str:
    return f"{name} holds sines and cosines of positions and is trained here: --freeze {name} leaves it as it is"


def _of_own_backward(functions: Sequence[str], *, check: bool) -> str:
    """What a plan says of functions whose gradients nobody compared.

    Raises:
        ModelError: if that was the user's choice.
    """
    names = ", ".join(functions)
    if check:
        return f"{names} have a backward of their own, which programs have not: they take the gradient of their forward"
    raise ModelError(
        f"{names} (torch.autograd.Function) have a backward of their own, which programs have not, and --no-check "
        "leaves out the run that would show whether it is the gradient of their forward",
        "Functions whose backward is what autograd makes of their forward, or linear in the gradients that it is given",
        "Leave out --no-check, or write it with detach: x + (y - x).detach() has the value of y and the gradient of x",
    )


def _folded(norms: Sequence[str]) -> ModelError:
    some = ", ".join(norms[:3]) + (", …" if len(norms) > 3 else "")
    return ModelError(
        f"{len(norms)} batch norms were folded into convolutions, or norms of weights into theirs ({some}): a model "
        "without them would be trained",
        "Norms as they are computed in each step, in training mode; for inference (--mode infer) folded ones",
        f"Export the module in training mode with pdv.frontend.onnx.export.export_onnx; {_PROOF}",
    )


def _of_integers(weights: Sequence[str]) -> ModelError:
    some = ", ".join(weights[:3]) + (", …" if len(weights) > 3 else "")
    return ModelError(
        f"{len(weights)} weights are quantized, stored as integers ({some}): training would keep them as they are",
        "Weights of floats; for inference (--mode infer) quantized ones",
        "Train the model that was quantized, and quantize it then",
    )


def _computed(parameters: Sequence[str], stored: Sequence[str]) -> ModelError:
    ways = [f"--freeze {shlex.quote(name)}" for name in stored]
    freezing = (
        f"{' '.join(ways[:3])}{' …' if len(ways) > 3 else ''} leaves these as they are"
        if ways
        else ("name them by --freeze, if none of them is trained")
    )
    some = ", ".join(parameters[:3]) + (", …" if len(parameters) > 3 else "")
    return ModelError(
        f"parameters of the module are not in the file ({some}): the exporter computed with them, or took them for "
        "others that have the same values, and they would not be trained",
        "Files that have all parameters; for inference (--mode infer) any",
        "Export with torch.onnx.export(..., dynamo=True, optimize=False) or pdv.frontend.onnx.export.export_onnx; or "
        f"{freezing}; {_PROOF}",
    )


def _name_of(model: Any) -> str:  # Any: as optimize takes it
    """What people call a model: its file without suffix, its class."""
    if isinstance(model, str | os.PathLike):
        return text_of(Path(model).stem)
    if isinstance(getattr(model, "graph", None), Graph):  # a program, which has a name
        return str(model.graph.name)
    owner = getattr(model, "graph_module", model)  # an exported program has no better name than its module's
    return type(owner).__name__.lower()


def _with_dtype(graph: Graph, name: str | None) -> Graph:
    """The graph computing in the type called ``name``, if any."""
    if name is None:
        return graph
    from ir.evaluation.id_ranges import ranges_of
    from pdv.passes.precision import with_dtype

    try:
        dtype = DType.from_name(name)
    except KeyError:
        dtype = DType.BOOL
    if not dtype.is_floating:
        raise UsageError(f"dtype {name!r} is not known", "Allowed: float32, bfloat16, float16")
    found = with_dtype(graph, dtype)
    before = {node.attr("name"): node.type.dtype for node in graph.inputs}
    changed = {x.attr("name") for x in found.inputs if x.type.dtype.itemsize < before[x.attr("name")].itemsize}
    if dtype.itemsize < _HOLDS_IDS and (ids := sorted(changed & ranges_of(graph).keys())):
        what = f"the input {ids[0]!r} holds numbers of rows as floats, and {name} lacks whole numbers from 257 on"
        raise UsageError(what, "float32, or an input of integers beside that of floats", "Pass the ids as integers")
    return found
