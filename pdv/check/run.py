"""One run of a package's text on simulated ranks, compared with the source: outputs, gradients, buffers.

The source is evaluated by ``ir.interpret`` in float64, on the same random values. Entry point: ``run``.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ir.errors import VerificationError
from ir.graph import Graph, apply_view, param_view
from ir.interpret import Evaluation, data_of, evaluate
from ir.views import Base, add_up, places, sources_of
from pdv.check.imports import Arrays, Texts
from pdv.check.ranks import RankError, World
from pdv.check.small import Pair

TOLERANCE = 1e-9  # of a tensor's largest element, in float64
_FLOOR = 1e-3  # of the largest value: what is smaller is compared with that, for it may be zero but for rounding
_ATTEMPTS = 2  # at values of the source that are finite

Array = np.ndarray[Any, Any]  # Any: floats, integers and booleans


@dataclass(frozen=True)
class Given:
    """What both sides are run on: inputs by name, stored tensors by name, and cotangents of the outputs."""

    inputs: dict[str, Array]
    stored: dict[str, Array]
    cotangents: dict[str, Array]


@dataclass(frozen=True)
class Expected:
    """What the source makes of it.

    Attributes:
        outputs, updates: by name.
        gradients: by stored tensor; empty where only forward is compared.
        largest: of all values on the way.
    """

    outputs: dict[str, Array]
    updates: dict[str, Array]
    gradients: dict[str, Array]
    largest: float


@dataclass(frozen=True)
class Observed:
    """What one rank made of it."""

    outputs: list[Array]
    batch_axes: tuple[tuple[int, int], ...]  # (size, this rank's place), slow to fast
    gradients: dict[str, Array]
    state: dict[str, Array]


def run(pair: Pair, texts: Texts, *, train: bool, seed: int = 0) -> float:
    """Run the text on every rank of the pair's mesh; the largest relative difference from the source.

    Raises:
        VerificationError: naming the first output, gradient or buffer that differs, or what does not run.
    """
    given, expected = _expected(pair, train=train, seed=seed)
    ranks = observe(pair, texts, {**given.stored, **pair.own_tensors(given.stored)}, given, train=train)
    return max(_compared(pair, given, expected, found, rank) for rank, found in enumerate(ranks))


# ---- The source's side ----


def _expected(pair: Pair, *, train: bool, seed: int) -> tuple[Given, Expected]:
    """Random values at which the source is finite, and what it makes of them."""
    for attempt in range(_ATTEMPTS):
        given = draw(pair, seed + attempt, positive=attempt > 0)
        with np.errstate(all="ignore"):
            values = evaluate(pair.source, {**given.inputs, **given.stored})
            found = values.gather()
            gradients = _gradients(pair, values, given) if train else {}
        outputs = {name: found[name] for name, _ in pair.source.outputs}
        updates = {name: found[f"update:{name}"] for name, _ in pair.source.updates}
        largest = max((_largest(data_of(value)) for value in values.values.values()), default=0.0)
        expected = Expected(outputs, updates, gradients, largest)
        if all(np.isfinite(x).all() for part in (outputs, updates, gradients) for x in part.values()):
            break
    return given, expected


def draw(pair: Pair, seed: int, *, positive: bool = False) -> Given:
    """Random float64 inputs, stored tensors and cotangents; integers index the least table that they are used for."""
    random = np.random.default_rng(seed)
    inputs: dict[str, Array] = {}
    for node in pair.source.inputs:
        name, kind, shape = node.attr("name"), node.type.dtype, node.type.shape
        if kind.is_floating:
            inputs[name] = random.uniform(0.5, 1.5, shape) if positive else random.normal(size=shape)
        elif kind.value == "bool":
            inputs[name] = np.ones(shape, dtype=bool) if positive else random.random(shape) < 0.75
        else:
            inputs[name] = random.integers(0, pair.limits.get(name, 2), shape)
    kinds = {source: node.type.dtype for node in pair.source.params for source in sources_of(node)}
    stored = {name: _weight(random, shape, kinds[name].is_floating) for name, shape in sorted(pair.stored.items())}
    cotangents = {
        name: random.normal(size=node.type.shape) for name, node in pair.source.outputs if node.type.dtype.is_floating
    }
    return Given(inputs, stored, cotangents)


def _weight(random: np.random.Generator, shape: Sequence[int], floating: bool) -> Array:
    """Of a size that keeps activations in range; vectors, which may be variances, are near one."""
    if not floating:
        return random.integers(0, 2, shape)
    if len(shape) < 2:
        return random.uniform(0.5, 1.5, shape)
    return random.normal(size=shape) / math.sqrt(math.prod(shape[1:]))


def _gradients(pair: Pair, values: Evaluation, given: Given) -> dict[str, Array]:
    """Stored tensor -> its gradient."""
    gradients = values.gradients(given.cotangents)
    by_node = {node: values.whole_gradient(node, gradients) for node in gradients.local if node.op.name == "param"}
    found = _whole_bases(pair.source, pair)
    return {name: total.reshape(pair.stored[name]) for name, total in add_up(by_node, found).items()}


def _whole_bases(graph: Graph, pair: Pair) -> dict[str, Base]:
    """Stored tensors, of which no steps of views are shared."""
    return {
        source: Base(tuple(pair.stored[source]), 0, node.type.dtype, bool(node.attr("trainable")))
        for node in graph.params
        for source in sources_of(node)
    }


# ---- The ranks' side ----


def observe(pair: Pair, texts: Texts, stored: Arrays, given: Given, *, train: bool) -> list[Observed]:
    """What each rank gets.

    Raises:
        VerificationError: if the text does not run.
    """
    world: World[Observed] = World(pair.mesh.num_devices)

    def worker(rank: int) -> Observed:
        with texts.imported(world, rank, stored) as package:
            return _observed(package, pair, given, train=train)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return world.run(worker)
    except RankError as error:
        raise _not_running(error, texts) from error
    finally:
        torch.set_default_dtype(before)


def _observed(package: ModuleType, pair: Pair, given: Given, *, train: bool) -> Observed:
    model = package.build("cpu")
    inputs = [torch.from_numpy(given.inputs[node.attr("name")]).clone() for node in pair.source.inputs]
    if not train:
        with torch.no_grad():
            return Observed(_arrays(model(*inputs)), _places(model), {}, {})
    outputs = model(*inputs)
    axes = _places(model)
    loss = _loss(_tensors(outputs), pair, given, axes)
    if loss.requires_grad:
        torch.autograd.backward(loss)
    gradients = {name: value.numpy() for name, value in model.full_gradients().items()}
    moved = model.full_state_dict()
    state = {name: value.numpy() for name, value in moved.items()}
    return Observed(_arrays(outputs), axes, gradients, state)


def _loss(outputs: Sequence[Tensor], pair: Pair, given: Given, axes: tuple[tuple[int, int], ...]) -> Tensor:
    """The sum of outputs times cotangents, over this rank's rows."""
    total = torch.zeros(())
    for (name, _), output in zip(pair.source.outputs, outputs, strict=False):
        if name in given.cotangents and output.requires_grad:
            cotangent = torch.from_numpy(_block(given.cotangents[name], axes))
            if cotangent.shape == output.shape:  # else the comparison of outputs will say so
                total = total + (output * cotangent).sum()
    return total


def _places(model: Any) -> tuple[tuple[int, int], ...]:  # Any: a ParallelModule of the text's own
    return tuple((axis.size, axis.rank) for axis in model.batch_axes)


def _tensors(outputs: Any) -> list[Tensor]:  # Any: a tensor or several
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def _arrays(outputs: Any) -> list[Array]:
    return [output.detach().numpy() for output in _tensors(outputs)]


def _block(whole: Array, axes: Sequence[tuple[int, int]]) -> Array:
    """The rows of the rank at these places."""
    for size, place in axes:  # outer axis first
        rows = whole.shape[0] // size
        whole = whole[place * rows : (place + 1) * rows]
    return whole


def _not_running(error: RankError, texts: Texts) -> VerificationError:
    """What a rank raised, and where in the text."""
    cause = error.__cause__
    assert cause is not None
    frames = traceback.extract_tb(cause.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(str(texts.directory))]
    place = f" at {own[-1].filename}:{own[-1].lineno}, {own[-1].line or own[-1].name}" if own else ""
    model = [frame for frame in own if frame.filename.endswith("model.py")]
    above = f", called at {model[-1].filename}:{model[-1].lineno}" if own and model and model[-1] is not own[-1] else ""
    return VerificationError(
        f"the emitted text does not run on simulated ranks: rank {error.rank}: "
        f"{type(cause).__name__}: {str(cause).strip()}{place}{above}",
        check="text",
    )


# ---- The comparison ----


def _compared(pair: Pair, given: Given, expected: Expected, found: Observed, rank: int) -> float:
    worst = 0.0
    where = f"on simulated rank {rank} of {pair.mesh}"
    names = [name for name, _ in pair.source.outputs]
    if len(found.outputs) != len(names):
        raise _differs(f"the emitted text returns {len(found.outputs)} tensors, the source {len(names)}", where)
    for name, value in zip(names, found.outputs, strict=True):
        wanted = _block(expected.outputs[name], found.batch_axes)
        worst = max(worst, _difference(f"output {name}", value, wanted, where, expected.largest))
    if expected.gradients:
        worst = max(worst, _compare_gradients(expected.gradients, found.gradients, where))
    return max(worst, _compare_state(pair, given, expected, found, where))


def _compare_gradients(expected: Mapping[str, Array], found: Mapping[str, Array], where: str) -> float:
    largest = max(1.0, *map(_largest, expected.values()))  # cotangents are about one
    worst = 0.0
    for name in sorted({*expected, *found}):
        if name not in expected:
            raise _differs(f"the emitted text trains {name}, which the source does not", where)
        wanted = expected[name]
        value = found.get(name)
        if value is None:
            value = np.zeros_like(wanted)  # no gradient is one of zero
        worst = max(worst, _difference(f"the gradient of {name}", value, wanted, where, largest))
    return worst


def _compare_state(pair: Pair, given: Given, expected: Expected, found: Observed, where: str) -> float:
    """Buffers are updated as the source's; what is not updated is still what was stored."""
    if not found.state:
        return 0.0
    worst = 0.0
    updated: set[str] = set()
    for node in pair.source.params:
        name = node.attr("name")
        if name in expected.updates:
            updated.update(sources_of(node))
            (source,) = sources_of(node)
            if source not in found.state:
                raise _differs(f"the emitted text has no buffer {source}", where)
            value, wanted = apply_view(found.state[source], param_view(node)), expected.updates[name]
            worst = max(worst, _difference(f"the new value of {source}", value, wanted, where, expected.largest))
    for name, mask in _read_elements(pair).items():
        if name in updated:
            continue
        if name not in found.state:
            raise _differs(f"the emitted text's state has no {name}", where)
        value, wanted = found.state[name].reshape(-1)[mask], given.stored[name].reshape(-1)[mask]
        worst = max(worst, _difference(f"{name} in the state", value, wanted, where, 0.0))
    return worst


def _read_elements(pair: Pair) -> dict[str, Array]:
    """Stored tensor -> for each of its elements, whether the program reads it."""
    bases = _whole_bases(pair.emitted, pair)
    sizes = [math.prod(base.shape) for base in bases.values()]
    row = np.zeros(sum(sizes), dtype=bool)
    for node in pair.emitted.params:
        row[places(node, bases)] = True
    return dict(zip(bases, np.split(row, np.cumsum(sizes)[:-1]), strict=True))


def _largest(x: Array) -> float:
    """The largest finite element."""
    if x.dtype.kind != "f":
        return 1.0
    largest = float(np.abs(x).max(initial=0.0))
    return largest if math.isfinite(largest) else float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def _difference(what: str, found: Array, wanted: Array, where: str, largest: float) -> float:
    """The largest difference over the largest element, or over a part of what is largest on the way.

    Raises:
        VerificationError: if it is more than rounding.
    """
    if found.shape != wanted.shape:
        raise _differs(f"{what} is of shape {list(found.shape)}, the source's of {list(wanted.shape)}", where)
    if found.dtype.kind != wanted.dtype.kind:
        raise _differs(f"{what} is of type {found.dtype}, the source's of {wanted.dtype}", where)
    if wanted.dtype.kind != "f":
        error = float((found != wanted).any())
    else:
        same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
        with np.errstate(all="ignore"):
            gaps = np.where(same, 0.0, np.abs(found - wanted))
        error = float(gaps.max(initial=0.0)) / (max(_largest(wanted), _FLOOR * largest) or 1.0)
    if not error <= TOLERANCE:
        raise _differs(f"{what} differs from the source's by {error:.1e} of its largest element", where)
    return error


def _differs(what: str, where: str) -> VerificationError:
    return VerificationError(f"{what}, {where}", "The emitted text computes what the source does", check="text")
