"""A pipeline whose micro-batches pass in slices of time: ``SlicedModule`` (TeraPipe, Li et al., ICML'21).

Where a position depends on earlier ones alone, the next stage may begin with the first positions of a micro-batch while
this one goes on with later ones. ``model.py`` says where: ``now`` is what a slice reads of what is there at once,
``earlier`` what slices up to now made, with zeros for those to come, ``at_end`` what all made, once the last has.
Passes go in 1F1B's order; backward of a micro-batch begins with its last slice, so that each has all of its gradients,
those that later slices gave included. Outside of a step of a pipeline all of time is one slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .accumulate import Given
from .calls import check_inputs
from .later import Neighbours, in_turns, unbroken
from .parallel import Axis
from .pipeline import PipelinedModule, Stage, _Link
from .runtime import Mesh, Weights

TIME = "time"


class Time:
    """In how many slices all of time is, which one runs, and what those before it left of its micro-batch.

    It stands where programs have an axis of the mesh; a copied model has the same.
    """

    name = TIME

    def __init__(self) -> None:
        self.size, self.rank = 1, 0
        self.left: list[tuple[Tensor, Tensor]] = []
        """Of what this slice made, each value that others read, and what they read it by."""
        self._before: list[list[Tensor]] = []
        self._place = 0

    def __deepcopy__(self, memo: Any) -> Time:
        """Itself: between steps there is nothing of a model in it."""
        return self

    def move(self, slices: int, rank: int, before: list[list[Tensor]]) -> None:
        """Before a pass of one of so many slices; ``before``: by place in the program, what earlier ones left."""
        self.size, self.rank, self.left, self._before, self._place = slices, rank, [], before, 0

    def leave(self, x: Tensor) -> list[Tensor]:
        """Let later slices read a value by a tensor apart; those of slices up to now."""
        if self._place == len(self._before):
            self._before.append([])
        found, self._place = self._before[self._place], self._place + 1
        apart = x.detach().requires_grad_(x.requires_grad)
        self.left += [(x, apart)] if x.requires_grad else []
        found.append(apart)
        return [*found[:-1], x]


def now(x: Tensor, dim: int, time: Time) -> Tensor:
    """Of what is there at once the positions of this slice."""
    size = x.size(dim) // time.size
    return x if time.size == 1 else x.narrow(dim, time.rank * size, size)


def earlier(x: Tensor, dim: int, time: Time) -> Tensor:
    """What slices up to now made, and zeros for those to come, which change nothing."""
    if time.size == 1:
        return x
    known = time.leave(x)
    return torch.cat([*known, *[torch.zeros_like(x)] * (time.size - len(known))], dim)


def at_end(x: Tensor, dim: int, time: Time) -> Tensor:
    """What all slices made, of the last one; of others what they made."""
    if time.size == 1:
        return x
    known = time.leave(x)
    return torch.cat(known, dim) if len(known) == time.size else x


@dataclass(frozen=True)
class MeshInTime(Mesh):
    """A mesh that knows what time it is."""

    time: Time = field(default_factory=Time, compare=False)

    def __getitem__(self, name: str | tuple[str, ...]) -> Axis:
        """See Mesh."""
        return self.time if name == TIME else super().__getitem__(name)  # type: ignore[return-value]  # stands for one

    @classmethod
    def of(cls, mesh: Mesh) -> MeshInTime:
        """The same mesh."""
        return cls(**{each.name: getattr(mesh, each.name) for each in fields(mesh)})


class SlicedModule(PipelinedModule):
    """A pipeline that a step runs slice by slice.

    slices: of each micro-batch in time; the others: as ``PipelinedModule``.
    """

    def __init__(self, mesh: Mesh, weights: Weights, stages: Sequence[Stage], *, slices: int, **options: Any) -> None:
        mesh = MeshInTime.of(mesh)
        super().__init__(mesh, weights, stages, **options)
        self.slices, self.time = slices, mesh.time
        cut, axes = options.get("cuts", {}), {axis.name: axis.size for axis in mesh.axes}
        axes[TIME] = slices
        ways = {size: math.prod(axes[name] for name in names) for size, names in cut.items()}
        self._check = partial(check_inputs, options["inputs"], ways, options.get("most", {}), self)

    def run_given(self, given: Given) -> Tensor:
        """See ParallelModule.

        Raises:
            RuntimeError: if a hook would see parts of gradients.
        """
        if self.mesh.stage.size > 1 and any(x._backward_hooks for x in self.parameters()):  # noqa: SLF001
            raise RuntimeError(
                f"hooks-of-parts: a parameter has a hook of register_hook, and micro-batches pass in {self.slices} "
                "slices, of each of which it would see a part of the gradient. Use "
                "register_post_accumulate_grad_hook, or change gradients behind train_step."
            )
        return super().run_given(given)

    def run_batches(self, given: Given) -> None:
        """See ParallelModule.

        Raises:
            ValueError: if inputs do not divide into slices.
        """
        if self.mesh.stage.size == 1:
            super().run_batches(given)
            return
        self._check(tuple(given.batches[0]), {})
        with self._in_slices(), self.mesh.sums.hold_quietly(), unbroken(self):
            _Slices(self, given).run()
        self.end_step()

    @contextmanager
    def _in_slices(self) -> Iterator[None]:
        """Context of a step; then time is one slice again, and holds nothing."""
        try:
            self.time.move(self.slices, 0, [])
            yield
        finally:
            self.time.move(1, 0, [])


class Turn(NamedTuple):
    """A slice of a micro-batch through a stage."""

    number: int
    slice: int
    backward: bool = False


class _Slices:
    """A step of one stage."""

    def __init__(self, model: SlicedModule, given: Given) -> None:
        self._model, self._given = model, given
        (place,) = model.own
        self._link = _Link(model, place, model._carried())  # noqa: SLF001
        self._neighbours = Neighbours(model, place)
        self._flight: dict[tuple[int, int], tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Any]]] = {}
        self._before: dict[int, list[list[Tensor]]] = {}  # by micro-batch

    def run(self) -> None:
        """All passes."""
        model, place = self._model, self._link.place
        like = model.sent(self._given)[place : place + 2]
        passes = passes_in_slices(place, len(model.chain), len(self._given.batches), model.slices)
        self._neighbours.post((), like, back=False, after=False)
        for taken, after in zip(passes, [*passes[1:], None], strict=True):
            found = (self._backward if taken.backward else self._forward)(taken, self._neighbours.wait())
            wanted = () if after is None else like
            self._neighbours.post(found, wanted, back=taken.backward, after=after is not None and after.backward)
        self._neighbours.wait()

    def _forward(self, taken: Turn, received: Sequence[Tensor]) -> Sequence[Tensor]:
        """What a pass has for the stage behind."""
        model, given = self._model, self._given
        model.time.move(model.slices, taken.slice, self._before.setdefault(taken.number, []))
        inputs = [x.requires_grad_(x.is_floating_point()) for x in received]
        outputs = self._link.run(inputs, given.batches[taken.number])
        is_last = self._neighbours.behind is None
        if is_last:  # its loss is of all positions
            whole = taken.slice == model.slices - 1
            outputs = (given.loss_of(outputs, torch.tensor(taken.number)),) if whole else ()
        self._flight[taken.number, taken.slice] = inputs, outputs, model.time.left
        return () if is_last else [x.detach() for x in outputs]

    def _backward(self, taken: Turn, received: Sequence[Tensor]) -> Sequence[Tensor]:
        """What a pass has for the stage before: from what it gave the next stage, and what it left later slices."""
        inputs, outputs, left = self._flight.pop((taken.number, taken.slice))
        given = [x for x in outputs if x.is_floating_point()]
        grads = [None] * len(given) if self._neighbours.behind is None else received
        pairs = [*zip(given, grads, strict=True), *((x, apart.grad) for x, apart in left if apart.grad is not None)]
        roots = [pair for pair in pairs if pair[0].requires_grad]

        def run(last_backward: bool) -> None:
            if roots:
                torch.autograd.backward([x for x, _ in roots], [grad for _, grad in roots])

        is_last = taken.slice == 0 and taken.number == len(self._given.batches) - 1
        self._link.summing(run)(last_backward=is_last)
        if taken.slice == 0:
            del self._before[taken.number]
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs if x.requires_grad]


def passes_in_slices(stage: int, stages: int, count: int, slices: int) -> list[Turn]:
    """Of a stage: forward in order, as many ahead as stages behind and later slices ask for, then in turns."""
    forward = [Turn(number, at) for number in range(count) for at in range(slices)]
    backward = [Turn(number, at, backward=True) for number in range(count) for at in reversed(range(slices))]
    return in_turns(forward, backward, stages - 1 - stage + slices - 1)
