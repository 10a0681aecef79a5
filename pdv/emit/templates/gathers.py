"""Weights that rest cut, gathered a block at a time: for each use (ZeRO-3), or once a step. Entry: ``gather``.

The weights of a block are a *unit*: one flat all-gather when the first of them is read, while the next unit's runs
behind the block's work; the first pass learns which is next. A unit is dropped when another one is read, and gathered
again in backward; the last of a forward pass stays, for backward begins with it. Gradients of a unit are one flat
reduce-scatter, behind the rest of backward (FSDP, Zhao et al., VLDB'23).

A unit that is gathered once a step (of a pipeline) stays for all micro-batches. Their gradients are added up as they
are, of whole weights, and are one flat reduce-scatter behind the last of them (ZeRO-1, Rajbhandari et al., SC'20, 5.1).

In ``model.parameters_in_graph()`` weights are gathered one by one, and so are those that ``torch.func.functional_call``
exchanges, or that have a hook of ``register_hook``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from .gradients import GradientSums, Leaf, Leaves, local
from .kernels.buckets import Reads
from .kernels.compiled import ready
from .kernels.remembered import check_version, pack, remember, unpack
from .parallel import Axis, all_gather, gather_single, join_blocks, scatter_single
from .rounding import Rounding, note
from .stored import local_piece

LARGEST_BYTES = 256 << 20  # of a unit, gathered: what is larger is several


@contextmanager
def regathering() -> Iterator[None]:
    """Context of a forward pass: what autograd saves of gathered weights is gathered again in backward."""
    for order in _orders.values():
        order.begin()
    with saved_tensors_hooks(pack, unpack):
        yield


def gather_together(axis: Axis, *parameters: Tensor, once: bool = False) -> None:
    """Make units of parameters that are cut along ``axis``, given in the order in which they are read.

    once: gathered once a step, and kept for all of its micro-batches.
    """
    make = StepUnit if once else Unit
    filling: dict[torch.dtype, list[DTensor]] = {}
    for parameter in parameters if axis.size > 1 else ():
        assert isinstance(parameter, DTensor), "on a mesh"
        unit = filling.setdefault(parameter.dtype, [])
        if unit and sum(local_piece(x).nbytes for x in (*unit, parameter)) * axis.size > LARGEST_BYTES:
            make(axis, unit)
            unit = filling[parameter.dtype] = []
        unit.append(parameter)
    for unit in filling.values():
        make(axis, unit)


def gather(parameter: Tensor, dim: int, axis: Axis, *axes: Axis) -> Tensor:
    """As ``all_gather`` of a parameter, with those of its unit.

    axes: along which each rank uses it differently, too: of a unit that is gathered once a step.
    """
    if torch.compiler.is_compiling():
        return ready(gather, parameter, dim, axis, *axes)
    leaves = getattr(parameter, "leaves", None)
    unit = leaves.unit if isinstance(leaves, Leaves) else None
    if unit is None or not unit.sums.use_leaves or parameter._backward_hooks:  # noqa: SLF001
        return all_gather(local(parameter, *axes), dim, axis, regather=True)
    whole: Tensor = unit.get(parameter, axes)
    return note(whole)


@dataclass(eq=False)
class Order:
    """Units as a program reads them: the one that is here, and those of this pass and of the last one of its kind."""

    here: Unit | None = None
    last: tuple[Unit, bool] | None = None
    passes: dict[bool, list[Unit]] = field(default_factory=dict)  # forward, backward
    before: dict[bool, list[Unit]] = field(default_factory=dict)

    def begin(self) -> None:
        """A forward pass begins: nothing is here."""
        self.drop()
        self.last = None

    def drop(self) -> None:
        """Nothing is here."""
        if self.here is not None:
            self.here.close()
        self.here = None

    def leave(self, unit: Unit) -> None:
        """Backward of a unit is done."""
        if self.here is unit:
            self.drop()

    def reach(self, unit: Unit) -> None:
        """Weights of a unit are read now; those of the next one are on their way."""
        if self.here is not unit:
            self.drop()
            self.here = unit
            unit.open()
        backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001  # autograd's number of a backward pass
        if self.last == (unit, backward):
            return
        if self.last is None or self.last[1] != backward:
            self.before[backward], self.passes[backward] = self.passes.get(backward, []), []
        self.last = unit, backward
        found, known = self.passes[backward], self.before[backward]
        found.append(unit)
        if known[: len(found)][-1:] == [unit] and len(known) > len(found):
            known[len(found)].start()


_orders: WeakKeyDictionary[GradientSums, Order] = WeakKeyDictionary()


class Unit:
    """Parameters of one type, cut along one axis, that are gathered at once."""

    def __init__(self, axis: Axis, parameters: Sequence[DTensor]) -> None:
        self._axis, self._parameters = axis, list(parameters)
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        held: list[Leaves] = [parameter.leaves for parameter in parameters]  # type: ignore[attr-defined]
        self.sums, self._dims = held[0].sums, [leaves.cuts[axis.name] for leaves in held]
        self._rounding: Rounding | None = getattr(parameters[0], "rounding", None)
        for leaves in held:
            leaves.unit = self
        self._order = _orders.setdefault(self.sums, Order())
        self._leaves: list[Leaf] = []
        self._coming: _Coming | None = None
        self.whole: list[Tensor] = []
        self._versions: list[int] = []
        self._read: tuple[Tensor, ...] = ()
        self._root = torch.zeros((), requires_grad=True)  # of autograd's graph: leaves get theirs behind it

    def get(self, parameter: Tensor, axes: tuple[Axis, ...]) -> Tensor:
        """One of them, gathered."""
        assert not axes or not torch.is_grad_enabled(), "replicated behind the gather"
        place = self._places[id(parameter)]
        self._order.reach(self)
        if self._versions[place] != self._leaves[place].version:  # changed since
            self.open()
        if not torch.is_grad_enabled():
            return self.whole[place]
        if not self._read:
            self._read = _InGraph.apply(self._root, self)  # type: ignore[no-untyped-call]
            remember([(x, _Again(self, at, self._versions[at])) for at, x in enumerate(self._read)])
        return self._read[place]

    def again(self, place: int, version: int) -> Tensor:
        """One of them, for its backward."""
        check_version(self._leaves[place].version, version)
        self._order.reach(self)
        return self.whole[place]

    @torch.no_grad()
    def start(self) -> None:
        """Have them gathered while others are read."""
        self._leaves = [parameter.leaves.get(parameter, ()) for parameter in self._parameters]  # type: ignore[attr-defined]
        versions = [leaf.version for leaf in self._leaves]
        if self._coming is not None and self._coming.versions == versions:
            return
        if self._coming is not None:
            self._coming.work.wait()
        parts = [leaf.tensor.detach().reshape(-1) for leaf in self._leaves]
        flat = torch.cat(parts) if self._rounding is None else self._rounding.join(parts)
        blocks = flat.new_empty((self._axis.size, flat.numel()))
        work = gather_single(blocks.view(-1), flat, group=self._axis.group, async_op=True)
        self._coming = _Coming(versions, flat, blocks, work)

    @torch.no_grad()
    def open(self) -> None:
        """Have them here."""
        self.close()
        self.start()
        coming, self._coming = self._coming, None
        assert coming is not None, "started"
        coming.work.wait()
        self._versions = coming.versions
        parts = torch.split(coming.blocks, [leaf.tensor.numel() for leaf in self._leaves], 1)
        for leaf, part, dim in zip(self._leaves, parts, self._dims, strict=True):
            self.whole.append(join_blocks(part.view(self._axis.size, *leaf.tensor.shape), dim))

    def close(self) -> None:
        """Let go of them."""
        self.whole, self._read = [], ()

    def forget(self) -> None:
        """What was gathered is of memory that its parameters are not in any more."""
        if self._coming is not None:
            self._coming.work.wait()
        self._coming = None
        self._order.drop()
        self.close()

    @property
    def trained(self) -> list[bool]:
        """Which are."""
        return [leaf.tensor.requires_grad for leaf in self._leaves]

    @torch.no_grad()
    def scatter(self, grads: Sequence[Tensor | None]) -> None:
        """Sum gradients over ranks, behind the rest of backward; each leaf gets this rank's part of its own."""
        self._order.leave(self)
        given = [
            (leaf, _blocks_of(grad, dim, self._axis).flatten(1))
            for leaf, grad, dim in zip(self._leaves, grads, self._dims, strict=True)
            if grad is not None
        ]
        if not given:
            return
        blocks = torch.cat([part for _, part in given], 1).to(given[0][0].rests.dtype)  # sums as parameters rest
        self._sum([leaf for leaf, _ in given], blocks)

    def _sum(self, leaves: Sequence[Leaf], blocks: Tensor) -> None:
        """Sum [ranks, elements] over ranks, behind the rest; each leaf gets this rank's part of its own."""
        total = blocks.new_empty(blocks.size(1))
        work = scatter_single(total, blocks.view(-1), group=self._axis.of_sums.group, async_op=True)

        def finish() -> None:
            work.wait()
            for leaf, part in zip(leaves, torch.split(total, [leaf.tensor.numel() for leaf in leaves]), strict=True):
                leaf.add(part.view(leaf.tensor.shape))

        self.sums.finish_later(finish)


_Use = tuple[int, tuple[Axis, ...]]
"""Which parameter of a unit, and over which axes its gradient is summed beside that of the unit."""


class StepUnit(Unit):
    """A unit that is gathered once a step; ``_held``: its weights, of which autograd's graphs are."""

    def __init__(self, axis: Axis, parameters: Sequence[DTensor]) -> None:
        super().__init__(axis, parameters)
        self.parameters: Sequence[Tensor] = parameters
        self._held: list[Tensor] = []
        self._reads: Reads[_Use] = Reads(self.receive)
        self._last: set[_Use] = set()  # whose last micro-batch is there
        self._behind: StepUnit | None = None  # read next
        earlier = [unit for unit in self.sums.kept if isinstance(unit, StepUnit)]
        if earlier:
            earlier[-1]._behind = self  # noqa: SLF001  # of this class
        self.sums.kept.append(self)

    def begin(self) -> None:
        """See gradients.Kept."""
        super().forget()
        self._order.begin()
        if torch.is_grad_enabled():
            self._leave()

    def forget(self) -> None:
        """As of any unit."""
        super().forget()
        self.drop()

    def get(self, parameter: Tensor, axes: tuple[Axis, ...]) -> Tensor:
        """One of them; ``axes``: over which its gradient is summed beside that of the unit."""
        if not torch.is_grad_enabled():
            return super().get(parameter, axes)
        place = self._places[id(parameter)]
        use = place, tuple(axis for axis in axes if axis.size > 1)
        if self._held and self._versions[place] != self._leaves[place].version:  # changed since
            self._leave()
        if not self._held:
            self._hold()
        read = self._reads.now.get(use)
        if read is None or read.requires_grad != parameter.requires_grad:  # frozen since, or thawed
            self._last.discard(use)
            calls = not self.sums.is_quiet or self.sums.is_last(parameter)
            trained, rests = parameter.requires_grad, self._leaves[place].rests.dtype
            read = self._reads.add(use, self._held[place], rests, trained=trained, calls=calls)
        return read

    def _hold(self) -> None:
        """Have them for the rest of the step; those that are read next are on their way."""
        self._order.drop()
        self.open()
        self._held = self.whole
        self.close()
        if self._behind is not None and not self._behind._held:  # noqa: SLF001  # of this class
            self._behind.start()

    def _leave(self) -> None:
        """Let go of them; graphs that have them may give them gradients later."""
        self._reads.end(*self._reads.now)
        self._held, self._last = [], set()

    def drop(self) -> None:
        """Let go of them, and of what was added up."""
        self._leave()
        self._reads.take()

    def call_back(self) -> None:
        """See gradients.Kept."""
        self._reads.call_back(*self._reads.now)

    def receive(self, use: _Use, read: Tensor) -> None:
        """What is read, or was, has its gradient of a pass; behind the last, all are sent once they are there."""
        self.sums.wait_for_end()
        if self._reads.now.get(use) is not read:
            self._reads.take_over(use, read)
        elif self.sums.is_last(self._parameters[use[0]]):
            self._last.add(use)
            if len(self._last) == len(self._reads.now):
                self.send()

    @torch.no_grad()
    def send(self) -> None:
        """Sum what was added up over ranks; each leaf gets this rank's part of its own."""
        self._leave()  # also of what is not trained: it may be from the next step on
        added = self._reads.take()
        if not added:
            return
        parts = [_blocks_of(grad, self._dims[place], self._axis).flatten(1) for (place, _), grad in added.items()]
        leaves = [self._parameters[place].leaves.get(self._parameters[place], axes) for place, axes in added]  # type: ignore[attr-defined]
        self._sum(leaves, torch.cat(parts, 1))

    @property
    def is_waiting(self) -> bool:
        """See gradients.Kept."""
        return self._reads.is_waiting


def _blocks_of(grad: Tensor, dim: int, axis: Axis) -> Tensor:
    """[axis.size, *block], where it lies."""
    shape = (*grad.shape[:dim], axis.size, grad.size(dim) // axis.size, *grad.shape[dim + 1 :])
    return grad.reshape(shape).movedim(dim, 0)


@dataclass(frozen=True)
class _Coming:
    """A gather that runs: of which versions, from what, into what."""

    versions: list[int]
    flat: Tensor
    blocks: Tensor
    work: Any  # of torch.distributed, which names no type that has ``wait``


@dataclass(frozen=True)
class _Again:
    """How to get a gathered parameter again."""

    unit: Unit
    place: int
    version: int

    def again(self) -> Tensor:
        """All of it."""
        return self.unit.again(self.place, self.version)


class _InGraph(torch.autograd.Function):
    """A unit in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, unit: Unit) -> tuple[Tensor, ...]:
        del root
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        whole = [x.detach() for x in unit.whole]
        ctx.mark_non_differentiable(*(x for x, trained in zip(whole, unit.trained, strict=True) if not trained))
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        ctx.unit.scatter(grads)
        return None, None
