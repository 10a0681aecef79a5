"""Parameters had back in files of torch's newer exporter whose metadata a tool left out, by the names of values.

Rows at known places, of positions or of the kinds of tokens, are folded into ``embedding_1``, as the file calls what
torch's ``embedding`` gives: a row that is there twice is one row of a table. A product from which the exporter took a
bias of zeros has another name than its result: ``node_Gemm_19`` of ``linear_4``, where a layer without a bias is
``node_linear_4``; a convolution without one has such a name, too, as has what a batch norm was folded into. Entry
point: ``have_back``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir

from pdv.frontend.onnx.origins.doubts import some_of
from pdv.frontend.onnx.origins.made import Made, write
from pdv.frontend.onnx.origins.recovered import drop_unread, register, rows_of_table
from pdv.frontend.onnx.origins.signature import Role, array_of, is_float, kind_of, missing_bias, zeros
from pdv.passes.fold_constants import Array

_LOOKUP = "embedding"
_BIASED = {"addmm", "linear"}  # of matrices
_ADDED = {*_BIASED, "add", "sub"}
# by the exporter's optimizer, which took something away, and then perhaps by ONNX Runtime's, which put two into one
_CHANGED = re.compile(r"^(fused )?node_(Gemm|Conv|ConvTranspose)_\d+$")
_CONVOLUTIONS = ("Conv", "ConvTranspose", "FusedConv")


@dataclass
class HadBack:
    """As ``exported.Mended`` has each."""

    made: dict[str, Made] = field(default_factory=dict)
    merged: dict[str, str | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


def have_back(graph: onnx_ir.Graph) -> HadBack:
    """What is known by the names of values alone; changes the graph."""
    found = HadBack()
    more = [node.name or "" for node in graph if _may_hold_more(node)]
    if biases := _biases_of_zeros(graph):
        found.merged |= dict.fromkeys(biases)
        found.notes.append(say_left_out(biases))
    if nodes := _maybe_biased(graph):
        found.doubts.append(
            f"{len(nodes)} convolutions have no bias ({some_of(nodes)}): torch's exporter leaves out those of zeros, "
            "with which training would go on"
        )
    if more:
        found.doubts.append(
            f"the file does not say what {len(more)} convolutions and products were made of ({some_of(more)}): of a "
            "batch norm, too, if the module has one there, and training would go on without it"
        )
    for name, made in _tables_of_rows(graph).items():
        found.made[name] = made
        found.merged |= dict.fromkeys(made.parameters, name)
        found.notes.append(
            f"{name} has rows of a table, which the exporter looked up beforehand: as many as differ are a parameter "
            f"here, {made.parameters[0]}"
        )
    return found


def say_left_out(names: Sequence[str]) -> str:
    """That biases are stored again."""
    return f"{len(names)} biases of zeros are left out of the file and are parameters here ({some_of(names)})"


def _tables_of_rows(graph: onnx_ir.Graph) -> dict[str, Made]:
    """Stored tensor -> how it was made of a table that is stored now, too; changes the graph.

    Not where a row is in another table as well: whether both are one, the file does not say.
    """
    found = {}
    for value in [value for value in graph.initializers.values() if _is_looked_up(value)]:
        name, array = value.name or "", array_of(value)
        table = f"{name}.weight" if f"{name}.weight" not in graph.initializers else f"rows of {name}"
        rows = rows_of_table(table, array, whole=True)
        if rows is None or any(_shares_row(array, x) for x in graph.initializers.values() if x is not value):
            continue
        found[name] = value, rows
    for name, (value, (how, own)) in found.items():
        for table, array in own.items():
            register(graph, table, array, value)
        onnx_ir.convenience.replace_all_uses_with(value, write(graph, name, how))
    drop_unread(graph, found)
    return {name: how for name, (_, (how, _)) in found.items()}


def _biases_of_zeros(graph: onnx_ir.Graph) -> list[str]:
    """Those that were left out, which are stored now; of one weight one; changes the graph."""
    found: dict[str, onnx_ir.Value] = {}
    for node in graph:
        size, weight = missing_bias(Role(node, 2, "", turned=False)), node.inputs[1] if len(node.inputs) > 1 else None
        kind = kind_of(node.outputs[0].name or "") if node.outputs else ""
        biased = node.op_type == "FusedGemm" or (node.op_type == "Gemm" and kind in _BIASED)
        if not biased or not _was_changed(node) or size is None or weight is None:
            continue
        stored = weight.name or ""
        if stored not in found:
            name = f"{stored.removesuffix('.weight')}.bias"
            name = f"{name} of {node.name}" if name in graph.initializers else name
            found[stored] = zeros(name, size, weight)
            graph.register_initializer(found[stored])
        node.resize_inputs(3)
        node.replace_input_with(2, found[stored])
    return [value.name or "" for value in found.values()]


def _maybe_biased(graph: onnx_ir.Graph) -> list[str]:
    """Convolutions of which the file does not say whether a bias of zeros was left out."""
    convolutions = (node for node in graph if node.op_type in _CONVOLUTIONS and _was_changed(node))
    return [node.name or "" for node in convolutions if len(node.inputs) < 3 or node.inputs[2] is None]


def _may_hold_more(node: onnx_ir.Node) -> bool:
    """Whether a node that was changed gives what the file does not name after a product."""
    kind = kind_of(node.outputs[0].name or "") if node.outputs else ""
    return _was_changed(node) and kind not in _ADDED and not kind.startswith("conv")


def _was_changed(node: onnx_ir.Node) -> bool:
    return _CHANGED.match(node.name or "") is not None


def _is_looked_up(value: onnx_ir.Value) -> bool:
    tensor = value.const_value
    known = bool(value.uses()) and kind_of(value.name or "") == _LOOKUP
    return known and is_float(value) and tensor is not None and tensor.shape.rank() > 1 and tensor.size > 0


def _shares_row(rows: Array, other: onnx_ir.Value) -> bool:
    """Whether a row is one of another tensor's, too; a first element that it has not tells of most."""
    tensor = other.const_value
    if tensor is None or tensor.shape.rank() < 2 or tensor.shape[-1] != rows.shape[-1]:
        return False
    if (array := array_of(other)).dtype != rows.dtype:
        return False
    own, others = (each.reshape(-1, rows.shape[-1]) for each in (rows, array))
    alike = others[np.isin(others[:, 0], own[:, 0])]
    return bool({row.tobytes() for row in alike} & {row.tobytes() for row in own})
