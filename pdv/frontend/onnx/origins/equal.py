"""Equal stored tensors of files that do not say of which parameters they are: merged ones, tied ones, copies.

torch's exporters write one tensor for all that start out equal. The older one leaves an ``Identity`` by the name of
each other one, where parameters that are one have one name; tools that go over a file take it away. Entry points:
``drop_aliases``, ``says_merged``, ``first_call``, ``may_be_calls``, ``part_named``, ``equal_pairs``, ``trained_apart``,
``maybe_several``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np
import onnx_ir

from pdv.frontend.onnx.origins.doubts import some_of
from pdv.frontend.onnx.origins.signature import array_of
from pdv.frontend.onnx.origins.undone import CHANCE, is_chance
from pdv.frontend.onnx.origins.unnamed import is_computed, module_of
from pdv.passes.fold_constants import Array

_SAMPLE = 4096  # elements of a tensor that tell whether its values are chance
_LEAST = 64  # elements of a tensor, below which all of them tell whether its values are chance
_MOST_SAID = 3
_AGAIN = re.compile(r"(\.\d+)_\d+$")

Pair = tuple[onnx_ir.Value, onnx_ir.Value, tuple[int, ...]]
"""Two equal tensors, and the order of the dims of the first in which it is the second."""


def says_merged(graph: onnx_ir.Graph) -> bool:
    """Whether a file says what the older exporter merged: it has what that leaves of parameters, or nothing was merged.

    In training mode the exporter merges none, and equal tensors stand under two names of the module.
    """
    leaves = any(
        node.op_type == "Identity"
        and node.domain == ""
        and any(x is not None and x.is_initializer() for x in node.inputs)
        for node in graph
    )
    return leaves or _has_equals(graph)


def _has_equals(graph: onnx_ir.Graph) -> bool:
    """Whether two small tensors of floats, by names of a module's and read as they are, have the same values."""
    seen: set[tuple[object, ...]] = set()
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None or not 2 <= tensor.size <= _SAMPLE or not tensor.dtype.is_floating_point():
            continue
        if "." not in name or is_computed(name) or not value.uses():
            continue
        key = tensor.dtype, *tensor.shape.numpy(), array_of(value).tobytes()
        if key in seen:
            return True
        seen.add(key)
    return False


def first_call(node: onnx_ir.Node) -> str:
    """The node's name where its layer, of a list, is called for the first time: no other layer is called ``c.1_1``."""
    *scopes, last = (node.name or "").split("/")
    return "/".join([*scopes[:-1], *(_AGAIN.sub(r"\1", scope) for scope in scopes[-1:]), last])


def may_be_calls(nodes: Sequence[onnx_ir.Node]) -> bool:
    """Whether nodes may be of one layer that is called again (``/norm`` and ``/norm_1``), or of two, by their names."""
    scopes = {first_call(node).rpartition("/")[0] for node in nodes} - {""}
    return any(re.sub(r"_\d+$", "", scope) in scopes - {scope} for scope in scopes)


def drop_aliases(graph: onnx_ir.Graph) -> None:
    """Read stored tensors themselves where all that reads them is another name of theirs; changes the graph."""
    for value in list(graph.initializers.values()):
        while len(uses := list(value.uses())) == 1:
            node = uses[0].node
            if node.op_type != "Identity" or node.domain != "" or node.outputs[0].is_graph_output():
                break
            onnx_ir.convenience.replace_all_uses_with(node.outputs[0], value)
            assert node.graph is not None, node
            node.graph.remove(node, safe=True)


def part_named(graph: onnx_ir.Graph) -> dict[str, list[str]]:
    """Stored tensor -> the parameters that were merged into it and are their own now, by the names that the older
    exporter left of them; changes the graph.
    """
    found: dict[str, list[str]] = {}
    for value in list(graph.initializers.values()):
        for use in list(value.uses()):
            node, name = use.node, use.node.outputs[0].name or ""
            if node.op_type != "Identity" or node.domain != "" or not name or is_computed(name):
                continue
            said = node.outputs[0].uses() and not node.outputs[0].is_graph_output() and name not in graph.initializers
            if not said or value.dtype is None or not value.dtype.is_floating_point():
                continue
            own = onnx_ir.Value(name=name, shape=value.shape, type=value.type, const_value=value.const_value)
            onnx_ir.convenience.replace_all_uses_with(node.outputs[0], own)
            graph.remove(node, safe=True)
            graph.register_initializer(own)
            found.setdefault(value.name or "", []).append(name)
    return {name: sorted(names) for name, names in found.items()}


def equal_pairs(values: Sequence[onnx_ir.Value]) -> Iterator[Pair]:
    """Tensors that have the same values by no chance, the first of each pair being the earlier one."""
    groups: dict[tuple[object, ...], list[onnx_ir.Value]] = {}
    for value in values:
        tensor = value.const_value
        if tensor is not None and tensor.size >= CHANCE:
            groups.setdefault((tensor.dtype, *sorted(tensor.shape.numpy())), []).append(value)
    for group in groups.values():
        if len(group) < 2:
            continue
        before: dict[bytes, list[onnx_ir.Value]] = {}
        for value in group:
            array = array_of(value)
            same = before.setdefault(_diagonal(array), [])
            for other in same:
                perm = _order(array_of(other), array)
                if perm is not None:
                    yield other, value, perm
            same.append(value)


def trained_apart(values: Sequence[onnx_ir.Value], *, of_torch: bool) -> Iterator[str]:
    """Equal tensors that are parameters of their own, in words; of torch's, whose names tell, those that are turned."""
    found = [(a, b) for a, b, perm in equal_pairs(values) if not of_torch or perm != tuple(range(len(perm)))]
    for one, other in found[:_MOST_SAID]:
        yield (
            f"{one.name} and {other.name} hold the same values{_more(found)}, and are trained apart: "
            "a weight that is tied is stored once"
        )


def maybe_several(graph: onnx_ir.Graph, values: Sequence[onnx_ir.Value]) -> Iterator[str]:
    """Tensors that the same operator reads for several modules, of which the file does not say whether they were
    parameters of their own that started out equal, in words.
    """
    if says_merged(graph):
        return
    found = []
    for value in values:
        readers: dict[tuple[str, int], set[str]] = {}
        for use in value.uses():
            path, slash, _ = first_call(use.node).rpartition("/")
            readers.setdefault((use.node.op_type, use.idx), set()).add(path if slash else module_of(use.node))
        if any(len(modules) > 1 for modules in readers.values()):
            found.append(value.name or "")
    if found:
        yield (
            f"{some_of(found)} are read in several places, and each is one parameter here: the exporter also merges "
            "parameters that start out equal, and the file does not say which it did. Export with torch.onnx.export("
            "..., dynamo=True, optimize=False) or pdv.frontend.onnx.export.export_onnx, if they are to be trained apart"
        )


def _more(found: Sequence[object]) -> str:
    return f" (one of {len(found)} pairs)" if len(found) > _MOST_SAID else ""


def _is_chance(array: Array) -> bool:
    """Whether values are so many that two tensors have the same by no chance: not a ramp for each layer."""
    if array.size < _LEAST:
        return is_chance(array)
    flat = array.reshape(-1)
    sample = flat[:: max(flat.size // _SAMPLE, 1)]
    return len(np.unique(sample)) > len(sample) // 4


def _diagonal(array: Array) -> bytes:
    """Elements whose places are the same in every order of the dims."""
    ends = [array[(i,) * array.ndim] for i in range(min(*array.shape, 8))]
    return np.asarray([*ends, array[(-1,) * array.ndim] if len(set(array.shape)) == 1 else 0]).tobytes()


def _order(kept: Array, copy: Array) -> tuple[int, ...] | None:
    """The order of the dims of ``kept`` in which it is the copy; None where values are no chance, or differ."""
    if not _is_chance(copy):
        return None
    for perm in permutations(range(kept.ndim)):
        if tuple(kept.shape[dim] for dim in perm) == copy.shape and np.array_equal(kept.transpose(perm), copy):
            return perm
    return None
