"""onnx's node tests with their inputs as parameters, in training: gradients of the text on one process and on two.

The text's gradients are torch's own: autograd of what was emitted. What they are held to are differences of values, in
float64, of onnx's reference implementation, or, where it does not compute in float64, of what was read of the file.
Entry point: ``run_gradients``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from benchmarks.coverage_runs.running import (
    Array,
    Case,
    Outcome,
    find_known,
    is_cut,
    name_inputs,
    plain,
    plan_case,
    run_safely,
    widen,
)  # fmt: skip
from ir.evaluation.floats import FloatField
from ir.evaluation.interpret import evaluate
from ir.views import sources_of
from pdv.check.imports import Texts
from pdv.check.reference import Given, draw
from pdv.check.run import observe
from pdv.check.small import full_pair
from pdv.emit.emission import module_texts, shapes_in
from pdv.frontend.load import load_program
from pdv.frontend.torch.opaque import call_torch
from pdv.plan.package import Plan

NOTHING, UNDEFINED = "nothing to train", "no gradient at its values, on one process either"
REFERENCE, READING = "onnx's reference implementation", "what was read"
STEP = 1e-6  # of a difference, times the largest element that is moved: rounding and curvature are both below it
TOLERANCE = 1e-4  # of the sum of all products along a direction
SAME = 1e-9  # of the largest element: of one process and of two
NUDGE = 0.02  # of each element, by which a test's values are moved off kinks, where there are no gradients
POINTS = 3
ADDED, STORED = "_added", "_stored"  # to the names of inputs that are parameters
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)

Values = Mapping[str, Array]
Forward = Callable[[Values], Sequence[Array]]
"""Some parameters by name -> the outputs that have gradients, in order."""


def run_gradients(case: Case) -> tuple[Outcome, str]:
    """One case on one process and on two, and whose values its gradients were held to."""
    stored = _trained(case)
    judges: list[str] = []

    def run(path: Path, inputs: Sequence[Any], _: Sequence[Any]) -> tuple[str, bool]:
        program, known = find_known(stored, inputs, lambda known: load_program(path, dims=known))
        params = [name for node in program.graph.params if node.attr("trainable") for name in sources_of(node)]
        if not params or not any(node.needs_grad for _, node in program.graph.outputs):
            judges.append(NOTHING)
            return "", False
        onnx.save(_added(stored.model, case.model, params), path)
        values = {name: x.tolist() for name, x in name_inputs(stored, inputs, set()).items() if name in known}
        one, two = (plan_case(path, devices, values, "train") for devices in (1, 2))
        why, judge = _differ(case, one, two, name_inputs(stored, inputs, known))
        judges.append(judge)
        return why, is_cut(two)

    return run_safely(stored, run), "".join(judges[-1:])


def _trained(case: Case) -> Case:
    """The same model, its inputs of floats stored in it; ONNX does not add those of eight bits."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    model.ir_version = max(model.ir_version, 4)  # before, stored tensors had to be inputs
    inputs, wanted = case.data[0]
    kept = []
    for value, x in zip(case.model.graph.input, inputs, strict=False):
        if (
            isinstance(x, np.ndarray | np.generic | TensorProto)
            and plain(x).dtype.kind in "fV"
            and plain(x).itemsize > 1
        ):
            stored = x if isinstance(x, TensorProto) else numpy_helper.from_array(np.asarray(x))
            model.graph.initializer.add().CopyFrom(stored)
            model.graph.initializer[-1].name = value.name
            model.graph.input.remove(value)
        else:
            kept.append(x)
    return replace(case, model=model, data=[(kept, wanted)])


def _added(model: onnx.ModelProto, source: onnx.ModelProto, params: Sequence[str]) -> onnx.ModelProto:
    """The model where each parameter is added to an input of its shape: of something a batch may be."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    graph = found.graph
    values = {value.name: value for value in source.graph.input}
    for tensor in graph.initializer:
        if tensor.name in params:
            graph.input.add().CopyFrom(values[tensor.name])
            graph.input[-1].name = f"{tensor.name}{ADDED}"
    nodes = [helper.make_node("Add", [f"{name}{ADDED}", f"{name}{STORED}"], [name]) for name in params]
    for tensor in graph.initializer:
        tensor.name += STORED if tensor.name in params else ""
    nodes += graph.node
    del graph.node[:]
    graph.node.extend(nodes)
    return found


def _differ(case: Case, one: Plan, two: Plan, inputs: Values) -> tuple[str, str]:
    """How gradients differ, of processes or from differences of values; and whose values these were."""
    stored = {name: _finite(widen(one.weights.load(name))) for name in one.weights.names}
    shape_of = shapes_in(one.weights)
    why, found = "", UNDEFINED
    for seed in range(POINTS):
        random = np.random.default_rng((seed, 1))
        drawn = draw(full_pair(one.source, one.emission, shape_of), seed)
        added = {name + ADDED: _nudge(x, random) for name, x in _named(stored).items()}
        given = replace(drawn, inputs={**{name: widen(x) for name, x in inputs.items()}, **added}, stored=stored)
        given = replace(given, cotangents=_where_finite(_read(one, given)({}), given.cotangents))
        first, *others = [gradients for plan in (one, two) for gradients in _gradients(plan, given)]
        if gap := _apart(first, others):
            return gap, ""
        if not all(np.isfinite(x).all() for x in first.values()):
            continue
        why, found = "nothing tells what they are", ""
        for judge, forward in _judges(case, one, given):
            verdict = _judge(forward, given, first, random, last=judge is READING)
            if verdict == "":
                return "", judge
            if verdict is not None:
                why, found = f"{verdict}, of {judge}", judge
                break
    return why, found


def _named(stored: Values) -> Values:
    """What is trained, by the names that the case has for it."""
    return {name.removesuffix(STORED): x for name, x in sorted(stored.items()) if name.endswith(STORED)}


def _finite(x: Array) -> Array:
    """Floats without infinities."""
    return np.nan_to_num(x, nan=1.0, posinf=2.0, neginf=-2.0) if x.dtype.kind == "f" else x


def _nudge(x: Array, random: np.random.Generator) -> Array:
    """What moves a value off kinks, where there are no gradients."""
    return NUDGE * (x * random.uniform(-1, 1, x.shape) + random.uniform(0, 0.1, x.shape))


def _gradients(plan: Plan, given: Given) -> list[dict[str, Array]]:
    """Of each rank, by name of the parameter."""
    shape_of = shapes_in(plan.weights)
    pair = full_pair(plan.source, plan.emission, shape_of)
    texts = Texts(module_texts(plan.emission.body(shape_of)), Path("emitted"))
    ranks = observe(pair, texts, {**given.stored, **pair.own_tensors(given.stored)}, given, train=True)
    return [observed.gradients for observed, _ in ranks]


def _apart(first: Values, others: Sequence[Values]) -> str:
    """How the gradients of two processes differ from those of one; nothing if they do not."""
    for rank, other in enumerate(others):
        for name, gradient in first.items():
            found = other.get(name, np.zeros_like(gradient))
            close = SAME * max(1.0, float(np.abs(_finite(gradient)).max(initial=0.0)))
            if not np.allclose(found, gradient, rtol=SAME, atol=close, equal_nan=True):
                gap = float(np.abs(_finite(found) - _finite(gradient)).max(initial=0.0))
                return f"the gradient of {name} on rank {rank} of two differs from that on one process by {gap:.1e}"
    return ""


def _judges(case: Case, plan: Plan, given: Given) -> list[tuple[str, Forward]]:
    """Who computes values in float64, best first."""
    names, read = [name for name, _ in plan.source.outputs], _read(plan, given)
    model, (inputs, _) = _wider(case.model), case.data[0]
    feeds = {v.name: widen(x) for v, x in zip(case.model.graph.input, inputs, strict=False) if not _is_list(x)}
    evaluator: list[ReferenceEvaluator] = []

    def refer(values: Values) -> Sequence[Array]:
        evaluator[:] = evaluator or [ReferenceEvaluator(model)]
        moved = {name: x + given.inputs[name + ADDED] for name, x in _named({**given.stored, **values}).items()}
        found = evaluator[0].run(None, {**feeds, **moved})
        return [np.asarray(found[names.index(name)], np.float64) for name in given.cotangents]

    rounds = any(node.type.dtype.is_half for node in plan.source.nodes)  # constants, which are others in float64
    return [(READING, read)] if plan.source.draws or rounds else [(REFERENCE, refer), (READING, read)]


def _read(plan: Plan, given: Given) -> Forward:
    """What was read of the file."""

    def read(values: Values) -> Sequence[Array]:
        field = FloatField(foreign=call_torch)
        found = evaluate(plan.source, {**given.inputs, **given.stored, **values}, field=field).gather()
        return [found[name] for name in given.cotangents]

    return read


def _where_finite(outputs: Sequence[Array], cotangents: Values) -> dict[str, Array]:
    """Infinite outputs, of what is masked, stay out of the loss."""
    pairs = zip(cotangents.items(), outputs, strict=True)
    return {name: np.where(np.isfinite(x), c, 0.0) for (name, c), x in pairs}


def _is_list(x: Any) -> bool:  # Any: what a test's input may be
    return x is None or isinstance(x, list | tuple)


def _wider(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in float64."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    for tensor in found.graph.initializer:
        _widen_tensor(tensor)
    for node in found.graph.node:
        for attr in node.attribute:
            if attr.name == "to" and node.op_type == "Cast" and attr.i in _FLOATS:
                attr.i = TensorProto.DOUBLE
            if attr.type == onnx.AttributeProto.TENSOR:
                _widen_tensor(attr.t)
    return found


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in _FLOATS:
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), name))


def _judge(forward: Forward, given: Given, gradients: Values, random: np.random.Generator, *, last: bool) -> str | None:
    """How gradients differ from differences of values; nothing if they do not, None if nobody can tell.

    last: there is nobody else to ask, so that values that stay the same are taken at their word.
    """
    cotangents = list(given.cotangents.values())

    def along(name: str, direction: Array, step: float) -> float:
        base = given.stored[name]
        ends = [forward({name: base + sign * step * direction}) for sign in (1, -1)]
        terms = [np.where(c == 0, 0.0, (up - down) * c).sum() for up, down, c in zip(*ends, cotangents, strict=True)]
        return float(sum(terms)) / (2 * step)

    for name, gradient in gradients.items():
        base = given.stored[name]
        direction = random.normal(size=base.shape)
        step = STEP * max(1.0, float(np.abs(base).max(initial=0.0)))
        try:
            with np.errstate(all="ignore"):
                near, far = along(name, direction, step), along(name, direction, 2 * step)
        except Exception:  # noqa: BLE001  # whatever the reference implementation raises on other types
            return None
        products = gradient * direction
        scale = max(float(np.abs(products).sum()), abs(near), 1.0)
        if not abs(near - far) <= TOLERANCE * scale / 4 or (near == far == 0 and products.any() and not last):
            return None
        if abs(near - float(products.sum())) > TOLERANCE * scale:
            return f"the gradient of {name} along a direction is {float(products.sum()):.6g}, not {near:.6g}"
    return ""
