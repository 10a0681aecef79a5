"""What ONNX Runtime, or onnx's reference implementation, makes of an ONNX file.

Entry points: ``JUDGES``, ``run_file``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from ir.errors import first_line
from pdv.check.file.noise import steady_nodes
from pdv.frontend.lowering import Drawn
from pdv.frontend.onnx.inner import lift
from pdv.frontend.onnx.origins.doubts import OURS
from pdv.frontend.onnx.origins.left_out import LOSS, smoothing_of

MOST_SLOWLY = 1 << 27  # products that the reference implementation may take: it has loops in Python

SLOW = "onnx's reference implementation"
JUDGES = ("ONNX Runtime", SLOW)
"""Who runs files. They differ in places; a reading is right if it is what one of them makes of the file."""

Array = np.ndarray[Any, Any]  # Any: floats, integers and booleans


class CannotRunError(Exception):
    """Neither of them runs the file; the message says why."""


def run_file(
    judge: str,
    path: Path,
    inputs: Mapping[str, Array],
    stored: Mapping[str, Array],
    points: int,
    model: onnx.ModelProto | None = None,
    drawn: Mapping[str, float | bool | Drawn] = MappingProxyType({}),
) -> list[Array]:
    """The outputs of a file on these inputs, with these values in place of stored ones.

    judge: of ``JUDGES``; points: the products that it takes; model: what is run in place of the file, whose tensors it
    has; drawn: what of it is drawn at random, and the number or steady noise that takes its place.

    Raises:
        CannotRunError: if that one does not run it.
    """
    read = lift(onnx.load(path, load_external_data=False)) if model is None else onnx.ModelProto()
    if model is not None:
        read.CopyFrom(model)
    _without_chance(read, drawn)
    if all(each.key != OURS for each in read.metadata_props):
        _smooth_labels(read.graph)
    given = {name: np.asarray(x) for name, x in {**inputs, **stored}.items()}  # a number of no dims is no array
    return _run(with_inputs(read, stored), path, given, points, (judge,))


def _without_chance(proto: onnx.ModelProto, drawn: Mapping[str, float | bool | Drawn]) -> None:
    """Put a number throughout in place of what is drawn at random, or steady noise: of its shape and type.

    Raises:
        CannotRunError: if something is drawn elsewhere than in the file's own graph.
    """
    if inside := sorted({*drawn} - {name for node in proto.graph.node for name in node.output}):
        raise CannotRunError(f"it draws {inside[0]!r} at random inside of another graph")
    for at, node in reversed(list(enumerate(proto.graph.node))):
        number = drawn.get(node.output[0]) if node.output else None
        if number is None:
            continue
        name = node.output[0]
        node.output[0] = f"{name} drawn"
        if isinstance(number, Drawn):
            for following in reversed(list(steady_nodes(node, number))):
                proto.graph.node.insert(at + 1, following)
            continue
        zero = helper.make_node("Sub", [node.output[0]] * 2, [f"{name} zero"])
        made = [zero, *_shifted(name, number)]
        if isinstance(number, bool):
            made = [helper.make_node("Equal", [node.output[0]] * 2, [name])]
        for following in reversed(made):
            proto.graph.node.insert(at + 1, following)


def _smooth_labels(graph: onnx.GraphProto) -> None:
    """Add to losses the smoothing that torch's exporter says and leaves out: a share of the mean over all classes.

    Classes have no weights; labels that do not count have none of it.
    """
    for at, node in reversed(list(enumerate(graph.node))):
        share = smoothing_of({each.key: each.value for each in node.metadata_props}) if node.op_type == LOSS else 0.0
        said = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        if share and "ignore_index" in said and (len(node.input) < 3 or not node.input[2]):
            made = list(_smoothed(node, share, said["ignore_index"], said.get("reduction", b"mean").decode()))
            del graph.node[at]
            for each in reversed(made):
                graph.node.insert(at, each)


def _smoothed(node: onnx.NodeProto, share: float, ignored: int, reduction: str) -> Iterator[onnx.NodeProto]:
    (logits, labels, *_), (loss, *_) = node.input, node.output

    def make(op: str, operands: Sequence[str], *results: str, **attributes: Any) -> onnx.NodeProto:
        """Names of results, and of operands that begin with a dot, are the node's own."""
        own = [f"{loss}{name}" if name.startswith(".") else name for name in operands]
        return helper.make_node(op, own, [f"{loss}{name}" for name in results], **attributes)

    yield make(LOSS, [logits, labels], ".each", ".logs", reduction="none", ignore_index=ignored)
    for name, number in ((".share", share), (".rest", 1 - share), (".zero", 0.0)):
        yield make("Constant", [], f"{name} float", value_float=number)
        yield make("CastLike", [f"{name} float", ".each"], name)
    yield make("Constant", [], ".axes", value_ints=[1])
    yield make("ReduceMean", [".logs", ".axes"], ".mean", keepdims=0)
    yield make("Neg", [".mean"], ".all")
    yield make("Constant", [], ".ignored long", value_int=ignored)
    yield make("CastLike", [".ignored long", labels], ".ignored")
    yield make("Equal", [labels, ".ignored"], ".out")
    yield make("Where", [".out", ".zero", ".all"], ".counted")
    yield make("Mul", [".each", ".rest"], ".own")
    yield make("Mul", [".counted", ".share"], ".others")
    if reduction == "none":
        yield make("Add", [".own", ".others"], "")
        return
    yield make("Add", [".own", ".others"], ".losses")
    yield make("ReduceSum", [".losses"], ".sum" if reduction == "mean" else "", keepdims=0)
    if reduction == "mean":
        yield make("Not", [".out"], ".in")
        yield make("CastLike", [".in", ".each"], ".ones")
        yield make("ReduceSum", [".ones"], ".count", keepdims=0)
        yield make("Div", [".sum", ".count"], "")


def _shifted(name: str, number: float) -> list[onnx.NodeProto]:
    """What is zero, and a number."""
    constant = helper.make_node("Constant", [], [f"{name} number"], value_float=number)
    alike = helper.make_node("CastLike", [f"{name} number", f"{name} zero"], [f"{name} alike"])
    return [constant, alike, helper.make_node("Add", [f"{name} zero", f"{name} alike"], [name])]


def run_constants(path: Path, names: Sequence[str]) -> list[Array]:
    """Values of a file that do not depend on its inputs, by their names.

    Raises:
        CannotRunError: if nothing runs it.
    """
    proto = lift(onnx.load(path, load_external_data=False))
    graph = proto.graph
    needed, nodes = set(names), []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            nodes.append(node)
    stored = [tensor for tensor in graph.initializer if tensor.name in needed]
    outputs = [onnx.ValueInfoProto(name=name) for name in names]
    del graph.node[:], graph.input[:], graph.output[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(reversed(nodes))
    graph.initializer.extend(stored)
    graph.output.extend(outputs)
    return _run(proto, path, {}, 0, JUDGES)


def _run(
    proto: onnx.ModelProto, path: Path, given: Mapping[str, Array], points: int, judges: Sequence[str]
) -> list[Array]:
    """Outputs, by the first that can; stored tensors that are no inputs lie beside ``path``.

    Raises:
        CannotRunError: if none of the judges runs it.
    """
    for tensor in onnx.external_data_helper._get_all_tensors(proto):  # noqa: SLF001  # what is left of them is small
        if onnx.external_data_helper.uses_external_data(tensor):
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(path.parent))
    for node in proto.graph.node:
        if node.op_type == "Dropout" and len(node.input) > 2:
            del node.input[2:]  # without it nothing is dropped
    failures: list[str] = []
    for name in judges:
        if name == SLOW and points > MOST_SLOWLY:
            failures.append(f"{name} is too slow for it")
            continue
        try:
            found = _run_slowly(proto, given) if name == SLOW else _run_fast(proto, given)
        except Exception as error:  # noqa: BLE001  # whatever they raise on what they do not know
            failures.append(f"{name}: {first_line(error)}")
            continue
        arrays = [np.asarray(x) for x in found]
        if all(_is_declared(value, x) for value, x in zip(proto.graph.output, arrays, strict=True)):
            return arrays
        failures.append(f"{name} gives outputs of other shapes than the file declares")
    raise CannotRunError("; ".join(failures))


def _is_declared(value: onnx.ValueInfoProto, x: Array) -> bool:
    """Whether an output has the shape that the file states."""
    if not value.type.tensor_type.HasField("shape"):
        return True
    dims = value.type.tensor_type.shape.dim
    sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in dims]
    return len(sizes) == x.ndim and all(size in (None, n) for size, n in zip(sizes, x.shape, strict=True))


def with_inputs(proto: onnx.ModelProto, stored: Mapping[str, Array]) -> onnx.ModelProto:
    """The model with stored tensors as inputs, whose values come with the call."""
    graph = proto.graph
    kept = [tensor for tensor in graph.initializer if tensor.name not in stored]
    moved = [tensor for tensor in graph.initializer if tensor.name in stored]
    declared = {value.name for value in graph.input}
    graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        for tensor in moved
        if tensor.name not in declared
    )
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return proto


def _run_fast(proto: onnx.ModelProto, given: Mapping[str, Array]) -> list[Any]:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError:
        raise CannotRunError("is not installed") from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(given)))


def _run_slowly(proto: onnx.ModelProto, given: Mapping[str, Array]) -> list[Any]:
    with np.errstate(all="ignore"):
        return list(ReferenceEvaluator(proto).run(None, dict(given)))
