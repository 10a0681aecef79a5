"""Sums of gradients over ranks: in buckets, started while backward still runs. Entry point: ``local``.

A forward pass reads a parameter through a *leaf*, a plain tensor in the same memory. Backward gives a leaf what this
rank contributes to the gradient. Contributions to be summed over the same axes wait in a bucket, filled as backward
meets leaves, in one order on all ranks. A full one is summed behind the rest of backward; at its end ``parameter.grad``
is a part of a bucket's sum. Then hooks of ``parameter.register_post_accumulate_grad_hook`` are called.

Autograd's graph holds leaves for parameters. So ``torch.autograd.grad(loss, parameters)``, derivatives of gradients and
``backward(inputs=parameters)`` need a forward pass inside the model's ``parameters_in_graph()``, in which each gradient
is summed by itself; so are those of ``torch.func.functional_call`` or with ``register_hook``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .kernels.buckets import Beside, Buckets, call_back, silent
from .kernels.compiled import ready
from .kernels.scaled import Guess, Scaling
from .parallel import Axis, replicate
from .rounding import DeviceCopy, Rounding, Versions, note
from .stored import local_piece, placed_as


def local(parameter: Tensor, *axes: Axis) -> Tensor:
    """The piece of a parameter that this rank holds, for the forward pass; its gradient is the same piece.

    Along ``axes`` each rank uses it differently, as of different data: there its gradients are summed.
    """
    if torch.compiler.is_compiling():
        return ready(local, parameter, *axes)
    leaves = getattr(parameter, "leaves", None)
    rounding: Rounding | None = getattr(parameter, "rounding", None)
    if leaves is not None and leaves.sums.use_leaves and not parameter._backward_hooks:  # noqa: SLF001
        leaf: Tensor = leaves.get(parameter, axes).tensor
        return note(leaf if rounding is None else rounding(leaf))
    if isinstance(parameter, DTensor):
        parameter = parameter.to_local(grad_placements=parameter.placements)
        if rounding is not None and rounding.device is not None:
            parameter = parameter.to(rounding.device)
    for axis in axes:
        parameter = replicate(parameter, axis)
    return note(parameter if rounding is None else rounding(parameter))


@dataclass(eq=False)
class Leaf:
    """A tensor in the memory of a parameter, or a device's copy of it, and over which axes its gradient is summed.

    rests: in the memory of the parameter. key: of the buckets that it goes into; num_bytes: of its gradient.
    """

    tensor: Tensor
    parameter: Tensor
    axes: tuple[Axis, ...]
    rests: Tensor
    in_bucket: bool = False

    def __post_init__(self) -> None:  # once: in backward, what a CPU reads has left its caches
        self.key = (*(axis.name for axis in self.axes), self.rests.dtype, self.tensor.device)
        self.size = self.rests.numel()
        self.num_bytes = self.size * self.rests.element_size()

    @property
    def version(self) -> int:
        """How often the parameter was changed in place: by its memory, and as a DTensor, which torch counts apart."""
        return self.rests._version + self.parameter._version  # noqa: SLF001

    def add(self, grad: Tensor) -> None:
        """Give it more of its gradient."""
        self.tensor.grad = grad if self.tensor.grad is None else self.tensor.grad.add_(grad)

    def take(self) -> Tensor:
        """What backward gave it, which it gives away."""
        grad = self.tensor.grad
        assert grad is not None, "asked of leaves with gradients"
        self.tensor.grad, self.in_bucket = None, False
        return grad.detach()


class Leaves:
    """The leaves of one parameter, one for each list of axes that it is used with, and its shard for optimizers.

    cuts: the dim that each axis cuts. unit: with what it is gathered (``gathers.py``), if with anything.
    """

    def __init__(self, sums: GradientSums, cuts: Mapping[str, int]) -> None:
        self.sums, self.cuts = sums, cuts
        self.unit: Any = None  # it knows leaves
        self._shard: Tensor | None = None
        self.copy: DeviceCopy | None = None
        self.by_axes: dict[tuple[Axis | int | None, ...], Leaf] = {}
        self._versions: Versions | None = None

    def get(self, parameter: Tensor, axes: tuple[Axis, ...]) -> Leaf:
        """The leaf for these axes, trained if the parameter is."""
        key = (turn := self.sums.turn), *axes
        leaf = self.by_axes.get(key)
        if leaf is None:
            rests = self.shard(parameter) if turn is None else self.versions(self.shard(parameter)).of[turn]
            if self.sums.offload is not None and self.copy is None:
                self.copy = DeviceCopy(rests, self.sums.offload)
            read = rests if self.copy is None else self.copy.tensor
            leaf = self.by_axes[key] = self.sums.add_leaf(parameter, tuple(x for x in axes if x.size > 1), rests, read)
        if self.copy is not None:
            self.copy.refresh(leaf.version)
        if leaf.tensor.requires_grad != parameter.requires_grad:
            leaf.tensor.requires_grad_(parameter.requires_grad)
        return leaf

    def shard(self, parameter: Tensor) -> Tensor:
        """A tensor in the memory of the parameter that no graph knows."""
        if self._shard is None:
            with torch.inference_mode(False), torch.no_grad():
                self._shard = local_piece(parameter).detach()
        return self._shard

    def has(self, shard: Tensor) -> bool:
        """Whether that is it, still."""
        return self._shard is shard

    def move(self, parameter: Tensor) -> None:
        """Let a parameter go on in the memory of the other version (``GradientSums.turn``)."""
        shard = self.shard(parameter)
        held = parameter._local_tensor if isinstance(parameter, DTensor) else parameter  # noqa: SLF001  # as FSDP2
        shard.data = held.data = self.versions(shard).move(self.sums.turn or 0)

    def versions(self, shard: Tensor) -> Versions:
        """Of what this rank holds."""
        self._versions = self._versions or Versions(shard, self.sums.turn or 0)
        return self._versions

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Nothing of it is copied or saved with a parameter: the copy is summed by itself."""
        return type(None), ()


class Kept(Protocol):
    """Parameters that a step keeps whole, whose gradients are added up so and sent behind its last micro-batch."""

    parameters: Sequence[Tensor]

    @property
    def is_waiting(self) -> bool:
        """Whether there are gradients that were not sent."""

    def begin(self) -> None:
        """A pass begins by itself, or a step: copies from before are no more read."""

    def start(self) -> None:
        """Have the parameters gathered."""

    def call_back(self) -> None:
        """Have autograd call, in the last pass, for gradients of which nothing called back before."""

    def send(self) -> None:
        """Sum the gradients over ranks; leaves get theirs."""

    def drop(self) -> None:
        """Forget them."""


class GradientSums:
    """The leaves of a model, and the buckets in which their gradients are summed.

    bucket_bytes: a bucket is started once it holds so much. offload: how parameters are read that rest on the host.
    turn: which of two versions of parameters is read, 0 or 1; None where there is one.
    """

    def __init__(
        self, device_mesh: DeviceMesh | None = None, bucket_bytes: int = 25 << 20, offload: Rounding | None = None
    ) -> None:
        self.device_mesh, self.offload, self.buckets = device_mesh, offload, Buckets(bucket_bytes)
        self.use_leaves = True
        self.turn: int | None = None
        self._leaves: list[Leaf] = []
        self._silent: dict[Leaf, Any] = {}  # what autograd would call for them
        self._holds, self.is_quiet = 0, False
        self._complete: frozenset[int] = frozenset()  # parameters that are summed though gradients are held
        self._backward = -1  # autograd's number of the pass at whose end ``_end`` is called
        self._unfinished: list[Callable[[], None]] = []
        self.kept, self.scaling, self.guess = list[Kept](), Scaling(), Guess()

    def __deepcopy__(self, memo: Any) -> GradientSums:
        """Of a copied model: nothing waits there."""
        return GradientSums(self.device_mesh, self.buckets.bucket_bytes, self.offload)

    def add_leaf(self, parameter: Tensor, axes: tuple[Axis, ...], rests: Tensor, read: Tensor) -> Leaf:
        """A leaf of a parameter that is summed over these axes; ``read``: what forward reads of what ``rests``."""
        with torch.inference_mode(False), torch.no_grad():
            leaf = Leaf(read.detach().requires_grad_(), parameter, axes, rests)
        if read.dtype != rests.dtype:
            leaf.tensor.grad_dtype = rests.dtype
        hook = partial(_receive, ref(self), ref(leaf))  # Python's collector does not see into what a hook holds
        leaf.tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._leaves.append(leaf)
        return leaf

    @contextmanager
    def hold(self, *, quietly: bool = False) -> Iterator[None]:
        """Context of backward passes whose gradients wait, unsummed, for the next one outside, or for ``flush``."""
        before, self._holds, self.is_quiet = self.is_quiet, self._holds + 1, quietly
        try:
            yield
        finally:
            self._holds, self.is_quiet = self._holds - 1, before
            for unit in self.kept if quietly else ():  # of what it reads still
                unit.call_back()

    @contextmanager
    def hold_quietly(self) -> Iterator[None]:
        """The same within a step: nothing calls back for gradients, but those of which a pass is ``complete``."""
        with self.hold(quietly=True), silent(self._leaves) as self._silent:
            yield

    @contextmanager
    def only_pass(self) -> Iterator[None]:
        """Context of the one backward pass of a step; every ``parameter.grad`` is final behind it."""
        adds_up = bool(self.kept or self._holds) or self.is_waiting
        if adds_up:
            yield
            return
        try:
            with self.buckets.triggers.of_pass(self._leaves):
                yield
                if self.is_waiting:  # of what gave gradients nothing called back
                    self.end()
        except BaseException:
            self.drop()
            raise

    def beside(self, numbers: Tensor, axes: Sequence[Axis]) -> Beside:
        """Numbers [n], to be summed over axes with the gradients of the next pass."""
        self.buckets.beside = [Beside(numbers, axes)]
        return self.buckets.beside[0]

    def shows(self, model: nn.Module, inputs: Iterable[Tensor], batch_axes: Sequence[Axis]) -> bool:
        """Whether anything sees gradients of a step before they are summed, or ranks that have other rows' meet."""
        modules = [*model.modules()]
        kinds = [x for m in modules for x in (m._forward_hooks, m._backward_hooks, m._backward_pre_hooks)]  # noqa: SLF001
        hooks = (hook for kind in kinds for hook in kind.values())
        parameters = (p for m in modules for p in m._parameters.values() if p is not None and p.requires_grad)  # noqa: SLF001
        return (
            bool(self.kept or self._holds or not self.use_leaves or self.is_waiting)
            or self.device_mesh is None
            or self.device_mesh.size() != math.prod(axis.size for axis in batch_axes)
            or any(x.requires_grad for x in inputs)
            or any(not str(getattr(hook, "__module__", "")).startswith(f"{__package__}.") for hook in hooks)
            or any(getattr(p, "leaves", None) is None or p._backward_hooks for p in parameters)  # noqa: SLF001
            or bool(nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]  # noqa: SLF001
        )

    @contextmanager
    def complete(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Context of the last backward pass of parameters whose gradients are held: their sums start, for ``flush``."""
        self._complete = frozenset(map(id, parameters))
        own = [leaf for leaf in self._leaves if id(leaf.parameter) in self._complete]
        try:
            call_back(self._silent, own)
            units = [unit for unit in self.kept if all(id(x) in self._complete for x in unit.parameters)]
            for unit in units:
                unit.call_back()
            yield
            with torch.no_grad():
                for unit in units:
                    unit.send()
                self.buckets.start_all([leaf for leaf in own if leaf.tensor.grad is not None])
        finally:
            self._complete = frozenset()

    @contextmanager
    def without_leaves(self) -> Iterator[None]:
        """Context of forward passes that read the parameters themselves, so that autograd's graph has them."""
        before, self.use_leaves = self.use_leaves, False
        try:
            yield
        finally:
            self.use_leaves = before

    def finish_later(self, finish: Callable[[], None]) -> None:
        """Call it, which gives leaves their gradients, when the next one comes, or at the end of this backward pass."""
        self._finish()
        self._unfinished.append(finish)
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  # else ``flush`` is under way
            self.wait_for_end()

    def drop(self) -> None:
        """Forget what waits."""
        self._finish()
        self.buckets.drop()
        self.guess.drop()
        for unit in self.kept:
            unit.drop()
        for leaf in self._leaves:
            leaf.tensor.grad, leaf.in_bucket = None, False

    def forget(self, parameter: Tensor) -> None:
        """Leaves of a parameter, which has other memory now."""
        self._leaves = [leaf for leaf in self._leaves if leaf.parameter is not parameter]

    @property
    def is_held(self) -> bool:
        """Whether gradients of backward passes are not summed now."""
        return self._holds > 0

    @property
    def is_waiting(self) -> bool:
        """Whether there are gradients that were not summed yet."""
        added = self.buckets.is_waiting or any(unit.is_waiting for unit in self.kept)
        return added or any(leaf.tensor.grad is not None for leaf in self._leaves)

    def is_last(self, parameter: Tensor) -> bool:
        """Whether what backward gives a parameter now is the last before its sum."""
        return not self._holds or id(parameter) in self._complete

    @torch.no_grad()
    def flush(self) -> None:
        """Sum everything that waits; every ``parameter.grad`` is final then. All ranks must call it."""
        for unit in self.kept:
            unit.send()
        self._finish()
        waiting = [leaf for leaf in self._leaves if leaf.tensor.grad is not None]
        self.buckets.triggers.note(waiting, is_full=False)
        self.buckets.start_all(waiting)
        summed = [*self.buckets.finish(), *((leaf, leaf.take()) for leaf in waiting if not leaf.axes)]
        self.guess.scale([piece for _, piece in summed])
        if self.offload is not None:
            summed = [(leaf, self.offload.on_host(piece)) for leaf, piece in summed]
            self.offload.wait()
        for leaf, piece in summed:
            self._give(leaf.parameter, piece)
        self.scaling.begin(leaf.parameter for leaf, _ in summed)
        for parameter in {id(leaf.parameter): leaf.parameter for leaf, _ in summed}.values():
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():  # noqa: SLF001
                hook(parameter)

    def receive(self, leaf: Leaf) -> None:
        """What autograd calls when it has added all of a backward pass to the gradient of a leaf."""
        self.wait_for_end()
        if self.is_last(leaf.parameter):
            for one in (*self.buckets.triggers.before(leaf), leaf):
                self.buckets.put(one)

    def wait_for_end(self) -> None:
        """Have all that waits summed at the end of this backward pass, unless it is held, or dropped if it fails."""
        if (backward := torch._C._current_graph_task_id()) != self._backward:  # noqa: SLF001
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(_End(self))  # noqa: SLF001

    def end(self) -> None:
        """A backward pass ends."""
        self._backward = -1
        self._finish()
        if not self._holds:
            self.flush()

    def _finish(self) -> None:
        unfinished, self._unfinished = self._unfinished, []
        for finish in unfinished:
            finish()

    def _give(self, parameter: Tensor, piece: Tensor) -> None:
        if isinstance(parameter, DTensor):  # else of a stage on one device
            if isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements:
                parameter.grad.to_local().add_(piece)
                return
            piece = placed_as(parameter, piece, self.device_mesh)
        parameter.grad = piece if parameter.grad is None else parameter.grad + piece


class _End:
    """What autograd calls at the end of a pass, and lets go of, uncalled, where that fails: no next one adds to it."""

    def __init__(self, sums: GradientSums) -> None:
        self._sums: GradientSums | None = sums

    def __call__(self) -> None:
        sums, self._sums = self._sums, None
        assert sums is not None, "called once"
        sums.end()

    def __del__(self) -> None:
        if self._sums is not None:
            self._sums.drop()


def _receive(sums: ref[GradientSums], leaf: ref[Leaf], _: Tensor) -> None:
    if (held := sums()) is not None and (given := leaf()) is not None:
        held.receive(given)
