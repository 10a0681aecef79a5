"""The reading of an ONNX file against the file: both run on random inputs, the file by another implementation.

Entry point: ``check_file``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ir.errors import ModelError
from ir.evaluation.floats import FloatField
from ir.evaluation.id_ranges import Ranges, divisors, narrower, ranges_of
from ir.evaluation.interpret import evaluate
from ir.graph import Graph, Node
from ir.scaling.rows import few_rows
from ir.types import DType
from pdv.check.file.run import JUDGES, CannotRunError, run_constants, run_file
from pdv.check.reading import EIGHTH, HALF, SINGLE, TOLERANCE, difference, without_chance, work_of
from pdv.check.reference import largest, whole_and_more
from pdv.frontend.onnx.file import quietly
from pdv.frontend.onnx.readers.ids import counted_from_the_end
from pdv.frontend.program import Program
from pdv.frontend.tables import BROKEN, resized_inputs
from pdv.frontend.torch.opaque import OutOfBoundsError, call_torch

MOST_WEIGHTS = 1 << 30  # elements, which are read where they lie
MOST_POINTS = 1 << 37  # products, forward alone: some seconds
WIDE = 1 << 24  # weights of programs that are run in float64, larger ones in their own type
FEW_ROWS, SHORT = 2, 16  # what open sizes are run at
_FLOOR = 1e-3  # of the largest output: what is smaller may be zero but for rounding
_SPREAD = 0.1  # of what constant weights are moved by, so that no bias is zero and no scale is one
MOST_BYTES = 1 << 29  # of all values, in the type in which they are run
_NOT_RUN = "the reading was not run against the file: "
_TRIES = 2  # a choice between nearly equals may fall either way; two in a row do not

Array = np.ndarray[Any, Any]  # Any: floats, integers and booleans


@quietly()
def check_file(program: Program, path: Path) -> str:
    """What a run of the reading and of the file on the same values showed, as a sentence.

    Raises:
        ModelError: naming the first output that differs on all values tried.
    """
    elements = sum(node.type.num_elements for node in program.graph.params)
    if elements > MOST_WEIGHTS:
        return f"{_NOT_RUN}it has {elements:.0e} weights"
    graph, model = _smaller(program, path)
    values, points = work_of(graph)
    kind = _type_of(graph, elements)
    if (values - elements) * np.dtype(kind).itemsize > MOST_BYTES or points > MOST_POINTS:
        return f"{_NOT_RUN}it takes {values:.0e} elements and {points:.0e} products"
    failures: list[str] = []
    differs: tuple[str, float, str] | None = None
    how: dict[str, Any] = {"points": points, "model": model, "drawn": program.drawn}
    for judge in JUDGES:
        try:
            error, what = _compare(program, graph, partial(run_file, judge, path, **how))
        except CannotRunError as why:
            failures.append(str(why))
            continue
        except ModelError as why:  # a function of torch that does not take random values
            return f"{_NOT_RUN}{why.what}"
        if error <= _tolerance(graph):
            but = f" ({differs[0]} makes something else of it)" if differs else ""
            same = "the outputs are the same"
            return (
                f"the reading was run on random inputs against the file in {judge}{without_chance(graph)}: {same}{but}"
            )
        differs = differs or (judge, error, what)
    if differs is None:
        return f"{_NOT_RUN}{'; '.join(failures)}"
    judge, error, what = differs
    amount = f" by {error:.1e} of its largest element" if math.isfinite(error) else ""
    raise ModelError(
        f"what was read of the file is not what {judge} makes of it: {what} differs{amount} on random inputs",
        "Files of which both make the same",
        "Report this; --no-check (check=False) plans what was read",
    )


def _compare(program: Program, graph: Graph, run: Callable[..., list[Array]]) -> tuple[float, str]:
    """By how much the reading differs from what ``run`` makes of the same inputs and stored tensors, and where.

    A softmax of nothing but -inf is no number in a file, and zero in attention: where they differ in such places alone,
    they are run on inputs that hide nothing.

    Raises:
        CannotRunError: if it makes nothing of them.
        ModelError: if the reading cannot be run.
    """
    stored = {name: program.weights.load(name) for name in program.weights.names}
    kind = _type_of(graph, sum(node.type.num_elements for node in graph.params))
    ranges = _ranges_taken(graph, stored, kind)

    def outputs(seed: int, truth: bool | None = None) -> tuple[Mapping[str, Array], list[Array]]:
        given = _draw(graph, seed, ranges)
        if truth is not None:
            given = {name: np.full_like(x, truth) if x.dtype.kind == "b" else x for name, x in given.items()}
        varied = {name: x if name in program.left_out else _vary(x, seed) for name, x in stored.items()}
        wanted = run({**program.known, **given}, program.as_stored(varied))
        return _read(graph, {**given, **varied}, kind), wanted

    worst, tolerance, only_there = (0.0, ""), _tolerance(graph), True
    for seed in range(_TRIES):
        found, wanted = outputs(seed)
        worst = max(_errors(graph, found, wanted))
        if worst[0] <= tolerance:
            return worst
        only_there &= max(_errors(graph, found, wanted, but_none=True))[0] <= tolerance
    for truth in (False, True) if only_there and any(node.type.dtype is DType.BOOL for node in graph.inputs) else ():
        found, wanted = outputs(0, truth)
        errors = max(_errors(graph, found, wanted))
        if errors[0] <= tolerance and not any(np.isnan(y).any() for y in wanted if y.dtype.kind == "f"):
            return errors
    return worst


def _read(graph: Graph, values: Mapping[str, Array], kind: type[np.floating[Any]]) -> Mapping[str, Array]:
    with np.errstate(all="ignore"):
        return evaluate(graph, _lifted(values, kind), field=FloatField(kind, foreign=call_torch)).gather()


def _ranges_taken(graph: Graph, stored: Mapping[str, Array], kind: type[np.floating[Any]]) -> Ranges:
    """From where ids are drawn: the widest ranges that undeclared functions take, too."""
    widest = ranges_of(graph)
    for ranges in (widest, *narrower(graph, widest)) if any(node.op.is_foreign for node in graph.nodes) else ():
        try:
            _read(graph, {**_draw(graph, 0, ranges), **stored}, kind)
        except OutOfBoundsError:
            continue
        return ranges
    return widest


def _smaller(program: Program, path: Path) -> tuple[Graph, onnx.ModelProto | None]:
    """The program at small sizes, where there are such; and the file at these, if it has its own fixed."""
    if program.again is None:
        return _over_few_rows(program, path) or (program.graph, None)
    wanted = dict.fromkeys(program.sizes, SHORT)
    shapes = resized_inputs(program.graph, program.sizes, wanted)
    first = next((node for node in program.graph.inputs if node.type.rank), None)
    rows = first.type.shape[0] if first is not None else 0
    for node in program.graph.inputs:
        name = node.attr("name")
        if node.type.rank and node.type.shape[0] == rows and shapes[name][0] == rows:
            shapes[name] = (min(FEW_ROWS, rows), *shapes[name][1:])
    try:
        return program.again(shapes), None
    except BROKEN:
        return program.graph, None


def _over_few_rows(program: Program, path: Path) -> tuple[Graph, onnx.ModelProto] | None:
    """A file of fixed sizes over few rows, and what is read of it, if that is the program over few rows."""
    expected = few_rows(program.graph, FEW_ROWS)
    if expected is None or program.over_rows is None:
        return None
    try:
        found = program.over_rows(FEW_ROWS)
    except BROKEN:
        return None
    if found is None or found.graph.digest != expected[0].digest or not isinstance(found.source, onnx.ModelProto):
        return None
    return None if _are_other(found.constants, path) else (found.graph, found.source)


def _are_other(constants: Mapping[str, Array], path: Path) -> bool:
    """Whether the file computes something else than was read of what does not depend on its inputs."""
    try:
        wanted = run_constants(path, list(constants)) if constants else []
    except CannotRunError:
        return True
    pairs = zip(constants.values(), wanted, strict=True)
    return any(x.shape != y.shape or not np.allclose(x, y, TOLERANCE, equal_nan=True) for x, y in pairs)


def _type_of(graph: Graph, weights: int) -> type[np.floating[Any]]:
    """In which floats the reading is run: float64, but for programs so large that it would take much longer."""
    narrow = weights > WIDE and not any(node.type.dtype is DType.F64 for node in graph.nodes)
    return np.float32 if narrow else np.float64


def _draw(graph: Graph, seed: int, within: Ranges) -> dict[str, Array]:
    """Random inputs in their own types; integers index the least table that they are used for, from both its ends."""
    random = np.random.default_rng(seed)
    from_end = counted_from_the_end(graph)
    ranges = {name: (-most if name in from_end else least, most) for name, (least, most) in within.items()}
    zeros = divisors(graph)  # where none may be
    whole = _whole_inputs(graph)
    found: dict[str, Array] = {}
    for node in graph.inputs:
        name, kind, shape = node.attr("name"), node.type.dtype, node.type.shape
        drawn: Array
        if seed and name in whole and name not in ranges:
            drawn = random.integers(0, 2, shape)  # which few tables lack
        elif kind.is_floating and name in ranges:
            drawn = whole_and_more(random, within[name], shape)
        elif kind.is_floating:
            drawn = random.uniform(0.5, 1.5, shape) if seed else random.normal(size=shape)
        elif kind is DType.BOOL:
            drawn = random.random(shape) < 0.75
        else:
            drawn = random.integers(*ranges.get(name, (0 if kind.value[0] == "u" else -3, 6)), shape)
        found[name] = np.asarray(drawn).astype(kind.torch_name)
    return {name: np.where(x == 0, x + 1, x) if name in zeros else x for name, x in found.items()}


def _whole_inputs(graph: Graph) -> set[str]:
    """Inputs of integers, or that are made such: numbers of places, perhaps."""
    kinds = {node: node.type.dtype.value[0] for node in graph.nodes}  # i and u of integers
    found = {x for x in graph.inputs if kinds[x] in "iu"}
    found |= {x for node in graph.nodes if kinds[node] in "iu" for x in node.operands if x.is_input}
    return {node.attr("name") for node in found}


def _vary(array: Array, seed: int) -> Array:
    """The weights as they are stored; what is constant is moved, for much that is wrong does not show there."""
    if array.dtype.kind in "iub" or not array.size or not (array == array.reshape(-1)[0]).all():
        return array
    random = np.random.default_rng(seed)
    return (array + _SPREAD * random.random(array.shape)).astype(array.dtype)


def _lifted(values: Mapping[str, Array], kind: type[np.floating[Any]]) -> dict[str, Array]:
    return {name: x if x.dtype.kind in "iub" else x.astype(kind, copy=False) for name, x in values.items()}


def _errors(
    graph: Graph, found: Mapping[str, Array], wanted: list[Array], *, but_none: bool = False
) -> list[tuple[float, str]]:
    """Of each output; but_none: but where the file has no number."""
    if len(wanted) != len(graph.outputs):
        return [(math.inf, f"the number of outputs ({len(graph.outputs)}, and the file has {len(wanted)})")]
    wide = [x if x.dtype.kind in "iub" else x.astype(np.float64) for x in wanted]
    reached = _FLOOR * max(map(largest, wide))
    ours = [found[name] for name, _ in graph.outputs]
    if but_none:
        there = [x.shape == y.shape and x.dtype.kind == y.dtype.kind == "f" for x, y in zip(ours, wide, strict=True)]
        ours = [np.where(np.isnan(y), y, x) if one else x for one, x, y in zip(there, ours, wide, strict=True)]
    pairs = zip(graph.outputs, ours, wide, strict=True)
    return [(_error(node, x, y, reached), f"output {i}") for i, ((_, node), x, y) in enumerate(pairs)]


def _error(node: Node, x: Array, y: Array, reached: float) -> float:
    if y.dtype.kind in "iu" and x.dtype.kind in "iu":
        x = x.astype(y.dtype)  # integers wrap around as they do in their own type
    return difference(x, y, reached)


def _tolerance(graph: Graph) -> float:
    kinds = {node.type.dtype for node in graph.nodes if node.type.dtype.is_floating}
    if any(kind.itemsize == 1 for kind in kinds):
        return EIGHTH
    if kinds & {DType.F16, DType.BF16}:
        return HALF
    return SINGLE if DType.F32 in kinds else TOLERANCE
