"""What the source makes of random values, in float64: the reference that a run of the text is held to.

Entry point: ``reference``; evaluated by ``ir.evaluation.interpret``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ir.evaluation.floats import FloatField
from ir.evaluation.id_ranges import divisors, narrower
from ir.evaluation.interpret import Evaluation, data_of, evaluate
from ir.graph import Graph
from ir.types import DType
from ir.views import Base, add_up, sources_of
from pdv.check.small import Pair
from pdv.frontend.torch.opaque import OutOfBoundsError, call_torch

_ROUNDING = 1e-14  # some tens of units in the last place
_ZEROS = 0.25  # share of ids, where there are more than two: a mask made of ids is false there
_WHOLE = 1 << 20  # ids beside which float32 still holds halves
_HUGE = 1e8  # a value whose rounding, times a gradient of its size, is larger than one
ATTEMPTS = 3  # at values of the source that are finite

Array = np.ndarray[Any, Any]  # Any: floats, integers and booleans


class NotFiniteError(Exception):
    """A source that gives infinities, no numbers, or a choice between equals on all values tried."""


@dataclass(frozen=True)
class Given:
    """What both sides are run on.

    Attributes:
        inputs, stored, cotangents: by name of the input, stored tensor or output.
        weights: of the rows, in the loss.
    """

    inputs: dict[str, Array]
    stored: dict[str, Array]
    cotangents: dict[str, Array]
    weights: Array

    @property
    def weight(self) -> float:
        """Of all rows."""
        return float(self.weights.sum())


@dataclass(frozen=True)
class Expected:
    """What the source makes of it.

    Attributes:
        outputs, updates: by name.
        gradients: by stored tensor; empty where only forward is compared.
        largest: of all values on the way.
        loss: the sum of outputs times cotangents.
    """

    outputs: dict[str, Array]
    updates: dict[str, Array]
    gradients: dict[str, Array]
    largest: float
    loss: float

    @property
    def is_finite(self) -> bool:
        """True if all numbers are."""
        parts = (self.outputs, self.updates, self.gradients)
        return all(np.isfinite(x).all() for part in parts for x in part.values())


def reference(pair: Pair, *, train: bool, seed: int, size: float = 1.0) -> tuple[Given, Expected]:
    """Random values at which the source is finite, and what it makes of them; ``size``: of weights of two dims or more.

    Raises:
        NotFiniteError: if there are none.
        OutOfBoundsError: if an undeclared function takes no ids that were tried.
    """
    refused: OutOfBoundsError | None = None
    for ranges in (pair.ranges, *narrower(pair.source, pair.ranges)):
        try:
            return _finite(replace(pair, ranges=ranges), train=train, seed=seed, size=size)
        except OutOfBoundsError as error:
            refused = refused or error
    assert refused is not None, pair.ranges
    raise refused


def _finite(pair: Pair, *, train: bool, seed: int, size: float) -> tuple[Given, Expected]:
    """The same of ids in the ranges of ``pair``."""
    for attempt in range(ATTEMPTS):
        given = draw(pair, seed + attempt, positive=attempt > 0, size=size)
        expected = expected_of(pair, given, train=train)
        if expected.is_finite:
            return given, expected
    raise NotFiniteError


def is_steady(pair: Pair, *, train: bool, seed: int, tolerance: float) -> bool:
    """Whether what the source makes of random values stays the same within ``tolerance`` if rounding changes these.

    Powers of powers and saturated softmaxes do not: rounding then decides what comes out, on one device as on many.
    """
    given, expected = reference(pair, train=train, seed=seed)
    if expected.largest > _HUGE:
        return False
    random = np.random.default_rng(seed)

    def nudged(x: Array) -> Array:
        return x * (1 + _ROUNDING * random.normal(size=x.shape)) if x.dtype.kind == "f" else x

    inputs, stored = ({name: nudged(x) for name, x in own.items()} for own in (given.inputs, given.stored))
    found = expected_of(pair, replace(given, inputs=inputs, stored=stored), train=train)
    gaps = [
        float(np.abs(wanted[name] - other[name]).max(initial=0.0)) / (largest(wanted[name]) or 1.0)
        for wanted, other in ((expected.outputs, found.outputs), (expected.gradients, found.gradients))
        for name in wanted
        if wanted[name].dtype.kind == "f"
    ]
    return all(gap <= tolerance for gap in gaps)


def expected_of(pair: Pair, given: Given, *, train: bool) -> Expected:
    """What the source makes of values."""
    with np.errstate(all="ignore"):
        values = evaluate(pair.source, {**given.inputs, **given.stored}, field=FloatField(foreign=call_torch))
        found = values.gather()
        gradients = _gradients(pair, values, given) if train else {}
    outputs = {name: found[name] for name, _ in pair.source.outputs}
    updates = {name: found[f"update:{name}"] for name, _ in pair.source.updates}
    reached = max((largest(data_of(value)) for value in values.values.values()), default=0.0)
    with np.errstate(all="ignore"):
        loss = sum(
            float((outputs[name] * given.cotangents[name]).sum())
            for name, node in pair.source.outputs
            if node.needs_grad
        )
    return Expected(outputs, updates, gradients, reached, loss)


def draw(pair: Pair, seed: int, *, positive: bool = False, size: float = 1.0) -> Given:
    """Random float64 inputs, stored tensors and cotangents; integers index the least table that they are used for."""
    random = np.random.default_rng(seed)
    inputs: dict[str, Array] = {}
    for node in pair.source.inputs:
        name, kind, shape = node.attr("name"), node.type.dtype, node.type.shape
        if kind.is_floating and name in pair.ranges:  # what is cut off of floats, which are not whole, is an id
            inputs[name] = whole_and_more(random, pair.ranges[name], shape)
        elif kind.is_floating:
            inputs[name] = random.uniform(0.5, 1.5, shape) if positive else random.normal(size=shape)
        elif kind.value == "bool":
            inputs[name] = _with_one(np.ones(shape, dtype=bool) if positive else random.random(shape) < 0.75)
        else:
            least, most = pair.ranges.get(name, (0, 2))
            drawn = random.integers(least, most, shape)
            many = least == 0 < most - 2
            drawn = np.where(random.random(shape) < _ZEROS, 0, drawn) if many else _with_one(drawn, most - 1)
            inputs[name] = np.asarray(drawn).astype(kind.torch_name)  # the text computes in it
    for name in divisors(pair.source):
        inputs[name] = np.where(inputs[name] == 0, 1, inputs[name])
    kinds = {source: node.type.dtype for node in pair.source.params for source in sources_of(node)}
    stored = {name: _weight(random, shape, kinds[name], size) for name, shape in sorted(pair.stored.items())}
    cotangents = {
        name: random.normal(size=node.type.shape) for name, node in pair.source.outputs if node.type.dtype.is_floating
    }
    rows = next((node.type.shape[0] for _, node in pair.source.outputs if node.type.rank), 1)
    return Given(inputs, stored, cotangents, random.uniform(0.5, 1.5, rows))


def whole_and_more(random: np.random.Generator, within: tuple[int, int], shape: Sequence[int]) -> Array:
    """Floats that are ids of a range once they are cut off, and far from the next: rounding changes none."""
    least, most = within
    return random.integers(least, min(most, least + _WHOLE), shape) + random.uniform(0.25, 0.75, shape)


def _with_one(mask: Array, most: int = 1) -> Array:
    """No row of a mask is all false: kernels differ in what they make of a softmax of nothing, and its gradient."""
    if mask.ndim:
        mask[..., 0] = np.maximum(mask[..., 0], min(most, 1))
    return mask


def _weight(random: np.random.Generator, shape: Sequence[int], kind: DType, size: float) -> Array:
    """Of a size that keeps activations in range; vectors, which may be variances, are near one."""
    if not kind.is_floating:
        return random.integers(0, 2, shape).astype(kind.torch_name)
    if len(shape) < 2:
        return random.uniform(0.5, 1.5, shape)
    return random.normal(size=shape) * size / math.sqrt(math.prod(shape[1:]))


def _gradients(pair: Pair, values: Evaluation, given: Given) -> dict[str, Array]:
    """Stored tensor -> its gradient."""
    gradients = values.gradients(given.cotangents)
    by_node = {node: values.whole_gradient(node, gradients) for node in gradients.local if node.is_param}
    found = whole_bases(pair.source, pair)
    return {name: total.reshape(pair.stored[name]) for name, total in add_up(by_node, found).items()}


def whole_bases(graph: Graph, pair: Pair) -> dict[str, Base]:
    """The source's stored tensors that a program reads, of which no steps of views are shared."""
    return {
        source: Base(tuple(pair.stored[source]), 0, node.type.dtype, bool(node.attr("trainable")))
        for node in graph.params
        for source in sources_of(node)
        if source in pair.stored  # else made of weights, for inference
    }


def largest(x: Array) -> float:
    """The largest finite element."""
    if x.dtype.kind != "f":
        return 1.0
    found = float(np.abs(x).max(initial=0.0))
    return found if math.isfinite(found) else float(np.abs(x[np.isfinite(x)]).max(initial=0.0))
