"""Lower a `torch.export` program to the IR.

Decides which placeholders are inputs, parameters or constants, and which values can be computed now. What an operator
becomes is said in `aten`. Entry point: `load_exported_program`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument
from torch.utils._pytree import tree_leaves

from ir.errors import ModelError, ShapeError, UnsupportedOperatorsError
from ir.graph import Graph, Node
from ir.types import DType, TensorType
from pdv.frontend import masks
from pdv.frontend.chosen import Chosen, Places
from pdv.frontend.lowering import Empty, Lowering, TopK, Unsupported
from pdv.frontend.program import Array, Program, Weights
from pdv.frontend.torch.aten import HANDLERS
from pdv.frontend.torch.chosen_rows import of_chosen
from pdv.frontend.torch.complex_numbers import Complex, check_real, is_complex, of_complex
from pdv.frontend.torch.decomposed import DETACHES, decompose
from pdv.frontend.torch.draws import DRAWING, Drawing, draws_of, place_of
from pdv.frontend.torch.export_errors import remedy
from pdv.frontend.torch.exported_state import (
    Memory,
    argument_names,
    check_overwritten,
    is_floating,
    live_nodes,
    memory_of,
    other_names,
    tensors,
    where_of,
)
from pdv.frontend.torch.opaque import opaque
from pdv.frontend.torch.scalars import Handler
from pdv.passes.fold_constants import check_foldable_size

EMPTY = Empty()
_WRITERS = (  # of what is written into their first operand: nothing, where that has no elements
    "slice_scatter", "scatter", "scatter_add", "index_add", "index_copy", "index_put",
)  # fmt: skip
Value = Node | TopK | Chosen | Places | Complex | Empty | tuple[Node | Chosen | Places | TopK | None, ...] | None
"""What an fx node gave: a tensor, several, rows that a mask chose, or (None) what is reported as unsupported."""


OWN_BACKWARD, NOTES = "own_backward", "notes"
"""Where the graph module of an exported program keeps the names of the functions with a backward of their own, and what
is to be said of it.
"""
ONLY_SCATTER = "only scatter reads the k largest elements, to put them back"


def load_exported_program(program: ExportedProgram) -> Program:
    """The program's graph (not yet canonical) and its weights.

    Raises:
        ModelError: if a shape is dynamic, or a constant has no values.
        UnsupportedOperatorsError: naming every operator that has no declaration.
    """
    whole = decompose(program)
    drawing = program.graph_module.meta.get(DRAWING, Drawing(trains=True))  # else nobody knows its module
    if draws_of(whole) - draws_of(program):  # by operators that are not known to draw
        drawing = replace(drawing, trains=True)
    lowered = _ProgramLowering(whole, drawing).run()
    names, state = other_names(program, lowered.weights.loaders), program.state_dict
    unread = {
        name: partial(_to_numpy, state[name], name)
        for name in state
        if name not in names and name not in lowered.weights.loaders and _is_storable(state[name])
    }
    own, notes = (program.graph_module.meta.get(key, ()) for key in (OWN_BACKWARD, NOTES))
    frozen = frozenset(name for name in program.graph_signature.parameters if not state[name].requires_grad)
    weights = replace(lowered.weights, unread=unread)
    return replace(lowered, names=names, weights=weights, own_backward=own, frozen=frozen, notes=notes)


def _is_storable(tensor: torch.Tensor) -> bool:
    """Whether it has values, of a type that files of weights have."""
    return not tensor.is_meta and str(tensor.dtype).removeprefix("torch.") in {dtype.torch_name for dtype in DType}


class _ProgramLowering:
    """The state of one lowering: fx node -> IR value, and what was found unsupported on the way."""

    def __init__(self, program: ExportedProgram, drawing: Drawing) -> None:
        self.program = program
        self.k = Lowering()
        self.k.trains, self.drawing = drawing.trains, drawing
        self.arguments = argument_names(program)
        self.values: dict[torch.fx.Node, Value] = {}
        self.unsupported: dict[str, None] = {}
        self.opaque: dict[str, None] = {}
        self.loaders: dict[str, Callable[[], Array]] = {}
        self.canonical_names: dict[Memory, str] = {}
        self.returned: set[torch.fx.Node] = set()

    def run(self) -> Program:
        signature = self.program.graph_signature
        live = live_nodes(self.program)
        self.returned = live_nodes(self.program, updates=False)
        check_overwritten(self.program, live)
        specs = {spec.arg.name: spec for spec in signature.input_specs if isinstance(spec.arg, TensorArgument)}
        for node in self.program.graph.nodes:
            self.k.name, self.k.drops_as_noise = node.name, place_of(node) in self.drawing.always
            if node.op == "placeholder":
                spec = specs.get(node.name)
                if spec is not None and spec.kind is not InputKind.USER_INPUT and _has_no_elements(node):
                    self.values[node] = EMPTY
                elif spec is not None and (node in live or spec.kind is InputKind.USER_INPUT):
                    self.values[node] = self._placeholder(node, spec)
            elif node.op == "call_function" and node in live:
                self.values[node] = self._call(node)
        if self.unsupported:
            raise UnsupportedOperatorsError(tuple(self.unsupported), mend=remedy(self.unsupported))
        graph = self._graph()  # may find more that is opaque
        lines = {node.name: where_of(node) for node in self.program.graph.nodes if node.op == "call_function"}
        return Program(graph, Weights(self.loaders), opaque=(*self.opaque, *self.k.foreign), lines=lines)

    def _graph(self) -> Graph:
        by_name = {node.name: node for node in self.program.graph.nodes}
        outputs: list[Node] = []
        updates: dict[str, Node] = {}
        for spec in self.program.graph_signature.output_specs:
            place = by_name[spec.arg.name] if isinstance(spec.arg, TensorArgument) else None
            value = None if place not in self.values else self._read(place, None)
            if isinstance(value, Complex):
                raise ModelError(f"output {len(outputs)} of the model is complex", "Real outputs", "view_as_real")
            if isinstance(value, Chosen | Places):
                raise ModelError(
                    f"output {len(outputs)} of the model has as many rows as a mask chooses",
                    "Outputs whose shapes do not depend on values",
                    "Return their sum or mean, or all rows beside the mask",
                )
            if not isinstance(value, Node):
                continue
            if spec.kind is OutputKind.USER_OUTPUT:
                outputs.append(value)
            elif spec.kind is OutputKind.BUFFER_MUTATION and value.type.dtype.is_floating:
                updates[str(spec.target)] = self._read_too(str(spec.target), value)
        if not outputs:
            raise ModelError(
                "the model returns no tensor", "At least one output tensor", "Return the logits or the loss"
            )
        return self.k.builder.graph(name_outputs(outputs), dict(sorted(updates.items())))

    def _read_too(self, target: str, value: Node) -> Node:
        """A buffer's new value; of one that nothing reads (a spectral norm's ``_u``) chosen before what it was."""
        specs = self.program.graph_signature.input_specs
        spec = next(spec for spec in specs if spec.target == target)
        place = next(node for node in self.program.graph.nodes if node.name == spec.arg.name)
        if place in self.values:
            return value
        before = self._placeholder(place, spec)
        assert isinstance(before, Node), "buffers are real"
        return self.k.apply("where", masks.fill(self.k, 1, value.type.shape, DType.BOOL), value, before)

    def _placeholder(self, node: torch.fx.Node, spec: InputSpec) -> Node | Complex:
        if is_complex(node) and spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR) and not spec.persistent:
            return self._known_complex(self._store(spec), str(spec.target))
        check_real(node, node.name if spec.kind is InputKind.USER_INPUT else str(spec.target))
        tensor = _tensor_type(node)
        if spec.kind is InputKind.USER_INPUT:
            name = self.arguments[node.name]
            while name in self.program.state_dict:  # one name is one value
                name += "_input"
            return self.k.builder.input(name, tensor)
        source = str(spec.target)
        stored = self._store(spec)
        is_param = spec.kind is InputKind.PARAMETER
        is_state = spec.kind is InputKind.BUFFER and bool(spec.persistent) and tensor.dtype.is_floating
        if not (is_param or is_state or stored.is_meta):
            return self.k.const(_to_numpy(stored, source), tensor.dtype)
        name = self.canonical_names.setdefault(memory_of(stored), source)
        self.loaders.setdefault(name, partial(_to_numpy, stored, name))
        return self.k.builder.param(name, tensor, trainable=is_param and stored.requires_grad)

    def _known_complex(self, tensor: torch.Tensor, name: str) -> Complex:
        return Complex(self.k.const(_to_numpy(torch.view_as_real(tensor.resolve_conj()), name)))

    def _store(self, spec: InputSpec) -> torch.Tensor:
        name = str(spec.target)
        table = self.program.state_dict if name in self.program.state_dict else self.program.constants
        if not isinstance(table.get(name), torch.Tensor):
            raise ModelError(f"{name!r} ({spec.kind.name.lower()}) is not a tensor of the exported program")
        return cast(torch.Tensor, table[name])

    def _call(self, node: torch.fx.Node) -> Value:
        if node.target is operator.getitem:
            return self._element(cast(torch.fx.Node, node.args[0]), cast(int, node.args[1]))
        target = str(node.target)
        handler = HANDLERS.get(target)
        if _has_no_elements(node):
            return EMPTY
        try:
            if any(self.values.get(x) is None for x in node.all_input_nodes):
                return None  # below something unsupported, which is reported already
            if self._writes_nothing(node):
                return self.values[cast(torch.fx.Node, node.args[0])]
            known = self._is_known(node)
            if not known and (is_complex(node) or any(self._is_other(x) for x in node.all_input_nodes)):
                return self._of_others(node, handler)
            if known and (handler is None or not is_floating(node)):
                return self._evaluate(node)
            if handler is None:
                raise Unsupported("")
            args, kwargs = _map_operands(node, lambda x: self._read(x, node))
            if any(self.values[x] is EMPTY for x in node.all_input_nodes):
                args = _without_empty(node, args)
            if node.target in DETACHES and node in self.returned and args[0].needs_grad:
                return self.k.apply("detach", args[0])
            made = self._handle(node, handler, args, kwargs)
            return self._evaluate(node) if self._is_known(node) and not _is_constant(made) else made
        except Unsupported as reason:
            return self._as_it_is(node, str(reason))
        except ShapeError as error:
            raise ModelError(f"{target} at {where_of(node)}: {error.what}", error.allowed, error.mend) from error

    def _handle(self, node: torch.fx.Node, handler: Handler, args: Any, kwargs: Any) -> Any:  # Any: operands
        """What a reader makes of operands; functions of floats (``sin``) take integers as such."""
        made = handler(self.k, *args, **kwargs)
        if not (isinstance(made, Node) and is_floating(node) and not made.type.dtype.is_floating):
            return made
        dtype = _dtype(node.meta["val"].dtype, node.name)
        return handler(self.k, *(self.k.cast(x, dtype) if isinstance(x, Node) else x for x in args), **kwargs)

    def _writes_nothing(self, node: torch.fx.Node) -> bool:
        """Whether a call overwrites, or adds to, parts of its first operand by what has no elements."""
        name = node.target._schema.name if isinstance(node.target, OpOverload) else ""  # noqa: SLF001  # no public name
        read = [self.values[x] for x in node.all_input_nodes]
        return name.removeprefix("aten::") in _WRITERS and EMPTY in read[1:] and read[0] is not EMPTY

    def _is_other(self, x: torch.fx.Node) -> bool:
        return isinstance(self.values[x], Chosen | Places | Complex)

    def _of_others(self, node: torch.fx.Node, handler: Handler | None) -> Value:
        """Where rows that a mask chose, or complex numbers, are operands or the result."""
        try:
            args, kwargs = _map_operands(node, lambda x: self._read(x, node))
            rows = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Chosen | Places)]
            trained = any(isinstance(x, Chosen) and x.rows.needs_grad for x in rows)
            if node.target in DETACHES and node in self.returned and trained:
                raise Unsupported("a value whose gradient is stopped, by detach or no_grad")
            if rows:
                return of_chosen(self.k, node.target, handler, args, kwargs)
            return of_complex(self.k, node.target, args, kwargs)
        except Unsupported as reason:
            self._refuse(node, str(reason))
            return None

    def _refuse(self, node: torch.fx.Node, reason: str) -> None:
        self.unsupported[f"{node.target} at {where_of(node)}" + (f" ({reason})" if reason else "")] = None

    def _as_it_is(self, node: torch.fx.Node, reason: str) -> Value:
        """An operator that the IR cannot say, run by torch on whole operands; None if that cannot be, either."""
        if not isinstance(node.target, OpOverload):
            self._refuse(node, reason)
            return None
        try:
            args, kwargs = _map_operands(node, lambda x: self._read(x, None))
            made = cast(Value, opaque(self.k, node.target, args, kwargs))
        except Unsupported as why:
            self._refuse(node, "; ".join(text for text in (reason, str(why)) if text))
            return None
        self.opaque[f"{node.target} at {where_of(node)}" + (f" ({reason})" if reason else "")] = None
        return made

    def _read(self, x: torch.fx.Node, reader: torch.fx.Node | None) -> Value:
        """A value that is read; the k largest elements are opaque where more is asked of them than to be put back."""
        value = self.values[x]
        if isinstance(value, TopK) and str(reader and reader.target) != "aten.scatter.src":
            whole, place = cast("tuple[torch.fx.Node, int]", x.args)
            both = self._as_it_is(whole, ONLY_SCATTER)
            self.values[x] = value = both[place] if isinstance(both, tuple) else None
        return value

    def _element(self, whole: torch.fx.Node, index: int) -> Value:
        value = self.values[whole]
        if not isinstance(value, tuple):
            return None
        if value[index] is None:  # of what a reader makes its first result of alone
            self.values[whole] = value = self._as_it_is(whole, f"output {index}")
        return value[index] if isinstance(value, tuple) else None

    def _is_known(self, node: torch.fx.Node) -> bool:
        """True if the value depends on constants only, and is the same each time."""
        if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
            return False
        return all(_is_constant(self.values[x]) for x in node.all_input_nodes)

    def _evaluate(self, node: torch.fx.Node) -> Value:
        """Run an operator over constants in torch.

        Raises:
            Unsupported: if torch, when it exported the model, could not say of what shape the result is.
        """
        for value in tensors(node.meta["val"]):
            if any(isinstance(size, torch.SymInt) for size in value.shape):
                raise Unsupported("")  # the program goes on with a size that is no number
            check_foldable_size(tuple(value.shape), value.element_size(), node.name)
        args, kwargs = _map_operands(node, lambda x: _as_torch(self.values[x]))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "cpu"}
        result = cast(Callable[..., Any], node.target)(*args, **kwargs)
        if is_complex(node):
            return self._known_complex(result, node.name)
        nodes = [self.k.const(_to_numpy(x, node.name)) for x in tensors(result)]
        return nodes[0] if isinstance(result, torch.Tensor) else tuple(nodes)


def _map_operands(
    node: torch.fx.Node, value_of: Callable[[torch.fx.Node], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # Any: operators take tensors, numbers, lists of either, types, …
    """The node's arguments with every fx node in them, however deep, replaced by its value."""
    mapped: Any = torch.fx.node.map_arg(cast(Any, (node.args, node.kwargs)), value_of)
    args, kwargs = mapped
    return tuple(args), dict(kwargs)


def name_outputs(outputs: list[Node]) -> dict[str, Node]:
    """Outputs by position: the two frontends know different names for them."""
    return {"output" if len(outputs) == 1 else f"output_{i}": node for i, node in enumerate(outputs)}


def _tensor_type(node: torch.fx.Node) -> TensorType:
    fake = node.meta["val"]
    if not all(isinstance(size, int) for size in fake.shape):
        raise ModelError(
            f"input {node.name!r} has dynamic shape {list(fake.shape)}",
            "Only static shapes can be planned",
            "Export without dynamic_shapes, at the batch size that you train with",
        )
    if 0 in fake.shape:
        raise ModelError(f"{node.name!r} has shape {list(fake.shape)}", "Every dim is at least 1")
    return TensorType(tuple(fake.shape), _dtype(fake.dtype, node.name))


def _dtype(dtype: torch.dtype, where: str) -> DType:
    name = str(dtype).removeprefix("torch.")
    try:
        return DType.from_name(name)
    except KeyError:
        allowed = ", ".join(sorted(x.torch_name for x in DType))
        raise ModelError(f"{where!r} has element type {name}", f"Allowed: {allowed}") from None


def _has_no_elements(node: torch.fx.Node) -> bool:
    """True of a tensor of size zero, such as the part of a head that is not rotated: joined, it is nothing."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(type(size) is int and size == 0 for size in value.shape)


def _is_constant(value: Value) -> bool:
    nodes = value if isinstance(value, tuple) else (value.parts if isinstance(value, Complex) else value,)
    return all(isinstance(node, Node) and node.is_const for node in nodes)


def _as_torch(value: Value) -> Any:
    if isinstance(value, tuple):
        return tuple(_as_torch(element) for element in value)
    if isinstance(value, Complex):
        return torch.view_as_complex(_as_torch(value.parts))
    assert isinstance(value, Node), value
    tensor = torch.from_numpy(value.attr("value").array.copy())
    return tensor.to(getattr(torch, value.type.dtype.torch_name))


def _to_numpy(tensor: torch.Tensor, name: str) -> Array:
    """The values of a tensor; bfloat16 as `ml_dtypes.bfloat16`."""
    if tensor.is_meta:
        raise ModelError(f"{name!r} is on the meta device and has no values", "", "Give the model real weights first")
    tensor = tensor.detach().cpu().contiguous()
    array: Array = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return array.view(np.dtype(ml_dtypes.bfloat16))
    return array


def _without_empty(node: torch.fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands of a call, without those that have no elements.

    Raises:
        Unsupported: of others than what joins them.
    """
    if node.target is not torch.ops.aten.cat.default:
        raise Unsupported("an operand without elements")
    return ([x for x in args[0] if x is not EMPTY], *args[1:])
