"""One run of a package's text on simulated ranks, compared with its source. Entry point: ``run``."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ir.dims import Shape
from ir.errors import VerificationError
from pdv.check.compare import AMPLIFIED, TOLERANCE, Comparison, Observed
from pdv.check.imports import Arrays, Texts
from pdv.check.ranks import Call, Carry, Group, RankError, World
from pdv.check.reference import Given, expected_of, is_steady, reference
from pdv.check.small import Pair

T = TypeVar("T")
_GENTLE = 0.03  # of the usual size of weights

Array = np.ndarray[Any, Any]  # Any: floats, integers and booleans


def run(pair: Pair, texts: Texts, *, train: bool, seed: int = 0) -> float:
    """Run the text on every rank of the pair's mesh; the largest relative difference from the source.

    Raises:
        NotFiniteError: if there is nothing to compare with.
        VerificationError: naming the first output, gradient or buffer that differs, or what does not run.
    """
    try:
        return _once(pair, texts, train=train, seed=seed, size=1.0, tolerance=TOLERANCE)
    except VerificationError:  # perhaps rounding: attention to scores of 1e10 has gradients of ten digits less
        if is_steady(pair, train=train, seed=seed, tolerance=AMPLIFIED):
            _once(pair, texts, train=train, seed=seed, size=1.0, tolerance=AMPLIFIED)
        return _once(pair, texts, train=train, seed=seed, size=_GENTLE, tolerance=TOLERANCE)


def _once(pair: Pair, texts: Texts, *, train: bool, seed: int, size: float, tolerance: float) -> float:
    given, expected = reference(pair, train=train, seed=seed, size=size)
    calls = observe(pair, texts, {**given.stored, **pair.own_tensors(given.stored)}, given, train=train)
    worst = Comparison(pair, given, expected, tolerance).worst([first for first, _ in calls])
    again = [second for _, second in calls if second is not None]
    if not again:
        return worst
    moved = replace(given, stored={**given.stored, **expected.updates})
    following = expected_of(pair, moved, train=False)
    if not following.is_finite:
        return worst
    return max(worst, Comparison(pair, moved, following, tolerance, "at the second call ").worst(again))


def tensors_read(texts: Texts, ranks: int, shapes: Mapping[str, Shape]) -> set[str]:
    """Names of the stored tensors, of these shapes, that the first of so many ranks reads to build its model.

    Raises:
        VerificationError: if the text does not run.
    """
    read: set[str] = set()

    class Recorded(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            read.add(name)
            return super().__getitem__(name)

    stored = Recorded({name: torch.empty(shape, device="meta").as_subclass(_Shaped) for name, shape in shapes.items()})
    try:
        with texts.import_model(_FirstRank(ranks), 0, stored) as package:
            package.build("meta")
    except Exception as error:
        raise _not_running(RankError(0, error), texts) from error
    return read


class _FirstRank(World[None]):
    """A world whose first rank alone is there: it waits for nobody to make groups. Nothing else is called to build."""

    def meet(self, group: Group, rank: int, call: Call, carry: Carry) -> None:
        """Nobody comes."""


class _Shaped(Tensor):
    """A shape without values, joined here: torch would load its compiler, for a second and more, to say the shape."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.cat:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        (parts, dim), first = args, args[0][0]
        shape = [sum(part.shape[at] for part in parts) if at == dim else size for at, size in enumerate(first.shape)]
        return torch.empty(shape, dtype=first.dtype, device="meta").as_subclass(cls)


def observe(
    pair: Pair, texts: Texts, stored: Arrays, given: Given, *, train: bool
) -> list[tuple[Observed, Observed | None]]:
    """What each rank gets, and gets at a second call, if the first moved buffers: of outputs and buffers.

    Raises:
        VerificationError: if the text does not run.
    """

    def look(package: ModuleType) -> tuple[Observed, Observed | None]:
        return _observe(package, pair, given, train=train)

    return on_ranks(pair.mesh.num_devices, texts, stored, look)


def on_ranks(count: int, texts: Texts, stored: Arrays, look: Callable[[ModuleType], T]) -> list[T]:
    """What is seen on each rank of its model.py.

    Raises:
        VerificationError: if the text does not run.
    """
    world: World[T] = World(count)

    def worker(rank: int) -> T:
        with texts.import_model(world, rank, stored) as package:
            return look(package)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if texts.own_types else torch.float64)
    try:
        with sdpa_kernel(SDPBackend.MATH):  # see ``run_module``
            return world.run(worker)
    except RankError as error:
        raise _not_running(error, texts) from error
    finally:
        torch.set_default_dtype(before)


def _as_written(model: Any, **options: Any) -> None:
    """What is checked is the text; that it is compiled to the same is torch's to see to."""


def _observe(package: ModuleType, pair: Pair, given: Given, *, train: bool) -> tuple[Observed, Observed | None]:
    model = _built(package)
    model.eval()  # no masks of dropout are drawn, nor by the source
    if noise := vars(package).get("noise"):
        noise.__globals__["steady"][0] = True
    model.micro_batches = 1  # it is given the rows of one
    inputs = _inputs(pair, given)
    axes = _places(model)
    if train and _has_gradients(pair):
        outputs, loss = _step(model, inputs, pair, given)
        whole = model.whole(lambda tensor: tensor.grad, rest=False)
        gradients = {name: _array(value) * given.weight for name, value in whole.items()}
        first = Observed(_arrays(outputs), axes, gradients, _state(model), loss)
    else:
        first = _call(model, inputs, stateful=train or bool(pair.source.updates))
    return first, _call(model, inputs, stateful=True) if pair.source.updates else None


@dataclass(frozen=True)
class Built:
    """A model as ``build`` gives it: what it says of itself, and what a step and clipping its gradients give."""

    said: dict[str, Any]  # Any: plain values
    values: dict[str, Array]


def train_as_built(package: ModuleType, *, pair: Pair, given: Given, train: bool, norm: float) -> Built:
    """A step in the mode that the model is in, in as many micro-batches as it says, if these rows divide by them."""
    torch.manual_seed(0)
    model = _built(package)
    public = {name: _plain(value) for name, value in vars(model).items() if not name.startswith("_")}
    said = {name: plain for name, plain in public.items() if plain is not None}
    said["mode"] = sorted({"training" if part.training else "evaluation" for part in model.modules()})
    inputs = _inputs(pair, given)
    rows = given.weights.size // math.prod(size for size, _ in _places(model))
    if rows % model.micro_batches or given.weights.size != inputs[0].shape[0]:
        model.micro_batches = 1
    if not (train and _has_gradients(pair)):
        model.train(train)
        seen = _call(model, inputs, stateful=train)
        return Built(said, {f"output {at}": x for at, x in enumerate(seen.outputs)} | seen.state)
    outputs, loss = _step(model, inputs, pair, given)
    values = {f"output {at}": x for at, x in enumerate(_arrays(outputs))} | {"the loss": np.asarray(loss)}
    for what in ("gradient", "clipped gradient"):
        whole = model.whole(lambda tensor: tensor.grad, rest=False)
        values |= {f"the {what} of {name}": _array(x) for name, x in whole.items()}
        if what == "gradient":
            values["the norm of gradients"] = _array(model.clip_grad_norm_(norm))
    return Built(said, values | _state(model))


def _built(package: ModuleType) -> Any:  # Any: a ParallelModule of the text's own
    """Its model on this rank, which compares nothing with others, and is run as it is written."""
    package.Model.compile = _as_written
    model = package.build("cpu")
    model.evaluation.is_checked = True
    return model


def _inputs(pair: Pair, given: Given) -> list[Tensor]:
    return [torch.from_numpy(given.inputs[node.attr("name")]).clone() for node in pair.source.inputs]


def _has_gradients(pair: Pair) -> bool:
    return any(node.needs_grad for _, node in pair.source.outputs)


def _plain(value: Any) -> Any:  # Any: an attribute of a model
    """A number, a text, or several; of a function of which arguments are known, these. None: something else."""
    if isinstance(value, partial):
        value = value.args
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if isinstance(value, tuple | list):
        found = tuple(map(_plain, value))
        return None if None in found else found
    return value if isinstance(value, str | int | float | bool) else None


def _call(model: Any, inputs: Sequence[Tensor], *, stateful: bool) -> Observed:
    """Outputs of a call that is not trained on, and the state behind it, if it is ``stateful``."""
    with torch.no_grad():
        outputs = _arrays(model(*inputs))
    return Observed(outputs, _places(model), {}, _state(model) if stateful else {})


def _state(model: Any) -> dict[str, Array]:
    whole = model.whole(lambda tensor: tensor.detach(), rest=False)  # what is not read shows as zeros
    return {name: _array(value).copy() for name, value in whole.items()}


def _step(model: Any, inputs: list[Tensor], pair: Pair, given: Given) -> tuple[Any, float]:
    """(outputs, loss times the weight of all rows) of a training step by the text's own ``train_step``.

    The loss is the sum of outputs times cotangents over the weight of the rows, which is another for each row.
    """
    names = [name for name, _ in pair.source.outputs]
    kept: list[Any] = []

    def loss_fn(outputs: Any, target: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        kept.append(outputs)
        *cotangents, weights = target
        by_name = dict(zip(given.cotangents, cotangents, strict=True))
        total = torch.zeros(())
        for name, output in zip(names, _tensors(outputs), strict=False):
            if name in by_name and output.requires_grad and output.shape == by_name[name].shape:
                total = total + (output * by_name[name]).sum()  # else the comparison of outputs will say so
        return total, weights.sum()

    targets = [*given.cotangents.values(), given.weights]
    loss = model.train_step(inputs, [torch.from_numpy(x).clone() for x in targets], loss_fn)
    return kept[0], float(loss) * given.weight


def _places(model: Any) -> tuple[tuple[int, int], ...]:  # Any: a ParallelModule of the text's own
    return tuple((axis.size, axis.rank) for axis in model.batch_axes)


def _tensors(outputs: Any) -> list[Tensor]:  # Any: a tensor or several
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def _array(x: Tensor) -> Array:
    found: Array = (x.detach().double() if x.is_floating_point() else x.detach()).numpy()
    return found


def _arrays(outputs: Any) -> list[Array]:
    return [_array(output) for output in _tensors(outputs)]


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
