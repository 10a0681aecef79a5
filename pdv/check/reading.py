"""The reading of a torch module against the module: both run on its example inputs, forward, backward, and once more.

The proof and the run of the text start from the graph that the frontend read; whether that is the model is seen here.
Entry point: ``check_reading``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ir.errors import ModelError
from ir.evaluation.floats import FloatField
from ir.evaluation.interpret import Evaluation, evaluate
from ir.graph import Graph
from ir.scaling.rows import few_rows
from ir.views import Base, add_up, sources_of
from pdv.check.module_run import ModuleRun, Source, array, copy_module, run_module
from pdv.check.reference import largest
from pdv.check.steady import chance, with_masks_of_noise
from pdv.check.trainable import check_trainable
from pdv.frontend.torch.module import ExampleInputs, call_arguments
from pdv.frontend.torch.opaque import call_torch

MOST_ELEMENTS = 1 << 23  # of all values of a program that is run as it is, in float64
MOST_POINTS = 1 << 31  # of the loop nests of all its contractions: some seconds, with gradients
FEW_ROWS = 2  # of the batch, where the program is larger
MOST_WEIGHTS = 1 << 28  # of a program over few rows, which is run in its own type: they and their gradients are held
MOST_VALUES = 1 << 26  # of such a program, beside its weights: half a GiB
MOST_PRODUCTS = 1 << 35  # of such a program, forward: some seconds, with gradients
TOLERANCE = 1e-6  # of a tensor's largest element, in float64: literals have seven digits
SINGLE, HALF, EIGHTH = 1e-3, 0.1, 0.5  # where the module computes in a type of its own
ROUNDED = 1e-4  # in float32 both
_FLOOR = 1e-3  # of the largest output or gradient: what is smaller may be zero but for rounding
_WIDE = FloatField(foreign=call_torch)
_NARROW = FloatField(np.float32, foreign=call_torch)
NOT_RUN = "the reading was not run against the module: "

Array = np.ndarray[Any, Any]  # Any: floats, integers and booleans


def copy_of(
    model: Any,  # Any: what optimize takes
    example_inputs: ExampleInputs | None,
    *,
    train: bool,
) -> Source | str:
    """What a reading is checked against, made before the model is read; or why there is none.

    Raises:
        ModelError: if it is to be trained, and its training is more than its forward.
    """
    if isinstance(model, torch.export.ExportedProgram):
        if train:
            check_trainable(model)
        given = model.example_inputs if example_inputs is None else call_arguments(example_inputs)
        return "the exported program has no example inputs" if given is None else copy_module(model.module(), *given)
    if example_inputs is None or not isinstance(model, torch.nn.Module):
        return "there is no module, or no example inputs"  # which its reader refuses
    if train:
        check_trainable(model)
    return copy_module(model, *call_arguments(example_inputs))


def check_reading(graph: Graph, source: Source | str, *, train: bool, remedy: str = "") -> str:
    """What a run of the reading and of the module on the same values showed, as a sentence.

    source: a copy of the module as it was given, or why there is none; remedy: what is to be done if the reading
    is another program, where its reader knows.

    Raises:
        ModelError: naming the first output, gradient or state that differs; or if the module cannot be run.
    """
    if isinstance(source, str):
        return NOT_RUN + source
    graph = with_masks_of_noise(graph)
    whole = source.at([node.type.shape for node in graph.inputs])
    if _is_small(graph):
        error, what = _compare(graph, whole, train=train)
        rows = ""
    else:
        few = few_rows(graph, FEW_ROWS)
        fewer = graph if few is None else few[0]
        elements, points = work_of(fewer)
        weights = sum(node.type.num_elements for node in graph.params)
        if weights > MOST_WEIGHTS or elements - weights > MOST_VALUES or points > MOST_PRODUCTS:
            return f"{NOT_RUN}it takes {elements:.0e} elements and {points:.0e} products"
        source = whole.at([node.type.shape for node in fewer.inputs])
        error, what = _compare_as_it_is(fewer, source, train=train)
        if what:  # over few rows, statistics of a batch make much of rounding
            error, what = _compare(fewer, source, train=train)
        rows = "" if few is None else f" ({fewer.inputs[0].type.shape[0]} rows of them)"
    if what:
        raise _differs(what, error, remedy)
    compared = "outputs of two calls, gradients and state" if train else "outputs of two calls and state"
    how = without_chance(graph)
    return f"the reading was run on the example inputs{rows} against the module{how}: {compared} are the same"


def without_chance(graph: Graph) -> str:
    """How what is drawn at random was compared, in words; empty where nothing is."""
    drawn = [node for node in graph.nodes if node.op.draws]
    left_out = ", both without dropout" if any(node.op.linear for node in drawn) else ""
    return left_out + (", both with the same noise" if not all(node.op.linear for node in drawn) else "")


def _is_small(graph: Graph) -> bool:
    elements, points = work_of(graph)
    return elements <= MOST_ELEMENTS and points <= MOST_POINTS


def _compare(graph: Graph, source: Source, *, train: bool) -> tuple[float, str]:
    """The first output, gradient or state that differs, and by how much, in float64 where the module runs in it."""
    cotangents = _draw(graph)
    with torch.random.fork_rng(devices=[]), np.errstate(all="ignore"), chance(graph):
        wide = source.in_float64()
        found = _run_reading(graph, source, cotangents, train=train)
        exact = _run_or_none(wide, cotangents, train=train)
        tolerance = TOLERANCE
        if exact is None or _worst(found, exact) > tolerance:
            native = run_module(source, cotangents, train=train)
            tolerance, moved = _own_tolerance(source), math.inf if exact is None else _worst(native, exact)
            if exact is None or (math.isinf(moved) and _is_finite(native)):  # sums of the least number of a type
                exact = native
            else:  # how far rounding moves the module itself
                tolerance = min(tolerance, 4 * moved)
            if _own_tolerance(source) == SINGLE and _worst(found, exact) > tolerance:
                narrow = _run_reading(graph, source, cotangents, train=train, field=_NARROW)
                if 4 * _worst(narrow, found) >= _worst(
                    found, exact
                ):  # as a module does that itself computes in float32
                    return _first_beyond(ROUNDED, narrow, native)
    return _first_beyond(max(tolerance, TOLERANCE), found, exact)


def _compare_as_it_is(graph: Graph, source: Source, *, train: bool) -> tuple[float, str]:
    """The same in the module's own type: twice the memory of the weights would be needed for a wider one."""
    cotangents = _draw(graph)
    with torch.random.fork_rng(devices=[]), np.errstate(all="ignore"), chance(graph):
        found = _run_reading(graph, source, cotangents, train=train, field=_NARROW)
        native = run_module(source, cotangents, train=train, dtype=np.float32)
    return _first_beyond(_own_tolerance(source), found, native)


def _draw(graph: Graph) -> list[Array]:
    return [np.random.default_rng(0).normal(size=node.type.shape) for _, node in graph.outputs]


def _first_beyond(tolerance: float, found: ModuleRun, wanted: ModuleRun) -> tuple[float, str]:
    """Empty words where nothing is."""
    return next(((error, what) for error, what in _differences(found, wanted) if not error <= tolerance), (0.0, ""))


def work_of(graph: Graph) -> tuple[int, int]:
    """The elements of all values of a program, and the points of the loop nests of all its contractions."""
    elements = sum(node.type.num_elements for node in graph.nodes)
    points = sum(math.prod(node.loops.extents.values()) for node in graph.nodes if node.op.kind == "contraction")
    return elements, points


def _run_or_none(source: Source, cotangents: Sequence[Array], *, train: bool) -> ModuleRun | None:
    """A run of a module in a type that is not its own, which it need not be able to do."""
    try:
        return run_module(source, cotangents, train=train)
    except ModelError:
        return None


def _run_reading(
    graph: Graph, source: Source, cotangents: Sequence[Array], *, train: bool, field: FloatField = _WIDE
) -> ModuleRun:
    """What the graph makes of the module's inputs and state, by the module's names."""
    inputs = {node.attr("name"): array(x) for node, x in zip(graph.inputs, source.tensors, strict=True)}
    stored = {name: array(x, field.dtype) for name, x in source.held.items()}
    _check_sizes(graph, stored)
    values = evaluate(graph, {**inputs, **stored}, field=field)
    first = values.gather()
    updates = {name: first[f"update:{name}"] for name, _ in graph.updates}
    second = evaluate(graph, {**inputs, **stored, **updates}, field=field).gather() if updates else first
    names = [name for name, _ in graph.outputs]
    by_name = dict(zip(names, cotangents, strict=True))
    firsts = source.first_names
    gradients = _gradients(graph, values, by_name, stored) if train else {}
    state = {firsts[name]: x for name, x in stored.items() if x.dtype.kind == "f"}
    return ModuleRun(
        [first[name] for name in names],
        {firsts[name]: x for name, x in gradients.items()},
        {**state, **{firsts[name]: x for name, x in updates.items()}},
        [second[name] for name in names],
    )


def _check_sizes(graph: Graph, stored: Mapping[str, Array]) -> None:
    """Whether the program finds its state as it was read.

    Raises:
        ModelError: naming a buffer that has another size since the module was called.
    """
    for node in graph.params:
        name = node.attr("name")
        if name in stored and stored[name].shape != node.type.shape and not node.attr("view"):
            raise ModelError(
                f"buffer {name} has {list(stored[name].shape)} behind a call, and had {list(node.type.shape)} before",
                "State of sizes that stay",
                "Make it as large as it may become, and overwrite a part of it",
            )


def _gradients(
    graph: Graph, values: Evaluation, cotangents: Mapping[str, Array], stored: Mapping[str, Array]
) -> dict[str, Array]:
    """Stored tensor -> its gradient."""
    gradients = values.gradients(cotangents)
    by_node = {node: values.whole_gradient(node, gradients) for node in graph.params if node in gradients.local}
    found = {
        name: Base(stored[name].shape, 0, node.type.dtype, bool(node.attr("trainable")))
        for node in graph.params
        for name in sources_of(node)
    }
    return {name: total.reshape(stored[name].shape) for name, total in add_up(by_node, found).items()}


def _is_finite(run: ModuleRun) -> bool:
    each = (*run.outputs, *run.second, *run.gradients.values())
    return all(bool(np.isfinite(x).all()) for x in each if x.dtype.kind == "f")


def _worst(found: ModuleRun, wanted: ModuleRun) -> float:
    """The largest difference, of a tensor's largest element."""
    return max((error for error, _ in _differences(found, wanted)), default=0.0)


def _differences(found: ModuleRun, wanted: ModuleRun) -> Iterator[tuple[float, str]]:
    for call, ours, theirs in (("", found.outputs, wanted.outputs), (" of a second call", found.second, wanted.second)):
        if len(ours) != len(theirs):
            yield math.inf, f"the number of outputs ({len(ours)}, and the module has {len(theirs)})"
        reached = _FLOOR * max(map(largest, theirs), default=0.0)
        for i, (x, y) in enumerate(zip(ours, theirs, strict=False)):
            yield difference(x, y, reached), f"output {i}{call}"
    reached = _FLOOR * max(map(largest, wanted.gradients.values()), default=0.0)
    for name in sorted({*found.gradients, *wanted.gradients}):
        zero = np.zeros_like((found.gradients | wanted.gradients)[name])  # what none is
        x, y = found.gradients.get(name, zero), wanted.gradients.get(name, zero)
        yield difference(x, y, reached), f"the gradient of {name}"
    for name, y in wanted.state.items():
        yield difference(found.state[name], y, 0.0), f"what a call leaves in {name}"


def difference(x: Array, y: Array, reached: float) -> float:
    """The largest difference over the largest element; no number where one side has none is infinite."""
    if x.shape != y.shape or x.dtype.kind != y.dtype.kind:
        return math.inf
    if y.dtype.kind != "f":
        return float((x != y).any())
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):  # of infinities
        gap = float(np.where(same, 0.0, np.abs(x - y)).max(initial=0.0))
    scale = max(largest(y), reached) or 1.0
    return math.inf if math.isnan(gap) else gap / scale


def _own_tolerance(source: Source) -> float:
    kinds = {x.dtype for x in (*source.held.values(), *source.tensors) if x.is_floating_point()}
    return HALF if kinds & {torch.float16, torch.bfloat16} else SINGLE


_OF_STATE = (
    "Pass in and return what changes between calls; bound gradients in the loss or the training loop, not by an "
    "autograd.Function whose backward is no linear function of them"
)


def _differs(what: str, error: float, remedy: str) -> ModelError:
    amount = f" by {error:.1e} of its largest element" if math.isfinite(error) else ""
    return ModelError(
        f"what was read of the model is not the module: {what} differs{amount} on the example inputs",
        "Modules that compute from inputs, parameters and buffers alone, with the gradients of what they compute",
        remedy or _OF_STATE,
    )
