"""Lower an ONNX model to the IR.

Decides which initializers are parameters, buffers or constants, binds the dynamic batch dim, and which values can be
computed now. What an operator becomes is said in `onnx_ops`. Entry point: `load_onnx`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir

from ir.dims import Shape
from ir.errors import ModelError, ShapeError, UnsupportedOperatorsError
from ir.graph import Graph, Node
from ir.types import DType, TensorType
from ir.views import trained_sources_of
from pdv.frontend.checkpoint import read_checkpoint
from pdv.frontend.chosen import Chosen
from pdv.frontend.lowering import Lowering, Unsupported
from pdv.frontend.onnx.bodies import body_of
from pdv.frontend.onnx.call import (
    Attributes,
    Call,
    Chance,
    Handler,
    NeedsValueError,
    Operands,
    Places,
    Uniform,
    Value,
    as_tensor,
    inputs_of,
)
from pdv.frontend.onnx.exported import KIND, mend, stored_of
from pdv.frontend.onnx.file import MALFORMED, quietly, read_onnx, refusing
from pdv.frontend.onnx.operators import handler_of, is_standard, title_of
from pdv.frontend.onnx.origins.doubts import doubts, untrained
from pdv.frontend.onnx.origins.kinds import kind_by_use
from pdv.frontend.onnx.origins.related import related
from pdv.frontend.onnx.origins.signature import Signature
from pdv.frontend.onnx.origins.sines import tables_of_sines
from pdv.frontend.onnx.origins.unnamed import is_of_torch
from pdv.frontend.onnx.proto import MOST_OPERATORS, check_count
from pdv.frontend.onnx.readers.draws import of_drawn, of_noise
from pdv.frontend.onnx.readers.rows import of_rows
from pdv.frontend.onnx.reference import can_evaluate, evaluate
from pdv.frontend.onnx.rows import Cut, shapes_at, with_rows
from pdv.frontend.onnx.schema import NEWEST_OPSET, OpSchema, check_form, check_types, defaults_of, dtype_of, schema_of
from pdv.frontend.onnx.sizes import OnnxSizes, known_inputs
from pdv.frontend.onnx.subgraphs import branch_of, compared, may_be_sizes, scan, unroll
from pdv.frontend.program import Array, Dims, FewRows, Program, Weights

PERSISTENT = "pkg.torch.export.graph_signature.InputSpec.persistent"
MIN_OPSET = 7  # before it, operands are broadcast by attributes


def load_onnx(
    path: Path, *, batch: int | None = None, dims: Dims | None = None, checkpoint: Path | None = None
) -> Program:
    """The model's graph (not yet canonical) and its weights, read lazily.

    batch: the size of the dynamic dim 0 of the model's inputs; dims: that of the others, by name, and the values of
    inputs that are known; checkpoint: of the module that was exported, by which is known what was computed beforehand.

    Raises:
        ModelError: if the file or the model in it is broken, or a dim is dynamic without a size.
        UnsupportedOperatorsError: naming every operator that has no declaration.
    """
    model = read_onnx(path)
    known = known_inputs(model, dims or {})
    sizes = {name: size for name, size in (dims or {}).items() if name not in known and isinstance(size, int)}
    own = {} if checkpoint is None else {name: entry.load for name, entry in read_checkpoint(checkpoint).items()}
    with refusing(path):
        asked, mended = [*doubts(model)], mend(model, own)
    lowering = _ModelLowering(model, path, OnnxSizes(path, batch, sizes), known)
    program, stored, notes = lowering.run(), partial(stored_of, mended), tuple(mended.notes)
    lowering.sizes.check_used()
    program = replace(
        program, untold=mended.untold, notes=notes, doubts=(*asked, *mended.doubts), as_stored=stored,
        left_out=frozenset([*mended.shared, *(name for name, place in mended.merged.items() if place is None)]),
        absent=(*mended.absent, *related(model.graph)), held=tuple(mended.held), drawn=lowering.k.drawn, known=known,
        **untrained(model), sines=tables_of_sines(model.graph, trained_sources_of(program.graph)),
    )  # fmt: skip

    def over(rows: int) -> FewRows | None:
        cut = shapes_at(program.graph, lowering.values, rows)
        return None if cut is None else FewRows(read(cut), onnx_ir.to_proto(with_rows(path, cut)), cut.constants)

    def read(cut: Cut) -> Graph:
        mend(other := with_rows(path, cut), own)
        return _ModelLowering(other, path, lowering.sizes, known).run().graph

    if not lowering.sizes.found or not program.graph.inputs:
        return replace(program, over_rows=over)

    def again(shapes: Mapping[str, Shape]) -> Graph:
        other = read_onnx(path)
        mend(other, own)
        reading = _ModelLowering(other, path, lowering.sizes.at(shapes), known)
        found = reading.run().graph
        others = {node.attr("source") for node in found.params} - {*program.weights.names}
        if others or reading.decisions != lowering.decisions:
            raise ModelError(f"{path} decides by its sizes what it computes", "The same at all sizes")
        return found

    return replace(program, again=again, sizes=lowering.sizes.open_sizes())


_WITH_GRAPHS = {"If": branch_of, "Loop": unroll, "Scan": scan}


class _ModelLowering:
    """The state of one lowering: ONNX value -> IR value, and what was found unsupported on the way."""

    def __init__(self, model: onnx_ir.Model, path: Path, sizes: OnnxSizes, known: Mapping[str, Array]) -> None:
        self.model = model
        self.path = path
        self.sizes = sizes
        self.known = known
        self.signature = Signature.of(model.graph)
        self.of_torch = is_of_torch(model)
        self.asked: dict[str, None] = {}  # inputs whose values readers would have to know
        self.k = Lowering()
        self.opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
        self.values: dict[onnx_ir.Value, Value | None] = {}  # None: below something unsupported, which is reported
        self.unsupported: dict[str, None] = {}
        self.loaders: dict[str, Any] = {}
        self.decisions: list[tuple[list[Any], ...]] = []  # of sizes, by numbers
        self.lowered = 0  # operators, those of loops each time
        self.k.stored = self.loaders
        self.k.trains = True  # a file does not say whether its module draws in evaluation, too

    @quietly()
    def run(self) -> Program:
        if not MIN_OPSET <= self.opset <= NEWEST_OPSET:
            raise ModelError(
                f"{self.path} uses opset {self.opset}",
                f"Opset {MIN_OPSET} to {NEWEST_OPSET}, the newest that the installed onnx knows",
                "Export or convert it to opset 23",
            )
        graph = self.model.graph
        for value in graph.inputs:
            if value.name and value.name in self.known:
                self.values[value] = self.k.const(self.known[value.name], self._dtype(value))
        inputs = [value for value in graph.inputs if not value.is_initializer() and value not in self.values]
        for value, shape in zip(inputs, self.sizes.shapes(inputs), strict=True):
            self.values[value] = self.k.builder.input(value.name or "", TensorType(shape, self._dtype(value)))
        for value in graph.initializers.values():
            if value.uses() or value.is_graph_output():
                self.values[value] = self._initializer(value)
        for node in graph:
            self._node(node)
        if self.unsupported:
            options = " ".join(f"--dim {name}=..." for name in self.asked)
            way = f"Say the values of inputs that shapes and axes are taken from: {options}" if options else ""
            raise UnsupportedOperatorsError(tuple(self.unsupported), mend=way, inputs=tuple(self.asked))
        found = self._graph()
        read = {param.attr("source") for param in found.params}  # others are scales and the like, which are known
        loaders = {name: loader for name, loader in self.loaders.items() if name in read}
        return Program(found, Weights(loaders), opaque=tuple(self.k.foreign))

    def _graph(self) -> Graph:
        found = [self._read(value, "the graph's output") for value in self.model.graph.outputs]
        try:
            outputs = [as_tensor(self.k, value) for value in found]
        except Unsupported as why:
            raise ModelError(
                f"{self.path} returns a value {why}",
                "Outputs whose shapes do not depend on values",
                "Return their sum or mean, or all rows beside the mask",
            ) from None
        if any(isinstance(node, Node) and not node.type.num_elements for node in outputs):
            raise ModelError(f"{self.path} returns a tensor without elements", "At least one element")
        if not outputs or not all(isinstance(node, Node) for node in outputs):
            raise ModelError(f"{self.path} returns no tensor", "At least one output, all of them tensors")
        names = ["output"] if len(outputs) == 1 else [f"output_{i}" for i in range(len(outputs))]
        nodes = {name: node for name, node in zip(names, outputs, strict=True) if isinstance(node, Node)}
        for value, node in zip(self.model.graph.outputs, nodes.values(), strict=True):
            self._check_declared(value, node)
        return self.k.builder.graph(nodes, dict(sorted(self.k.updates.items())))

    def _check_declared(self, value: onnx_ir.Value, node: Node) -> None:
        """Raises ModelError if an output is of another type than the file says; open sizes may be any."""
        declared = list(node.type.shape) if value.shape is None else list(value.shape)
        sizes = [n if isinstance(n, int) else None for n in declared]
        same = len(sizes) == node.type.rank and all(n in (None, m) for n, m in zip(sizes, node.type.shape, strict=True))
        dtype = node.type.dtype if value.dtype is None else self._dtype(value)
        if not same or dtype is not node.type.dtype:
            stated = ", ".join("?" if n is None else str(n) for n in sizes)
            raise ModelError(
                f"output {value.name!r} is declared as {dtype.torch_name} of shape [{stated}], and computed as "
                f"{node.type.dtype.torch_name} of shape {list(node.type.shape)}",
                "Outputs as they are declared",
                "Export it again",
            )

    def _dtype(self, value: onnx_ir.Value) -> DType:
        assert value.dtype is not None, value
        try:
            return dtype_of(value.dtype.value)
        except Unsupported as reason:
            allowed = ", ".join(sorted(x.torch_name for x in DType))
            raise ModelError(f"{value.name!r} has {reason}", f"Allowed: {allowed}") from None

    def _initializer(self, value: onnx_ir.Value) -> Node:
        """A parameter, a buffer, or a constant.

        torch says which; else ``kind_by_use`` does.
        """
        tensor, name = value.const_value, value.name or ""
        assert tensor is not None, "read_onnx checks that initializers have values"
        kind = value.metadata_props.get(KIND) or (self.signature and self.signature.kind_of(name))
        state = value.metadata_props.get(PERSISTENT) == "True"
        state = state or (kind == "BUFFER" and KIND not in value.metadata_props)
        if kind is None:
            kind, state = kind_by_use(value, self.model.producer_name or "")
        dtype = self._dtype(value)
        self.k.name = name
        if not dtype.is_floating or not (kind == "PARAMETER" or state) or 0 in tensor.shape:
            return self.k.const(tensor.numpy(), dtype)
        self.loaders[name] = partial(_read_tensor, tensor)
        shape = tuple(tensor.shape.numpy())
        return self.k.builder.param(name, TensorType(shape, dtype), trainable=kind == "PARAMETER")

    def _read(self, value: onnx_ir.Value, reader: str) -> Value | None:
        if value not in self.values:
            raise ModelError(f"{reader} reads {value.name!r}, which nothing defines", "", "Export it again")
        return self.values[value]

    def _node(self, node: onnx_ir.Node) -> None:
        if not node.outputs:
            return
        self.lowered += 1
        if self.lowered > MOST_OPERATORS:  # loops are written out
            check_count(self.lowered)
        where = f"node {node.name!r}" if node.name else f"the node giving {node.outputs[0].name!r}"
        operands = tuple(None if x is None else self._read(x, where) for x in node.inputs)
        blocked = any(x is not None and value is None for x, value in zip(node.inputs, operands, strict=True))
        title = title_of(node)
        results: tuple[Value | None, ...] = ()
        try:
            if not blocked:
                self.k.name = node.outputs[0].name or ""
                results = self._lower(node, operands)
            elif handler_of(node) is None:
                raise Unsupported("")  # list it too, though it is below another one
        except Unsupported as reason:
            if isinstance(reason, NeedsValueError):
                self.asked |= dict.fromkeys(inputs_of(reason.operand))
            elif all(each is None or (isinstance(each, Node) and may_be_sizes(each)) for each in operands):
                self.asked |= {name: None for each in operands if isinstance(each, Node) for name in inputs_of(each)}
            self.unsupported[f"{title} at {where}" + (f" ({reason})" if str(reason) else "")] = None
            blocked = True
        except ShapeError as error:
            raise ModelError(f"{title} at {where}: {error.what}", error.allowed, error.mend) from error
        except MALFORMED as error:
            what = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise ModelError(f"{title} at {where} is malformed: {what}", "", "Export it again") from error
        for index, output in enumerate(node.outputs):
            self.values[output] = results[index] if index < len(results) else None
            if self.values[output] is None and not blocked and (output.uses() or output.is_graph_output()):
                self.unsupported[f"{title} at {where} (output {index})"] = None

    def _lower(self, node: onnx_ir.Node, operands: tuple[Value | None, ...]) -> tuple[Value | None, ...]:
        handler = handler_of(node)
        if not is_standard(node):
            if handler is None:
                raise Unsupported("pdv.register_operator(..., onnx=...) says what it is in torch")
            given = Attributes({name: attr.value for name, attr in node.attributes.items()}, {})
            names = [(each and each.name) or "" for each in node.inputs]
            call = Call(self.k, Operands(operands), given, self.opset, False, names, node)
            found = handler(call)
            call.check_all_read()
            return found if isinstance(found, tuple) else (found,)
        schema = schema_of(node.op_type, self.opset)
        check_form(schema, node)
        types = [value.type.dtype if isinstance(value, Node) else None for value in operands]
        check_types(schema, types)
        known = can_evaluate(node) and all(_is_known(value) for value in operands)
        self.decisions += compared(self.k, node.op_type, operands) if known else []
        try:
            if node.op_type in _WITH_GRAPHS:
                whole = tuple(as_tensor(self.k, value) for value in operands)
                return _WITH_GRAPHS[node.op_type](self.k, node, whole, self._run)
            if handler is None:
                raise Unsupported("")
            call = self._call(schema, node, operands)
            result = _made(call, operands, handler)
            call.check_all_read()
            results = result if isinstance(result, tuple) else (result,)
            check_types(schema, types, [value.type.dtype if isinstance(value, Node) else None for value in results])
            if known and _may_be_known(operands, results):
                with contextlib.suppress(Exception):  # the reference implementation raises anything
                    return self._evaluated(node, operands)
            return results
        except Unsupported as reason:
            if not known and not isinstance(reason, NeedsValueError) and node.op_type not in _WITH_GRAPHS:
                made = self._by_its_body(schema, node, operands)
                if made is not None:
                    return made
            if not known:
                raise
        return self._evaluated(node, operands)

    def _evaluated(self, node: onnx_ir.Node, operands: Sequence[Value | None]) -> tuple[Value | None, ...]:
        """The results on known operands, by ONNX's reference implementation."""
        arrays = [self.k.value(value) if isinstance(value, Node) else None for value in operands]
        return tuple(self.k.const(array) for array in evaluate(node, arrays, self.opset, of_torch=self.of_torch))

    def _by_its_body(
        self, schema: OpSchema, node: onnx_ir.Node, operands: Sequence[Value | None]
    ) -> tuple[Value | None, ...] | None:
        """What a node's function gives, as ONNX defines it in smaller operators; None if it has no body.

        Raises:
            Unsupported: saying what of the body is not supported.
        """
        types = [value.type if isinstance(value, Node) else None for value in operands]
        if any(value is not None and not isinstance(value, Node) for value in operands):
            return None
        found = body_of(schema, node, types, self.opset)
        if found is None:
            return None
        before, self.opset = self.opset, found[1]
        try:
            results = self._run(found[0], [value for value in operands if value is not None])
            made = dict(zip(found[2], results, strict=True))
            return tuple(made.get(i) for i in range(len(node.outputs)))
        finally:
            self.opset = before

    def _run(self, graph: onnx_ir.Graph, operands: Sequence[Value | None]) -> tuple[Value | None, ...]:
        """A graph within a node, on these operands.

        Raises:
            Unsupported: naming what in it is.
        """
        outside, self.unsupported = self.unsupported, {}
        try:
            self.values |= dict(zip(graph.inputs, operands, strict=True))
            for value in graph.initializers.values():
                self.values[value] = self._initializer(value)
            for inner in graph:
                self._node(inner)
            if self.unsupported:
                raise Unsupported(
                    "by " + ", ".join(dict.fromkeys(text.partition(" at ")[0] for text in self.unsupported))
                )
        finally:
            self.unsupported = outside
        return tuple(self._read(value, "a graph's output") for value in graph.outputs)

    def _call(self, schema: OpSchema, node: onnx_ir.Node, operands: Sequence[Value | None]) -> Call:
        attrs = Attributes({name: attr.value for name, attr in node.attributes.items()}, defaults_of(schema))
        names = [each.name for each in schema.inputs]
        return Call(self.k, Operands(operands), attrs, self.opset, self.of_torch, names, node)


def _made(call: Call, operands: Sequence[Value | None], handler: Handler) -> Any:  # Any: as handlers give it
    """What a node becomes: by its handler, but of rows that a mask chose and of random numbers."""
    if any(isinstance(value, Places | Chosen) for value in operands):
        return of_rows(call, call.node.op_type, handler)
    drawn = any(isinstance(value, Uniform | Chance) for value in operands)
    found = of_drawn(call, call.node.op_type) if drawn else None
    return handler(of_noise(call) if drawn else call) if found is None else found


def _is_known(value: Value | None) -> bool:
    return value is None or (isinstance(value, Node) and value.is_const)


def _may_be_known(operands: Sequence[Value | None], results: Sequence[Value | None]) -> bool:
    """Whether results of known operands are not known yet, and could be; what is half is rounded as the model does."""
    tensors = [value for value in (*operands, *results) if isinstance(value, Node)]
    plain = all(value is None or isinstance(value, Node) for value in results)
    halves = any(value.type.dtype.is_half for value in tensors)
    return plain and not halves and not all(map(_is_known, results))


def _read_tensor(tensor: onnx_ir.TensorProtocol) -> Array:
    array: Array = tensor.numpy()
    return array
