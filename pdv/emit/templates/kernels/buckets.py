"""Buckets of gradients, what fills them, and what is summed beside. Entry points: ``Buckets``, ``guess_weight``.

What autograd calls in Python for each gradient finds nothing of it in a CPU's caches, behind products that filled them:
40 us, and of a small ViT's step 2 %. So would what copies gradients long after they were made. Steps give leaves their
gradients in one order, and in the next one only those call back that fill a piece of a bucket, which is copied then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakMethod

import torch
from torch import Tensor

from pdv.emit.templates.kernels.refused import told
from pdv.emit.templates.parallel import Axis, all_reduce_steps

if TYPE_CHECKING:
    from pdv.emit.templates.gradients import GradientSums, Leaf

Key = tuple[object, ...]
Use = TypeVar("Use")
PIECE_BYTES = 4 << 20  # of gradients that are copied at once on a CPU: its caches have most of them still


class Sum:
    """The sum of ``x`` over ranks, in place, under way until it is waited for."""

    def __init__(self, x: Tensor, axes: Sequence[Axis]) -> None:
        self._x, self._steps = x, all_reduce_steps(x.view(-1), axes)
        next(self._steps, None)

    def wait(self) -> Tensor:
        """The sum, once it is there."""
        for _ in self._steps:
            pass
        return self._x


@dataclass(eq=False)
class Beside:
    """A few numbers that are summed with gradients, in a bucket of theirs, or alone if there is none by then."""

    numbers: Tensor
    axes: Sequence[Axis]
    is_summed: bool = False

    def goes_with(self, leaf: Leaf) -> bool:
        """Whether a leaf's gradient is summed over the same ranks, in the same type."""
        names = ("_".join(axis.name for axis in axes) for axes in (self.axes, leaf.axes))
        return leaf.key[-2:] == (self.numbers.dtype, self.numbers.device) and len({*names}) == 1

    def wait(self) -> Tensor:
        """The sums; collective, if a bucket has not had them."""
        if not self.is_summed:
            self.is_summed = True
            Sum(self.numbers, self.axes).wait()
        return self.numbers


def guess_weight(
    sums: GradientSums, totals: Tensor, axes: Sequence[Axis], failed: list[Exception], *, shows: bool
) -> tuple[Tensor, Callable[[], Tensor]]:
    """As ``losses.batch_loss``, of one loss with its weight; ranks wait for one another only if that is not guessed.

    totals: [2, 1], this rank's loss and its weight, on a CPU, which makes few tensors of them: each costs it 10 us.
    """
    own_loss, own_weight = totals.detach().flatten().tolist()
    numbers = totals.new_tensor([own_loss, len(failed), own_weight, shows])
    summed = sums.beside(numbers, axes)
    weight = sums.guess.begin(summed)
    if weight is None:
        weight = float(told(Sum(totals.new_tensor([own_weight, len(failed)]), axes).wait(), 1, failed))

    def whole() -> Tensor:
        told(summed.wait()[:2], 1, failed)
        return numbers[0] / sums.guess.note(numbers)

    return totals[0, 0] / weight, whole


@dataclass(eq=False)
class Bucket:
    """Contributions of one type, to be summed over the same axes.

    expected: elements that it had in the last step; 0: not known. piece: leaves that fill the next piece, of so many
    bytes that a CPU's caches have.
    """

    expected: int
    leaves: list[Leaf] = field(default_factory=list)
    piece: list[Leaf] = field(default_factory=list)
    num_bytes: int = 0
    piece_bytes: int = 0
    flat: Tensor | None = None
    steps: Iterator[bool] = field(default_factory=lambda: iter(()))
    is_quick: bool = False  # whether what it waits for now is soon done, and more has to be started then
    _beside: Sequence[Beside] = ()
    _copied: int = 0  # leaves
    _filled: int = 0  # elements

    def add(self, leaf: Leaf) -> None:
        """Let a leaf's gradient be summed with the others."""
        self.leaves.append(leaf)
        self.piece.append(leaf)
        self.num_bytes += leaf.num_bytes
        self.piece_bytes += leaf.num_bytes if leaf.tensor.device.type == "cpu" else 0

    def copy(self, flats: list[Tensor]) -> None:
        """Copy what leaves hold, which they give away, if there is room for as much as in the last step."""
        self.piece, self.piece_bytes = [], 0
        leaves = self.leaves[self._copied :]
        if self._filled + sum(leaf.size for leaf in leaves) <= self.expected:
            self.flat = take_flat(self.expected, leaves[0].rests, flats) if self.flat is None else self.flat
            self._fill(self._take())

    def start(self, beside: Sequence[Beside], flats: list[Tensor]) -> None:
        """Start to sum what it has, and numbers ``beside`` it; see ``take_flat``."""
        parts = [*self._take(), *(one.numbers for one in beside)]
        size = self._filled + sum(part.numel() for part in parts)
        if self.flat is None or size > self.flat.numel():
            parts = parts if self.flat is None else [self.flat[: self._filled], *parts]
            self.flat, self._filled = take_flat(size, parts[0], flats), 0
        self._fill(parts)
        self.flat, self._beside = self.flat[:size], beside
        self.steps = all_reduce_steps(self.flat, [axis.of_sums for axis in self.leaves[0].axes])
        self.advance()

    def advance(self) -> bool:
        """Wait for the collective that runs, and start the next; False if there is none."""
        self.is_quick = bool(quick := next(self.steps, None))
        return quick is not None

    def pieces(self) -> Iterator[tuple[Leaf, Tensor]]:
        """The sum for each leaf, as a view; numbers beside them have theirs."""
        assert self.flat is not None, "started"
        sizes = [*(leaf.size for leaf in self.leaves), *(one.numbers.numel() for one in self._beside)]
        parts = torch.split(self.flat, sizes)
        for one, part in zip(self._beside, parts[len(self.leaves) :], strict=True):
            one.numbers.copy_(part)
            one.is_summed = True
        for leaf, part in zip(self.leaves, parts, strict=False):
            yield leaf, part.view(leaf.tensor.shape)

    def _take(self) -> list[Tensor]:
        leaves, self._copied = self.leaves[self._copied :], len(self.leaves)
        return [leaf.take().reshape(-1) for leaf in leaves]

    def _fill(self, parts: list[Tensor]) -> None:
        assert self.flat is not None, "taken"
        if parts:
            begin, self._filled = self._filled, self._filled + sum(part.numel() for part in parts)
            torch.cat(parts, out=self.flat[begin : self._filled])


def take_flat(size: int, like: Tensor, flats: list[Tensor]) -> Tensor:
    """Memory for elements of a type, on a CPU one of ``flats`` that no tensor reads any more.

    Fresh pages would cost it more than what is copied there; a GPU's allocator hands out the same memory by itself.
    """
    if like.device.type != "cpu":
        return like.new_empty(size)
    unread = [x for x in flats if _is_unread(x)]
    flat = next((x for x in unread if (x.numel(), x.dtype) == (size, like.dtype)), None)
    if flat is None:
        flat = like.new_empty(size)
        flats[:] = [*(x for x in flats if all(x is not other for other in unread)), flat]
    return flat.view(-1)  # a view is seen to read it


def _is_unread(flat: Tensor) -> bool:
    memory = flat.untyped_storage()
    held = torch._C._storage_Use_Count(memory._cdata)  # noqa: SLF001
    return held <= 2 and not flat.is_shared()  # type: ignore[no-untyped-call]  # by ``flat`` and by ``memory``


class Buckets:
    """The buckets of a model's gradients, from one pass to the next.

    bucket_bytes: one is started once it holds so much. piece_bytes: of what is copied there at once on a CPU. beside:
    numbers that go with the first that they may go with.
    """

    def __init__(self, bucket_bytes: int, piece_bytes: int = PIECE_BYTES) -> None:
        self.bucket_bytes, self.piece_bytes, self.triggers = bucket_bytes, piece_bytes, Triggers()
        self.beside: list[Beside] = []
        self._filling: dict[Key, Bucket] = {}
        self._running: list[Bucket] = []
        self._flats: list[Tensor] = []
        self._last: dict[Key, list[int]] = {}  # elements of the buckets of the last pass, by what goes into them
        self._now: dict[Key, list[int]] = {}  # of those that were started in this one

    @property
    def is_waiting(self) -> bool:
        """Whether any gradient is in one."""
        return bool(self._filling or self._running)

    def put(self, leaf: Leaf) -> None:
        """Put a gradient into the bucket of its axes, if it has any."""
        if not leaf.axes or leaf.in_bucket or leaf.tensor.grad is None:
            return
        bucket = self._filling.get(leaf.key)
        if bucket is None:
            last, now = (sizes.get(leaf.key, ()) for sizes in (self._last, self._now))
            bucket = self._filling[leaf.key] = Bucket(last[len(now)] if len(now) < len(last) else 0)
        leaf.in_bucket = True
        bucket.add(leaf)
        is_full = bucket.num_bytes >= self.bucket_bytes
        if is_full or bucket.piece_bytes >= self.piece_bytes:
            self.triggers.note(bucket.piece, is_full=True)
            with torch.no_grad():
                bucket.copy(self._flats)
        if is_full:
            self._start(self._filling.pop(leaf.key))

    def start_all(self, leaves: Sequence[Leaf]) -> None:
        """With these, start to sum all that is in buckets."""
        for leaf in leaves:
            self.put(leaf)
        filled, self._filling = self._filling, {}
        for bucket in filled.values():
            self._start(bucket)

    def finish(self) -> list[tuple[Leaf, Tensor]]:
        """Wait for all sums, each of which is a view of a bucket."""
        done, self._running = self._running, []
        going = done
        while going:  # bucket after bucket, one step each: all ranks in this order
            going = [bucket for bucket in going if bucket.advance()]
        self._last, self._now = self._now or self._last, {}
        return [pair for bucket in done for pair in bucket.pieces()]

    def drop(self) -> None:
        """Forget what is in them."""
        self._filling, self._running, self.beside, self._now = {}, [], [], {}

    def _start(self, bucket: Bucket) -> None:
        for earlier in [running for running in self._running if running.is_quick]:
            earlier.advance()
        leaf = bucket.leaves[0]
        beside = [one for one in self.beside if one.goes_with(leaf)]
        self.beside = [one for one in self.beside if one not in beside]
        with torch.no_grad():
            bucket.start(beside, self._flats)
        assert bucket.flat is not None, "started"
        self._now.setdefault(leaf.key, []).append(bucket.flat.numel())
        self._running.append(bucket)


class Triggers:
    """Leaves whose gradients filled pieces in the last step, and those whose gradients were there by then."""

    def __init__(self) -> None:
        self._leaves: list[Leaf] = []  # of the model, then
        self._known: list[tuple[bool, list[Leaf]]] = []  # piece by piece: whether it was filled, and by what
        self._noted: list[tuple[bool, list[Leaf]]] | None = None  # of this pass; None outside of ``of_pass``
        self._before: dict[Leaf, list[Leaf]] = {}

    def note(self, leaves: Sequence[Leaf], *, is_full: bool) -> None:
        """These fill a piece, or are what is left at the end."""
        if self._noted is not None:
            self._noted.append((is_full, [*leaves]))

    def before(self, leaf: Leaf) -> Sequence[Leaf]:
        """Those of a leaf's piece that did not call back."""
        return self._before.get(leaf, ())

    @contextmanager
    def of_pass(self, leaves: list[Leaf]) -> Iterator[None]:
        """Context of a backward pass: of the ``leaves`` only those call back that filled a piece in the last one.

        Behind one that gives gradients otherwise, all call back in the next.
        """
        known = self._known if leaves == self._leaves else []
        self._before = {each[-1]: each[:-1] for is_full, each in known if is_full}
        noted: list[tuple[bool, list[Leaf]]] = []
        self._noted = noted
        try:
            with silent([leaf for leaf in leaves if leaf not in self._before] if known else []):
                yield
            is_other = bool(known) and noted != known
            self._leaves, self._known = ([], []) if is_other else ([*leaves], noted)
        finally:
            self._noted, self._before = None, {}


@contextmanager
def silent(leaves: Sequence[Leaf]) -> Iterator[dict[Leaf, Any]]:
    """Context of passes in which autograd calls nothing in Python for gradients of these; gives what it called."""
    calls = {leaf: dict(_hooks(leaf)) for leaf in leaves}
    for leaf in leaves:
        _hooks(leaf).clear()
    try:
        yield calls
    finally:
        call_back(calls, [*calls])


def call_back(calls: dict[Leaf, Any], leaves: Iterable[Leaf]) -> None:
    """Let autograd call for some leaves what it did before they were ``silent``."""
    for leaf in leaves:
        _hooks(leaf).update(calls.pop(leaf, {}))


def _hooks(leaf: Leaf) -> Any:  # Any: torch's dict
    return leaf.tensor._post_accumulate_grad_hooks  # noqa: SLF001


class Reads(Generic[Use]):
    """What graphs read in place of weights, adding up its gradients; what is read no more leaves them here.

    receive: called, by passes that are to call back, of what has its gradient then. It is held weakly.
    """

    def __init__(self, receive: Callable[[Use, Tensor], None]) -> None:
        self._receive, self.now = WeakMethod(receive), dict[Use, Tensor]()
        self._added, self._called = dict[Use, Tensor](), set[Use]()

    @property
    def is_waiting(self) -> bool:
        """Whether there are gradients."""
        return bool(self._added) or any(read.grad is not None for read in self.now.values())

    def add(self, use: Use, weight: Tensor, rests: torch.dtype, *, trained: bool, calls: bool) -> Tensor:
        """Read a weight so from now on; its gradients are of the type in which it rests."""
        self.end(*{use} & self.now.keys())
        read = self.now[use] = weight.detach().requires_grad_(trained)
        if read.dtype != rests:
            read.grad_dtype = rests
        if calls:
            self.call_back(use)
        return read

    def call_back(self, *uses: Use) -> None:
        """Have autograd call for what is read so."""
        for use in uses:
            if self.now[use].requires_grad and use not in self._called:
                self._called.add(use)
                hook = partial(_call, self._receive, use)  # Python's collector does not see into what a hook holds
                self.now[use].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def end(self, *uses: Use) -> None:
        """Read no more so; graphs that did may give it gradients later, of which autograd calls."""
        self.call_back(*uses)
        self._called -= {*uses}
        for use in uses:
            self.take_over(use, self.now.pop(use))

    def take_over(self, use: Use, read: Tensor) -> None:
        """Add the gradient of what is read no more."""
        if read.grad is not None:
            grad, read.grad = read.grad.detach(), None
            self._added[use] = self._added[use].add_(grad) if use in self._added else grad

    def take(self) -> dict[Use, Tensor]:
        """The gradients of what is read no more, which are given away."""
        added, self._added = self._added, {}
        return added


def _call(receive: WeakMethod[Callable[[Use, Tensor], None]], use: Use, read: Tensor) -> None:
    if (held := receive()) is not None:
        held(use, read)
