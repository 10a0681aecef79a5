"""Operators that nobody declared, run as they are by torch: opaque ones (`ir.ops.opaque`).

Entry points: `opaque`, by which frontends make them; `register_operator`, by which users say how one may be cut;
`call_torch`, which runs them where programs are evaluated.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from ir.errors import ModelError, ShapeError, UsageError, first_line
from ir.graph import Node
from ir.ops import OPERATORS
from ir.ops.opaque import MOST_OPERANDS, Foreign, check_loops
from ir.types import DType
from pdv.frontend.lowering import Lowering, Unsupported
from pdv.frontend.registered import IN_TORCH, LOOPS
from pdv.frontend.torch.exported_state import unlogged

REFUSED = {
    torch.Tag.nondeterministic_seeded: "it draws at random",
    torch.Tag.dynamic_output_shape: "the shape of its result depends on values",
    torch.Tag.data_dependent_output: "its result decides what the program is",
    torch.Tag.inplace_view: "it changes its operand",
}

_ATEN = torch.ops.aten
_JUMPS = (_ATEN.floor, _ATEN.ceil, _ATEN.trunc, _ATEN.round, _ATEN.frac, _ATEN.div, _ATEN.floor_divide)
_OF_ROWS = (
    _ATEN.topk, _ATEN.sort, _ATEN.argsort, _ATEN.cumprod, _ATEN.logcumsumexp, _ATEN.argmax, _ATEN.argmin,
    _ATEN.max, _ATEN.min, _ATEN.median, _ATEN.nanmedian, _ATEN.mode, _ATEN.prod, _ATEN.norm, _ATEN.linalg_vector_norm,
    _ATEN.gather, _ATEN.scatter, _ATEN.scatter_add, _ATEN.scatter_reduce,
)  # fmt: skip
"""Functions of each row along the dim that is called so among their arguments, of which some leave that out.

Of several operands, these have the same rows if their other dims have the same sizes.
"""

_OF_ELEMENTS = (_ATEN.__and__, _ATEN.__or__, _ATEN.__xor__, _ATEN.__lshift__, _ATEN.__rshift__)
"""Functions of elements that torch does not tag so."""

OF_SAMPLES: Mapping[OpOverloadPacket, tuple[int, int]] = {
    **dict.fromkeys((_ATEN.max_pool3d_with_indices, _ATEN.avg_pool3d, _ATEN._adaptive_avg_pool3d), (5, 1)),  # noqa: SLF001
    _ATEN.adaptive_max_pool3d: (5, 1), _ATEN.grid_sampler_2d: (4, 2), _ATEN.grid_sampler_3d: (5, 2),
    **dict.fromkeys((_ATEN.col2im, _ATEN.linalg_inv_ex, _ATEN.linalg_cholesky_ex, _ATEN.linalg_qr), (3, 1)),
    **dict.fromkeys((_ATEN._linalg_det, _ATEN._linalg_slogdet, _ATEN._linalg_svd, _ATEN._linalg_eigh), (3, 1)),  # noqa: SLF001
    **dict.fromkeys((_ATEN._linalg_solve_ex, _ATEN.linalg_solve_triangular), (3, 2)),  # noqa: SLF001
    _ATEN.linalg_matrix_exp: (3, 1), _ATEN._cdist_forward: (3, 2),  # noqa: SLF001
}  # fmt: skip
"""Functions of each sample: of which rank the first operand is then at least, and how many have the samples first."""

OF_CHANNELS = tuple(getattr(packet, form) for form in ("default", "vec") for packet in (
    _ATEN.upsample_linear1d, _ATEN.upsample_bilinear2d, _ATEN.upsample_bicubic2d, _ATEN.upsample_trilinear3d,
    _ATEN._upsample_bilinear2d_aa, _ATEN._upsample_bicubic2d_aa,  # noqa: SLF001
))  # fmt: skip
"""Functions of each channel of each sample, [n, c, *space]; made of others they take twice as long or more."""

_BEYOND = re.compile("out of (bounds|range)|to have value at (most|least)")

NONE: Mapping[Node, int] = MappingProxyType({})

Value = Any
"""What torch's functions take and give: tensors, numbers, lists of either, types; here with nodes for tensors."""


class OutOfBoundsError(ModelError):
    """A function of torch is given ids beyond what it indexes."""


def register_operator(
    function: str | OpOverload | OpOverloadPacket | Any,  # Any: a CustomOpDef
    loops: str,
    *,
    onnx: str | None = None,
) -> None:
    """Say along which dims an operator of torch may be cut: those that it goes along row by row.

    Args:
        function: an operator, as ``torch.library.custom_op`` gives it, or its name: ``"mylib::smooth"``.
        loops: the dims of its tensors, in the order of its arguments, and of its results, which all have the same:
            ``"... d*, d* -> ... d*"``. What has a * stays whole.
        onnx: what the operator is called in ONNX files, with its domain: ``"mylib::Smooth"``. Its inputs are the first
            arguments, in order, its attributes arguments by name.

    Raises:
        UsageError: if there is no such operator, it may not be run as it is, the loops are not of its operands, or the
            ONNX operator is one of the standard's.
    """
    found = find(function if isinstance(function, str) else getattr(function, "_qualname", None) or function)
    if why := _why_not(found):
        raise UsageError(f"{_name(found)} cannot be part of a plan: {why}", "Functions of their operands alone")
    tensors = [argument for argument in found._schema.arguments if "Tensor" in str(argument.type)]  # noqa: SLF001
    try:
        check_loops(loops, None if any("List" in str(tensor.type) for tensor in tensors) else len(tensors))
    except ShapeError as error:
        raise UsageError(f"{_name(found)}: {error.what}", error.allowed, error.mend) from None
    if onnx is not None:
        domain, _, name = onnx.partition("::")
        if not (domain and name) or domain == "ai.onnx":
            raise UsageError(
                f"onnx={onnx!r} is no operator of a domain of your own", 'DOMAIN::NAME, such as "mylib::Smooth"'
            )
        IN_TORCH[onnx] = _full_name(found)
    LOOPS[_name(found)] = loops


def find(function: str | OpOverload | OpOverloadPacket) -> OpOverload:
    """The operator of a name: ``mylib::smooth``, ``aten::sort.stable``, or as programs write it, with dots.

    Raises:
        UsageError: if torch has none.
    """
    found: Any = function
    if isinstance(function, str):
        found = torch.ops
        for part in function.removeprefix("torch.ops.").replace("::", ".").split("."):
            found = getattr(found, part, None)
    if isinstance(found, OpOverloadPacket):
        found = getattr(found, "default", None)
    if not isinstance(found, OpOverload):
        raise UsageError(
            f"torch has no operator {function!r}", "torch.ops.NAMESPACE.NAME.OVERLOAD", "Import its library"
        )
    return found


def opaque(k: Lowering, function: OpOverload, args: Sequence[Value], kwargs: Mapping[str, Value]) -> Value:
    """What torch's function gives of nodes and the like: a node, or several (None for what is no tensor).

    Raises:
        Unsupported: if it may not be run as it is on every rank.
    """
    function = _without_memory(function)
    operands: list[Node] = []
    if function.overloadpacket in _JUMPS:
        args = [k.exactly(x) if isinstance(x, Node) else x for x in args]
    given = [_text(x, operands) for x in args]
    given += [f"{name}={_text(x, operands)}" for name, x in kwargs.items()]
    why = _why_not(function)
    if why or not 0 < len(operands) <= MOST_OPERANDS:
        raise Unsupported(why or f"{len(operands)} operands")
    results = _shape_results(function, args, kwargs)
    follow = _find_leading(function, args, kwargs, operands, results)
    single = isinstance(results, torch.Tensor)
    attrs = {"function": f"torch.ops.{function.namespace}.{function.__name__}", "arguments": ", ".join(given)}

    def make(place: int, result: Value) -> Node | None:
        if not isinstance(result, torch.Tensor):
            return None
        loops = LOOPS.get(_name(function)) or _loops_of(function, operands, args, kwargs, result.dim())
        own = {"loops": loops, "output": place, "sizes": tuple(result.shape), "gives": _type_of(result, operands)}
        own |= {"follow": follow} if follow and not loops else {}
        return k.builder.apply(OPERATORS["opaque"], tuple(operands), {**attrs, **own}, k.name)

    return make(-1, results) if single else tuple(make(place, result) for place, result in enumerate(results))


def _loops_of(
    function: OpOverload, operands: Sequence[Node], args: Sequence[Value], kwargs: Mapping[str, Value], rank: int
) -> str:
    """What torch itself says of an operator: that it is one of elements; and what is known of those of rows."""
    if torch.Tag.pointwise in function.tags or function.overloadpacket in _OF_ELEMENTS:
        return f"{', '.join(['...'] * len(operands))} -> ..."
    if function.overloadpacket is _ATEN.convolution:
        return _loops_of_convolution(operands, rank, transposed=bool(args[6]))
    if function.overloadpacket in OF_SAMPLES:
        least, count = OF_SAMPLES[function.overloadpacket]
        alike = count == len(operands) and all(_has_samples_of(x, operands[0], function) for x in operands)
        return _loops_of_samples(operands, rank, count) if alike and operands[0].type.rank >= least else ""
    if function in OF_CHANNELS:
        return " -> ".join(" ".join(("n c", *(f"{side}{dim}*" for dim in range(2, rank)))) for side in "xy")
    if function.overloadpacket not in _OF_ROWS:
        return ""
    asked, before = function._schema.arguments, operands[0].type.rank  # noqa: SLF001
    given = {one.name: one.default_value for one in asked if one.has_default_value()}
    dim = {**given, **dict(zip((one.name for one in asked), args, strict=False)), **kwargs}.get("dim")
    dims = dim if isinstance(dim, list | tuple) else [dim]
    if len(dims) != 1 or dims[0] is None or not 0 <= before - rank <= 1 or not before:
        return ""
    at = int(dims[0]) % before
    if len({(*x.type.shape[:at], None, *x.type.shape[at + 1 :]) for x in operands}) > 1:
        return ""
    rows = [f"d{i}" for i in range(before)]
    each = [" ".join((*rows[:at], f"n{number or ''}*", *rows[at + 1 :])) for number in range(len(operands))]
    return f"{', '.join(each)} -> {' '.join((*rows[:at], *['k*'] * (rank == before), *rows[at + 1 :]))}"


def _has_samples_of(x: Node, first: Node, function: OpOverload) -> bool:
    """Whether the first dim of an operand is that of the first one, and not one of a matrix that all samples share."""
    vectors = function.overloadpacket is _ATEN._linalg_solve_ex and x.type.shape == first.type.shape[:-1]  # noqa: SLF001
    return x.type.shape[:1] == first.type.shape[:1] and (vectors or x.type.rank == first.type.rank)


def _loops_of_samples(operands: Sequence[Node], rank: int, count: int) -> str:
    """Of the first ``count`` operands and the result the first dim is the samples'; all else is whole."""
    each = [
        " ".join(("n", *names[1:]) if number < count else names)
        for number, x in enumerate(operands)
        if (names := [f"x{number}_{dim}*" for dim in range(x.type.rank)])
    ]
    return f"{', '.join(each)} -> {' '.join(('n', *(f'y{dim}*' for dim in range(1, rank))))}"


def _loops_of_convolution(operands: Sequence[Node], rank: int, *, transposed: bool) -> str:
    """The same of any convolution; weights have the channels of the result, or, transposed, of what is convolved."""
    text = _loops_of_samples(operands, rank, 1).replace("x1_0*", "c*")
    return text.replace("x0_1*" if transposed else "y1*", "c*")


def call_torch(
    foreign: Foreign, arrays: Sequence[Value], tracked: Sequence[bool]
) -> tuple[Value, Callable[[Value], list[Value]]]:
    """The function on arrays, of floats in their own type; and how the gradients of its operands are had.

    Raises:
        OutOfBoundsError: if ids lie beyond what it indexes.
        ModelError: if torch cannot run it.
    """
    function = find(foreign.function)
    if why := _why_not(function):
        raise ModelError(f"{foreign.function} cannot be part of a program: {why}")
    tensors = [
        torch.from_numpy(np.array(x, dtype=x.dtype if kind == "float64" else kind)).requires_grad_(is_tracked)
        for x, kind, is_tracked in zip(arrays, foreign.types, tracked, strict=True)
    ]
    args, kwargs = _read(foreign.arguments, tensors)
    try:
        with torch.enable_grad():
            found = function(*args, **kwargs)
    except Exception as error:  # whatever the operator's own code raises
        if _BEYOND.search(str(error)):
            raise OutOfBoundsError(
                f"no ids were found that {foreign.function} takes together with all else that reads them: "
                f"{first_line(error)}",
                "Ids that lie in all that they index",
                "--no-check leaves out the comparison with the model",
            ) from error
        raise ModelError(
            f"{foreign.function} cannot be run on a CPU in float64: {first_line(error)}",
            "Operators whose code takes any floating type",
            "--no-check leaves out the comparison with the model",
        ) from error
    result = cast(torch.Tensor, found if foreign.output < 0 else found[foreign.output])

    def pull(g: Value) -> list[Value]:
        wanted = [x for x in tensors if x.requires_grad]
        if not result.requires_grad:
            return [np.zeros(x.shape) for x in tensors]
        gradients = torch.autograd.grad(
            result, wanted, torch.from_numpy(np.array(g)).to(result), allow_unused=True, retain_graph=True
        )
        of = {id(x): gradient for x, gradient in zip(wanted, gradients, strict=True)}
        each = [of.get(id(x)) for x in tensors]
        return [np.zeros(x.shape) if g is None else g.double().numpy() for x, g in zip(tensors, each, strict=True)]

    return (result.double() if result.is_floating_point() else result).detach().numpy(), pull


def _name(function: OpOverload) -> str:
    return f"{function.namespace}::{function.__name__}"


def _full_name(function: OpOverload) -> str:
    return f"{_name(function).removesuffix('.default')}"


def _why_not(function: OpOverload) -> str:
    """Why a function may not be run as it is on every rank; empty if it may."""
    schema = function._schema  # noqa: SLF001
    known = {
        "it changes its operands": schema.is_mutable,
        "its result is its operand's memory": any(result.alias_info is not None for result in schema.returns),
        "torch has no gradient of it": function.namespace == "prims",
        "it reads memory as it lies, which programs lay out otherwise": "as_strided" in schema.name,
    } | {why: tag in function.tags for tag, why in REFUSED.items()}
    return next((why for why, holds in known.items() if holds), "")


def _without_memory(function: OpOverload) -> OpOverload:
    """Of a view the function that gives a tensor of its own, if torch has it."""
    if all(result.alias_info is None for result in function._schema.returns):  # noqa: SLF001
        return function
    packet = getattr(getattr(torch.ops, function.namespace), f"{function._schema.name.split('::')[1]}_copy", None)  # noqa: SLF001
    return getattr(packet, function._overloadname, function)  # noqa: SLF001


def _text(value: Value, operands: list[Node]) -> str:
    """An argument as Python reads it; a node, put among the operands, as ``{number}``."""
    match value:
        case Node():
            operands.append(value)
            return f"{{{len(operands) - 1}}}"
        case list() | tuple():
            return f"[{', '.join(_text(each, operands) for each in value)}]"
        case bool() | int() | str() | None:
            return repr(value)
        case float():
            return repr(value) if math.isfinite(value) else f"float('{value}')"
        case torch.dtype() | torch.memory_format() | torch.layout():
            return str(value)
        case torch.device() if value.type == "cpu":
            return "None"
    raise Unsupported(f"an argument of type {type(value).__name__}")


def _read(text: str, tensors: Sequence[torch.Tensor]) -> tuple[list[Value], dict[str, Value]]:
    """The arguments that ``_text`` wrote."""
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call), text

    def value(node: ast.expr) -> Value:
        match node:
            case ast.Set(elts=[ast.Constant(value=int(number))]):
                return tensors[number]
            case ast.List(elts=each):
                return [value(one) for one in each]
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if isinstance(
                found := getattr(torch, name), torch.dtype | torch.memory_format | torch.layout
            ):
                return torch.float64 if isinstance(found, torch.dtype) and found.is_floating_point else found
            case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(number))]):
                return float(number)
        return ast.literal_eval(node)

    return [value(one) for one in call.args], {str(one.arg): value(one.value) for one in call.keywords}


def _shape_results(
    function: OpOverload, args: Sequence[Value], kwargs: Mapping[str, Value], leading: Mapping[Node, int] = NONE
) -> Value:
    """What it gives, as tensors without values; ``leading``: other sizes of the first dims of operands.

    Raises:
        Unsupported: if torch cannot say without values.
    """
    with unlogged(), FakeTensorMode(allow_non_fake_inputs=False):

        def fake(value: Value) -> Value:
            if not isinstance(value, Node):
                return value
            shape = value.type.shape
            shape = (leading[value], *shape[1:]) if value in leading else shape
            return torch.empty(shape, dtype=getattr(torch, value.type.dtype.torch_name))

        given = tree_map(fake, (list(args), dict(kwargs)), is_leaf=lambda x: isinstance(x, Node))
        try:
            return function(*given[0], **given[1])
        except Exception as error:  # noqa: BLE001  # whatever the operator's own code raises
            raise Unsupported(f"the shape of its result cannot be had: {first_line(error)}") from None


def _find_leading(
    function: OpOverload, args: Sequence[Value], kwargs: Mapping[str, Value], operands: Sequence[Node], results: Value
) -> tuple[int, ...]:
    """Numbers of the operands whose first dim may be of any size, which is then that of the results: the batch.

    The function is asked for shapes at twice and three times the size; none if it does not give them.
    """
    shapes = [tuple(x.shape) for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
    if not shapes or any(not shape or shape[0] != shapes[0][0] for shape in shapes):
        return ()
    size = shapes[0][0]
    found = tuple(number for number, x in enumerate(operands) if x.type.shape[:1] == (size,))
    for times in (2, 3) if found else ():
        try:
            again = _shape_results(function, args, kwargs, {operands[number]: times * size for number in found})
        except Unsupported:
            return ()
        wanted = [(times * size, *shape[1:]) for shape in shapes]
        if [tuple(x.shape) for x in tree_leaves(again) if isinstance(x, torch.Tensor)] != wanted:
            return ()
    return found


def _type_of(result: torch.Tensor, operands: Sequence[Node]) -> str:
    """Of a result: of floats the number of the first operand of that type, which it goes with; else its name."""
    try:
        dtype = DType.from_name(str(result.dtype).removeprefix("torch."))
    except KeyError:
        raise Unsupported(f"element type {result.dtype}") from None
    if 0 in result.shape:
        raise Unsupported(f"a result of shape {list(result.shape)}")
    alike = [str(place) for place, x in enumerate(operands) if dtype.is_floating and x.type.dtype is dtype]
    return alike[0] if alike else dtype.value
