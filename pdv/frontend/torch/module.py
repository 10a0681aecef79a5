"""A plain module with example inputs, by way of `torch.export`. Entry point: `load_module_or_export`."""

from __future__ import annotations

import copy
import io
import math
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch.distributions import Distribution
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.nn.functional import gaussian_nll_loss
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from ir.dims import Shape
from ir.errors import ModelError, UsageError
from ir.graph import Graph
from pdv.frontend.program import BATCH, OpenSize, Program, size_name
from pdv.frontend.torch.copies import check_inputs_apart, distinct_inputs, prepared_copy
from pdv.frontend.torch.draws import DRAWING, drawing_of
from pdv.frontend.torch.dynamic_shapes import DynamicShapes, NamedDims, open_dims, planned_shapes
from pdv.frontend.torch.export_errors import check_asked, check_norms, export_error, is_of_transforms
from pdv.frontend.torch.exported_state import storage_of, unlogged
from pdv.frontend.torch.program import NOTES, OWN_BACKWARD, load_exported_program
from pdv.frontend.torch.tracing.alignments import Alignments
from pdv.frontend.torch.tracing.chance import Chance
from pdv.frontend.torch.tracing.conversions import unconverted
from pdv.frontend.torch.tracing.guards import Guards
from pdv.frontend.torch.tracing.known_values import KnownValues
from pdv.frontend.torch.tracing.leftovers import tracing
from pdv.frontend.torch.tracing.own_backward import functions_called, same_gradients
from pdv.frontend.torch.tracing.packed import Unpacked
from pdv.frontend.torch.tracing.solvers import solving

ExampleInputs = torch.Tensor | Sequence[Any] | Mapping[str, Any]  # Any: what the module's forward takes
"""One tensor, the positional arguments, or the keyword arguments of a module's forward."""


def load_module_or_export(
    model: torch.nn.Module | ExportedProgram,
    example_inputs: ExampleInputs | None = None,
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    dynamic_shapes: DynamicShapes | None = None,
) -> Program:
    """The program of a module in the mode (training or not) that it is in, or of an exported program.

    batch: repeat or cut dim 0 of every example tensor to this size; dims: so other sizes that are left open, by name.
    dynamic_shapes: which sizes a module leaves open besides the batch, as ``torch.export.export`` takes them.

    Raises:
        UsageError: if example inputs are missing, or what is given does not go together.
        ModelError: if `torch.export` cannot trace the module, or the module does not leave a size open.
    """
    module, found = model, dict[str, NamedDims]()
    if isinstance(model, ExportedProgram):
        check_inputs_apart(model)
        found = open_dims(model)
        if not found:
            return _static(model, example_inputs, batch, dims)
        example_inputs = _inputs_of(model) if example_inputs is None else example_inputs
        if dynamic_shapes is not None:
            raise UsageError("an exported program has dynamic shapes of its own", mend="Leave dynamic_shapes out")
        module = model.module()
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"a model of type {type(model).__name__}", "A path, an ExportedProgram or an nn.Module")
    if example_inputs is None:
        raise UsageError("a module without example_inputs", "", "Pass a batch as the training loop would")
    if dynamic_shapes is not None:
        found = open_dims(export_module(module, example_inputs, dynamic_shapes=dynamic_shapes), dynamic_shapes)
    given = tree_map(lambda value: _resize(value, batch), example_inputs)
    given = resize_inputs(given, planned_shapes(given, found, dims or {})) if dims else given
    program = load_exported_program(export_module(module, given))

    def again(shapes: Mapping[str, Shape]) -> Graph:
        wanted = [shapes[node.attr("name")] for node in program.graph.inputs]
        return load_exported_program(export_module(module, resize_inputs(given, wanted))).graph

    return replace(program, again=again, sizes=_name(found, program.graph))


def _static(
    program: ExportedProgram, example_inputs: ExampleInputs | None, batch: int | None, dims: Mapping[str, int] | None
) -> Program:
    if example_inputs is not None or batch is not None or dims:
        raise UsageError(
            "an exported program has its own inputs",
            "Neither example_inputs nor batch nor dims",
            "Export it at this batch, or with dynamic_shapes",
        )
    return load_exported_program(program)


def _inputs_of(program: ExportedProgram) -> ExampleInputs:
    """The inputs that a program was exported with.

    Raises:
        UsageError: if it has none, or takes some by name and some by place.
    """
    args, kwargs = program.example_inputs or ((), {})
    if bool(args) == bool(kwargs):
        raise UsageError(
            "an exported program without example inputs", mend="Pass example_inputs of the size to plan at"
        )
    inputs: ExampleInputs = kwargs or args
    return inputs


def _name(found: Mapping[str, NamedDims], graph: Graph) -> dict[str, OpenSize]:
    """The sizes that are left open besides the batch, dim 0 of the first input that has dims; it, too, if bounded."""
    inputs = [node.attr("name") for node in graph.inputs]
    first = next((node.attr("name") for node in graph.inputs if node.type.rank), "")
    sizes: dict[str, OpenSize] = {}
    for name, one in found.items():
        places = tuple((inputs[number], dim) for number, dim in one.places)
        if (first, 0) not in places:
            sizes[size_name(name, sizes)] = OpenSize(places, one.most)
        elif one.most is not None:
            sizes[BATCH] = OpenSize(((first, 0),), one.most)
    return sizes


def export_module(
    module: torch.nn.Module, example_inputs: ExampleInputs, *, dynamic_shapes: DynamicShapes | None = None
) -> ExportedProgram:
    """`torch.export.export` with its many failures as one error.

    Raises:
        ModelError: naming the module and the first line of torch's reason.
    """
    stored: dict[str, torch.Tensor] = dict(module.named_parameters())
    if lazy := [name for name, x in stored.items() if torch.nn.parameter.is_lazy(x)]:
        raise ModelError(
            f"{type(module).__name__} has parameters that its first call makes: {', '.join(lazy[:3])}",
            "Modules whose parameters are there",
            "Call it once on such inputs before it is planned",
        )
    check_norms(module)
    args, kwargs = distinct_inputs(module, call_arguments(example_inputs))
    own = prepared_copy(module)
    try:
        program = _export(own, args, kwargs, dynamic_shapes, strict=False)
    except Exception as error:  # torch.export raises whatever the model's own code raises
        try:  # its other way of tracing knows more of torch.func, and less of Python
            retried = _export(own, args, kwargs, dynamic_shapes, strict=True) if is_of_transforms(error) else None
        except Exception:  # noqa: BLE001  # the first one is told
            retried = None
        if retried is None:
            raise export_error(module, error) from error
        program = retried
    again: Callable[..., ExportedProgram] = partial(
        _export, args=args, kwargs=kwargs, shapes=dynamic_shapes, strict=False
    )
    if program.graph_module.meta[OWN_BACKWARD]:
        again, program = _with_own_backward(module, program, again, args, kwargs)
    program.graph_module.meta[DRAWING] = drawing_of(program, partial(prepared_copy, module), again, args, kwargs)
    _check_read(program)
    return program


def _with_own_backward(
    module: torch.nn.Module,
    program: ExportedProgram,
    again: Callable[..., ExportedProgram],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Callable[..., ExportedProgram], ExportedProgram]:
    """The program in which functions have the gradients that they define, and how it is exported.

    As they are if their forward has these anyway, or if what is found has still others.
    """

    def is_alike(found: ExportedProgram) -> bool:
        alike = same_gradients(module, copy.deepcopy(found.module()), args, kwargs)
        if alike:
            found.graph_module.meta[OWN_BACKWARD] = ()
        return bool(alike)

    if is_alike(program):
        return again, program
    otherwise = partial(again, own_backward=True)
    try:
        found = otherwise(prepared_copy(module))
    except Exception:  # noqa: BLE001  # whatever their backward raises: what was read without it is told about
        return again, program
    return (otherwise, found) if is_alike(found) else (again, program)


def _export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shapes: DynamicShapes | None,
    *,
    strict: bool,
    own_backward: bool = False,
) -> ExportedProgram:
    """What torch prints to the screen of a program that it gives up is left out: the error says why it does."""
    said = io.StringIO()
    with warnings.catch_warnings():  # recurrent layers keep their weights twice; calls are compared behind this
        warnings.filterwarnings("ignore", message="The tensor attributes .* were assigned during export")
        values, guards = KnownValues(module), Guards()
        known = nullcontext() if strict else _values_known(values, guards)
        with (
            tracing(module), redirect_stderr(said), unlogged(), _unvalidated(), Chance() as chance,
            Unpacked() as unpacked, functions_called(own=own_backward) as called, known,
        ):  # fmt: skip
            program = torch.export.export(module, args, kwargs, dynamic_shapes=cast(Any, shapes), strict=strict)
    check_asked(values.asked & {*values.written, *program.graph_signature.buffers_to_mutate.values()})
    sys.stderr.write(said.getvalue())
    _drop_rebound(program)
    program.graph_module.meta[OWN_BACKWARD] = tuple(called)
    program.graph_module.meta[NOTES] = (*guards.notes(), *chance.notes, *unpacked.notes)
    return program


def _drop_rebound(program: ExportedProgram) -> None:
    """Leave out that buffers become what they are bound to, of another size: tables made anew where they are too small.

    Torch copies to the buffer what the outermost module binds to its name, which then cannot be run.
    """
    graph = program.graph
    for node in [node for node in graph.nodes if node.target is torch.ops.aten.copy_.default and not node.users]:
        buffer, bound = (one.meta["val"].shape for one in node.args[:2])
        if node.args[0].op == "placeholder" and buffer != bound:
            graph.erase_node(node)
    program.graph_module.recompile()


_GET_DATA, _SET_DATA = (getattr(torch.Tensor.data, name) for name in ("__get__", "__set__"))


class _Data(TorchFunctionMode):
    """While this lasts, ``x.data`` is ``x`` without gradient, in the same memory; setting it overwrites that memory.

    Of torch's own ``data`` tracing knows nothing: what is read of it would be a constant without values, which ends the
    process when its program is decomposed, and what is written to it would be lost.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's
        del types
        if function == _GET_DATA:
            return args[0].detach()
        if function == _SET_DATA:
            args[0].detach().copy_(args[1].detach())
            return None
        return function(*args, **(kwargs or {}))


_OF_FINITE = {"isfinite": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
_ANSWERS: Mapping[str, Callable[..., Any]] = {
    **{name: lambda x: x for name in ("all", "any", "detach")},
    **dict.fromkeys(("logical_not", "bitwise_not", "invert"), operator.not_),
}  # Any: of what is known of each element, the same of the result


class _Finite(TorchFunctionMode):
    """While this lasts, ``if`` of whether what is trained is finite goes where it is: programs have one way.

    Asked is so ahead of a clamp (detectors of transformers in training) or of an error. Only of what has a gradient:
    masks may well be infinite. That a module goes another way at its values is found when its reading is compared.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: MutableMapping[torch.Tensor, bool] = WeakIdKeyDictionary()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's
        del types
        name: str = getattr(function, "__name__", "").strip("_")
        given: Any = args[0] if args else None
        known = self.known.get(given) if isinstance(given, torch.Tensor) else None
        if known is not None and name in ("bool", "item"):
            return known
        result = function(*args, **(kwargs or {}))
        if name in _OF_FINITE and given.requires_grad:
            self.known[result] = _OF_FINITE[name]
        elif known is not None and name in _ANSWERS:
            self.known[result] = _ANSWERS[name](known)
        return result


@contextmanager
def _values_known(values: KnownValues, guards: Guards) -> Iterator[None]:
    with unconverted(), solving(), guards, guards.of_sizes(), values.in_forward(), _Data(), _Finite(), Alignments():
        yield


@contextmanager
def _unvalidated() -> Iterator[None]:
    """While this lasts, ``torch.distributions`` and losses do not look at the values of what they are given."""
    before = Distribution._validate_args  # noqa: SLF001  # has a public setter, and no getter
    plain = gaussian_nll_loss.__code__  # the function stays the one that a module has by a name of its own
    Distribution.set_default_validate_args(False)
    gaussian_nll_loss.__code__ = _gaussian_nll_loss.__code__
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
        gaussian_nll_loss.__code__ = plain


def _gaussian_nll_loss(
    input: Any,  # noqa: A002  # by this name a module may pass it
    target: Any,
    var: Any,  # Any: a tensor, or a number
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:  # Any: a tensor
    """Of the same value and gradient: a variance below ``eps`` counts as that, and has its gradient all the same."""
    if isinstance(var, float):
        var = torch.full_like(input, var)
    if input.shape != var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()
    loss = (torch.log(var) + (input - target) ** 2 / var) / 2
    if full:
        loss = loss + math.log(2 * math.pi) / 2
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _check_read(program: ExportedProgram) -> None:
    """Whether a program reads parameters as such, and none beside the module that was exported.

    Raises:
        ModelError: naming a parameter that it would take for a constant.
    """
    known = {storage_of(x): name for name, x in program.state_dict.items() if x.requires_grad and not x.is_meta}
    for spec in program.graph_signature.input_specs:
        value = program.constants.get(str(spec.target)) if spec.kind is InputKind.CONSTANT_TENSOR else None
        if isinstance(value, torch.Tensor) and (name := known.get(storage_of(value))) is not None:
            raise ModelError(
                f"a function that the module calls reads its parameter {name} by another way than the module",
                "Hooks and functions that hold the module, or are given it, and not by a name of the script",
                "Pass the module to the function, or make it a method",
            )


def call_arguments(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of a call on example inputs.

    Raises:
        UsageError: if they are neither tensors nor several arguments.
    """
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    try:
        return tuple(example_inputs), {}
    except TypeError:
        what = f"example_inputs: a {type(example_inputs).__name__}"
        raise UsageError(what, "Allowed: a tensor, a tuple of arguments, or a dict by name") from None


def resize_inputs(inputs: ExampleInputs, shapes: Sequence[Shape]) -> ExampleInputs:
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
