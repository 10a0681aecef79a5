"""The module's own parameters, as torch's newer exporter says them, and what its optimizer made of them.

A file that is exported as users do it (``optimize=True``) has a list of the module's parameters and buffers, and on
each node the operator of torch that it is of. By these, biases of zero that were left out are put back, equal tensors
that became one are parameters of their own, and transposed copies go by their parameter's name. What was computed from
parameters beforehand cannot be had back: ``absent`` names such.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import onnx_ir

from pdv.passes.fold_constants import Array

SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_ORIGINS = "pkg.onnxscript.optimizer.folded_from"  # on what the optimizer computed: the names that it computed it from
SCOPES = "pkg.torch.onnx.name_scopes"  # on nodes: the modules that a node is of
FX_NODE = "pkg.torch.onnx.fx_node"
LINES = "pkg.torch.onnx.stack_trace"  # lines of source by which a node is reached
CLASSES = "pkg.torch.onnx.class_hierarchy"  # as SCOPES, of which classes they are
NAMED = re.compile(r"^%(\w+) :")  # of FX_NODE: its own name
READ = re.compile(r"%(\w+)")  # names that it reads
NUMBER = re.compile(r"_\d+$")  # what tells a name from others of its operator
_ENTRY = re.compile(r"^(\w+): (PARAMETER|BUFFER) target='([^']*)'(.*)$", re.MULTILINE)
_CALL = re.compile(r"target=torch\.ops\.aten\.(\w+)(?:\.\w+)?\]\(args = \((.*)\), kwargs = ")

# (operator of torch, of ONNX) -> operand of the latter: argument of the former, and whether its dims are turned
_PLACES: Mapping[tuple[str, str], Mapping[int, tuple[int, bool]]] = {
    ("linear", "MatMul"): {1: (1, True)},
    ("linear", "Gemm"): {1: (1, True), 2: (2, False)},
    ("addmm", "MatMul"): {1: (2, False)},
    ("addmm", "Gemm"): {1: (2, False), 2: (0, False)},
    ("conv1d", "Conv"): {1: (1, False), 2: (2, False)},
    ("conv2d", "Conv"): {1: (1, False), 2: (2, False)},
    ("convolution", "Conv"): {1: (1, False), 2: (2, False)},
    ("layer_norm", "LayerNormalization"): {1: (2, False), 2: (3, False)},
    ("embedding", "Gather"): {0: (0, False)},
    ("index", "GatherND"): {0: (0, False)},
}
_ELSEWHERE = {  # the argument that is the one stored operand, whichever of the node it is
    ("linear", "Add"): 2, ("addmm", "Add"): 0, ("group_norm", "Mul"): 2, ("group_norm", "Add"): 3,
}  # fmt: skip


@dataclass(frozen=True)
class Role:
    """A stored tensor at a place of a node: which parameter it is there, and whether its dims are turned."""

    node: onnx_ir.Node
    place: int
    parameter: str
    turned: bool


@dataclass(frozen=True)
class Signature:
    """What a file says of the module's stored tensors.

    Attributes:
        parameters, buffers: by the names of the exported program's inputs; of buffers those that are kept.
    """

    parameters: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: onnx_ir.Graph) -> Signature | None:
        """None if the file says nothing."""
        text = graph.metadata_props.get(SIGNATURE)
        if text is None:
            return None
        found = [(match[1], match[2], match[3], match[4]) for match in _ENTRY.finditer(text)]
        return cls(
            {name: target for name, kind, target, _ in found if kind == "PARAMETER"},
            {name: target for name, kind, target, rest in found if kind == "BUFFER" and "persistent=False" not in rest},
        )

    @cached_property
    def targets(self) -> frozenset[str]:
        """The parameters' own names."""
        return frozenset(self.parameters.values())

    def kind_of(self, name: str) -> str:
        """As the exporter would say of an initializer: a parameter, a buffer, or what was computed."""
        if name in self.targets:
            return "PARAMETER"
        return "BUFFER" if name in set(self.buffers.values()) else "CONSTANT_TENSOR"

    def roles(self, graph: onnx_ir.Graph) -> Iterator[Role]:
        """Where a parameter belongs: at places that have a stored tensor, or that are empty."""
        for node in graph:
            call, given = call_of(node)
            if not call or node.domain != "":
                continue
            if call == "index" and (len(given) < 2 or not given[1].startswith("[%")):
                continue  # ids along another dim than the first, which the exporter puts in front
            for place, argument, turned in self._places(node, call, given):
                parameter = self.parameters.get(given[argument].removeprefix("%")) if argument < len(given) else None
                if parameter is not None:
                    yield Role(node, place, parameter, turned and not _is_turned(node))

    def weights_of(self, node: onnx_ir.Node) -> list[str]:
        """The parameters of a recurrent layer, in torch's order."""
        _, given = call_of(node)
        names = given[2].strip("[]").split(",") if len(given) > 2 else []
        return [self.parameters.get(name.strip().removeprefix("%"), "") for name in names]

    def mentioned(self, graph: onnx_ir.Graph) -> set[str]:
        """Parameters that some node's operator reads."""
        text = " ".join(node.metadata_props.get(FX_NODE, "") for node in graph)
        return {self.parameters[name] for name in re.findall(r"%(\w+)", text) if name in self.parameters}

    def _places(self, node: onnx_ir.Node, call: str, given: list[str]) -> Iterator[tuple[int, int, bool]]:
        known = _PLACES.get((call, node.op_type))
        if known is not None:
            for place, (argument, turned) in known.items():
                yield place, argument, turned
        elif (only := self._only_one(node, call, given)) is not None:
            yield only

    def _only_one(self, node: onnx_ir.Node, call: str, given: list[str]) -> tuple[int, int, bool] | None:
        """Of operators whose operands may change places: the one stored tensor, and the one parameter."""
        stored = [at for at, value in enumerate(node.inputs) if value is not None and value.is_initializer()]
        named = [at for at, text in enumerate(given) if text.removeprefix("%") in self.parameters]
        kind = call, node.op_type
        if len(stored) != 1 or (kind not in _ELSEWHERE and (kind not in _SAME or len(named) != 1)):
            return None
        return stored[0], _ELSEWHERE[kind] if kind in _ELSEWHERE else named[0], False


_SAME = {("add", "Add"), ("mul", "Mul"), ("sub", "Sub"), ("div", "Div")}


def call_of(node: onnx_ir.Node) -> tuple[str, list[str]]:
    """The operator of torch that a node is of, and its arguments as text; empty where the file does not say."""
    return call_in(node.metadata_props.get(FX_NODE, ""))


def call_in(text: str) -> tuple[str, list[str]]:
    """The same of what a node's metadata has under ``FX_NODE``."""
    call = _CALL.search(text)
    return (call[1], _arguments(call[2])) if call is not None else ("", [])


def missing_bias(role: Role) -> int | None:
    """How many elements a bias of zeros had that was left out of a node; None if none was."""
    node, weight = role.node, role.node.inputs[1] if len(role.node.inputs) > 1 else None
    if role.place != 2 or (len(node.inputs) > 2 and node.inputs[2] is not None):
        return None
    if weight is None or weight.shape is None or node.op_type not in ("Gemm", "FusedGemm", "Conv"):
        return None
    rows_first = node.op_type == "Conv" or _is_turned(node)
    size = weight.shape[0 if rows_first else 1]
    return size if isinstance(size, int) else None


def turned(value: onnx_ir.Value, name: str) -> onnx_ir.Value:
    """A parameter whose transposed copy a stored tensor is, under its own name."""
    tensor = value.const_value
    assert tensor is not None, value
    shape = onnx_ir.Shape(tuple(reversed(tensor.shape.numpy())))
    own = onnx_ir.LazyTensor(partial(_turn, tensor, name), dtype=tensor.dtype, shape=shape, name=name)
    return onnx_ir.Value(name=name, shape=shape, type=value.type, const_value=own)


def zeros(name: str, size: int, like: onnx_ir.Value) -> onnx_ir.Value:
    """A bias of zeros of the type of ``like``."""
    assert like.dtype is not None, like
    tensor = onnx_ir.Tensor(np.zeros(size, like.dtype.numpy()), name=name)
    return onnx_ir.Value(name=name, shape=onnx_ir.Shape((size,)), type=like.type, const_value=tensor)


def absent(signature: Signature, graph: onnx_ir.Graph) -> list[str]:
    """Parameters that the exporter computed with, so that the file has what came out in their place.

    They are what the file says that a stored tensor was computed from, be they read elsewhere or not. Where it says
    nothing, one that no operator names any more is taken for such if what a module reads has an origin that is not
    known, and the parameter is of this module or of one in it; else it is a second name of another, or was never read.
    """
    missing = signature.targets - {name for name, value in graph.initializers.items() if value.uses()}
    found = missing & signature.mentioned(graph)
    for name, value in graph.initializers.items():
        if not value.uses() or name in signature.targets:
            continue
        origins = origins_of(value)
        if origins is not None:
            found |= origins & signature.targets if is_float(value) else set()
        elif _is_computed(signature, value):
            inside = {scope for use in value.uses() for scope in [_module_of(use.node)] if scope is not None}
            near = {each for each in missing if any(map(each.startswith, inside))}
            found |= near or (missing if name.startswith("embedding") else set())
    return sorted(found)


def origins_of(value: onnx_ir.Value) -> set[str] | None:
    """Names of all that a stored tensor was computed from, on the way and at its start; None where none are said."""
    try:
        found = ast.literal_eval(value.metadata_props.get(_ORIGINS, "None"))
    except (ValueError, SyntaxError):
        return None
    return {str(name) for name in found} if isinstance(found, list) else None


def is_drawn(value: onnx_ir.Value) -> bool:
    """Whether the optimizer drew a stored tensor at random, or computed it of one that it drew, as of a constant."""
    names = origins_of(value)
    return names is not None and any(name.rstrip("_0123456789") == "bernoulli" for name in {value.name or "", *names})


def names_of(graph: onnx_ir.Graph) -> set[str]:
    """Of torch's nodes, and of values, that a file still has."""
    known = {match[1] for node in graph if (match := NAMED.match(node.metadata_props.get(FX_NODE, "")))}
    return known | {value.name for node in graph for value in node.outputs if value.name}


def is_float(value: onnx_ir.Value) -> bool:
    """True of stored floating-point numbers."""
    return value.const_value is not None and value.const_value.dtype.is_floating_point()


def array_of(value: onnx_ir.Value) -> Array:
    """A stored tensor's values."""
    assert value.const_value is not None, value
    array: Array = value.const_value.numpy()
    return array


def kind_of(name: str) -> str:
    """The operator of torch that a value is called after: ``exp`` of ``exp_1``, but ``exp2`` of itself."""
    return NUMBER.sub("", name)


def _module_of(node: onnx_ir.Node) -> str | None:
    """What the names of a node's module begin with; None where the file does not say."""
    scopes = re.findall(r"'([^']*)'", node.metadata_props.get(SCOPES, ""))
    return None if len(scopes) < 2 else f"{scopes[-2]}." if scopes[-2] else ""


def _is_computed(signature: Signature, value: onnx_ir.Value) -> bool:
    """Whether a stored tensor of floats may be made of parameters: it is no parameter, and no mask."""
    tensor = value.const_value
    if tensor is None or not tensor.dtype.is_floating_point() or tensor.size < 2:
        return False
    if signature.kind_of(value.name or "") != "CONSTANT_TENSOR":
        return False
    array = tensor.numpy()
    return len(np.unique(array[array > -1e30])) > 1


def _turn(tensor: onnx_ir.TensorProtocol, name: str) -> onnx_ir.Tensor[Array]:
    array: Array = tensor.numpy()
    return onnx_ir.Tensor(array.T, dtype=tensor.dtype, name=name)


def _is_turned(node: onnx_ir.Node) -> bool:
    """Whether a node turns the weight that it is given by itself."""
    return node.op_type in ("Gemm", "FusedGemm") and bool(node.attributes.get_int("transB", 0))


def _arguments(text: str) -> list[str]:
    """The arguments of a call, of which lists are one."""
    found, depth, last = list[str](), 0, ""
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            found.append(last.strip())
            last = ""
        else:
            last += char
    return [*found, last.strip()] if last.strip() else found
