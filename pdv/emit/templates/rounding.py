"""Parameters that are read otherwise than they rest: rounded, from float32 to bfloat16, and from the host's memory.

Rounded is mixed precision with master weights:

``parameters()`` are the float32 ones, so optimizers, their moments, clipping and checkpoints know no others. A forward
pass reads them rounded; gradients come back through that in float32, in which they are added up over micro-batches, and
summed over ranks (Micikevicius et al., ICLR'18; FSDP2's ``MixedPrecisionPolicy(torch.bfloat16, torch.float32)``).
In bfloat16 are activations and what autograd adds up of one backward pass: the uses of one parameter, and the sums over
ranks of what ``all_gather`` gathered by itself.

What rests in the host's memory (``make_mesh(..., offload=True)``) is updated there, by any optimizer of torch: there
are parameters, in float32 where they are rounded, gradients behind their sum over ranks, and moments. A device has a
copy of its parameters to compute with (ZeRO-Offload, Ren et al., ATC'21; FSDP2's ``CPUOffloadPolicy``).

What backward needs of a block may wait in the host's memory, too (``on_host``). While a block runs, autograd hands over
what it saves. Behind the block that is copied to the host, beside the blocks that follow, and back beside backward of
the block behind it (vDNN, Rhu et al., MICRO'16). So a device has the block at work and one more: before a block begins,
copies of the one before the last are waited for, whichever pass it was of. The host's memory is in pages that a GPU
reads and writes by itself. A CPU is its own host: there the same is done, and nothing saved. Weights stay where they
are, and what is gathered again in backward is not kept at all (``remembered.pack``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from threading import get_ident, local
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from .kernels.compiled import outside
from .kernels.remembered import pack, unpack


class _Open(local):
    """Of a thread: addresses of the weights that it has read, inside ``note_weights``."""

    noted: dict[int, StorageWeakRef] | None = None


_open = _Open()


@contextmanager
def note_weights() -> Iterator[Callable[[Tensor], bool]]:
    """Context in which weights that are read are known again; whether a tensor lies in the memory of one."""
    before, noted = _open.noted, dict[int, StorageWeakRef]()
    _open.noted = noted

    def is_weight(x: Tensor) -> bool:
        memory = noted.get(x.untyped_storage().data_ptr())
        return memory is not None and not memory.expired()  # type: ignore[no-untyped-call]

    try:
        yield is_weight
    finally:
        _open.noted = before


def note(x: Tensor) -> Tensor:
    """A weight as it is computed with, which stays where it is."""
    noted = _open.noted
    if noted is not None:
        memory = x.untyped_storage()
        noted[memory.data_ptr()] = StorageWeakRef(memory)  # type: ignore[no-untyped-call]
    return x


class Rounding:
    """From the type in which parameters rest to that of compute, ``dtype``, and from the host to ``device``.

    Each is None where parameters rest as they are read.
    """

    def __init__(self, dtype: torch.dtype | None, device: torch.device | None = None) -> None:
        self.dtype, self.device = dtype, device
        self._kept: dict[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, dtype: torch.dtype | None, device: torch.device | None) -> Rounding | None:
        """None where nothing is read otherwise than it rests."""
        return None if dtype is None and device is None else cls(dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        """A parameter, or what this rank holds of it, as it is computed with."""
        if self._kept is None or not torch.is_grad_enabled():
            return x.to(device=self.device, dtype=self.dtype)
        if x not in self._kept:
            self._kept[x] = x.to(device=self.device, dtype=self.dtype)
        return self._kept[x]

    @property
    def rests(self) -> torch.dtype | None:
        """The type in which parameters rest, where that is not as they are stored."""
        return None if self.dtype is None else torch.float32

    def on_host(self, x: Tensor) -> Tensor:
        """What rests there, in pages that the device reads and writes by itself (``wait``); else itself."""
        if self.device is None:
            return x
        there = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=self.device.type == "cuda")
        return there.copy_(x, non_blocking=True)

    def wait(self) -> None:
        """Until what was sent to the host is there."""
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def join(self, parts: list[Tensor]) -> Tensor:
        """Pieces, [n] each, rounded, one behind another."""
        sizes = [part.numel() for part in parts]
        flat = parts[0].new_empty(sum(sizes), dtype=self.dtype)
        torch._foreach_copy_(list(torch.split(flat, sizes)), parts)
        return flat

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Context of a step: what its first micro-batch rounds, the others read."""
        before, self._kept = self._kept, {}
        try:
            yield
        finally:
            self._kept = before

    def mark(self, parameters: Iterable[Tensor]) -> None:
        """Have parameters read rounded that do not say so yet."""
        for parameter in parameters:
            if not hasattr(parameter, "rounding"):
                parameter.rounding = self  # type: ignore[attr-defined]

    def mark_others(self, model: nn.Module, *_: object) -> None:
        """Before a forward pass: have those read rounded that are in the place of parameters.

        ``torch.func.functional_call`` and ``copy.deepcopy`` exchange all, so one tells.
        """
        first = next(model.parameters(), None)
        if first is not None and not hasattr(first, "rounding"):
            self.mark(model.parameters())


class DeviceCopy:
    """What a device has of a parameter that rests on the host, in the type of compute.

    rests: this rank's piece, there.
    """

    def __init__(self, rests: Tensor, rounding: Rounding) -> None:
        self._rests, self._version = rests, -1
        with torch.inference_mode(False), torch.no_grad():
            self.tensor = torch.empty(rests.shape, dtype=rounding.dtype or rests.dtype, device=rounding.device)

    @torch.no_grad()
    def refresh(self, version: int) -> None:
        """Copy what changed since; waited for, so that whoever changes it next cannot be ahead."""
        if version != self._version:
            self.tensor.copy_(self._rests)
            self._version = version

    def forget(self) -> None:
        """Have it copied before it is read next."""
        self._version = -1


def lend_data(x: DTensor) -> Tensor:
    """``x.data``: whoever has it may change ``x``, and autograd does not count it."""
    copy = getattr(getattr(x, "leaves", None), "copy", None)
    if copy is not None:
        copy.forget()
    return Tensor.data.__get__(x)  # type: ignore[attr-defined, no-any-return]


class Versions:
    """The memory of a parameter of two versions, in turns: what reads the one is not done when the other is there.

    Autograd counts changes of each by itself. turn: whose version the parameter is now.
    """

    def __init__(self, rests: Tensor, turn: int) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.of = [rests.data, torch.empty_like(rests)]
        if turn:
            self.of.reverse()

    @torch.no_grad()
    def move(self, turn: int) -> Tensor:
        """Where the parameter goes on: its next change leaves what it was in this turn."""
        return self.of[1 - turn].copy_(self.of[turn])


# ---- What backward needs, in the host's memory ----

KEPT = 1  # blocks whose memory is still on a device when the next one begins


def on_host(block: Callable[..., Any], *args: Any, **named: Any) -> Any:  # Any: as the block takes and gives
    """What the block gives; what its backward needs waits in the host's memory."""
    device = next(x.device for x in args if isinstance(x, Tensor))
    if not torch.is_grad_enabled() or device.type == "meta":
        return block(*args, **named)
    link = _link(device, get_ident())
    link.let_go(KEPT)
    group = Group(link, link.behind(args))
    with note_weights() as is_weight:
        for x in _staying(block, args):
            note(x)
        take = outside(lambda x: group.take(x, is_weight))
        with saved_tensors_hooks(take, _give):
            found = block(*args, **named)
        group.send()
    link.add(group, found if isinstance(found, tuple) else (found,))
    return found


def _staying(block: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """What is there before and behind the block: tables and masks, and what another stage has sent."""
    modules = [x for x in (block, getattr(block, "__self__", None), *args) if isinstance(x, nn.Module)]
    return [
        *(x for module in modules for x in module.buffers()),
        *(x for x in args if isinstance(x, Tensor) and x.is_leaf),
    ]


class Piece:
    """Memory that autograd saves, as bytes: on the device, on the host, or on both. It is gone with its last reader."""

    def __init__(self, here: Tensor, group: Group) -> None:
        self.here: Tensor | None = here
        self.there: Tensor | None = None
        self.group = group


Saved = tuple[Piece, torch.dtype, torch.Size, tuple[int, ...], int]
"""A tensor in it: type, size, strides and offset."""


class Group:
    """What one block saves; ``before``: that of the block whose result it takes."""

    def __init__(self, link: Link, before: Group | None) -> None:
        self.link, self.before = link, before
        self.chain: object = object() if before is None else before.chain  # of one pass
        self.arrived = False
        self._pieces: list[ref[Piece]] = []
        self._taken: dict[int, Piece] = {}  # by address, while the block runs
        self._sent: torch.Event | None = None
        self._back: torch.Event | None = None

    @property
    def pieces(self) -> list[Piece]:
        """Those that backward still reads."""
        return [piece for piece in (one() for one in self._pieces) if piece is not None]

    def take(self, x: Tensor, is_weight: Callable[[Tensor], bool]) -> Any:  # Any: what ``_give`` reads
        """Of a tensor that autograd saves: how it is had back."""
        packed = pack(x)
        if packed is not x or not x.numel() or x.layout != torch.strided or is_weight(x):
            return packed
        memory = x.untyped_storage()
        piece = self._taken.get(memory.data_ptr())
        if piece is None:
            here = torch.empty(0, dtype=torch.uint8, device=x.device).set_(memory)
            piece = self._taken[memory.data_ptr()] = Piece(here, self)
            self._pieces.append(ref(piece))
        return piece, x.dtype, x.size(), x.stride(), int(x.storage_offset())

    def send(self) -> None:
        """Start to copy all of it to the host."""
        self._taken = {}
        with self.link.beside(self.link.away):
            for piece in self.pieces:
                assert piece.here is not None, "just taken"
                on_cuda = piece.here.is_cuda
                piece.there = torch.empty(piece.here.shape, dtype=torch.uint8, pin_memory=on_cuda)
                piece.there.copy_(piece.here, non_blocking=True)
        self._sent = self.link.mark(self.link.away)

    def let_go(self) -> None:
        """Have it on the host alone, behind what the device was given so far."""
        self.link.wait(self._sent)
        for piece in self.pieces:
            piece.here = None

    def fetch(self) -> None:
        """Start to copy back what is on the host alone."""
        pieces = [piece for piece in self.pieces if piece.here is None]
        for piece in pieces:
            assert piece.there is not None, "sent before it was let go"
            piece.here = torch.empty(piece.there.shape, dtype=torch.uint8, device=self.link.device)
        with self.link.beside(self.link.home):
            for piece in pieces:
                piece.here.copy_(piece.there, non_blocking=True)  # type: ignore[union-attr,arg-type]  # both just seen
        if pieces:
            self._back = self.link.mark(self.link.home)

    def arrive(self) -> None:
        """Have all of it on the device, and what backward takes next on the way."""
        self.arrived = True
        self.link.let_go_others(self.chain)
        self.fetch()
        if self.before is not None:
            self.before.fetch()
        self.link.wait(self._back)


class Link:
    """Between a device and its host: a stream for each direction, and groups that were sent and are still here.

    thread: that runs forward passes.
    """

    def __init__(self, device: torch.device, thread: int) -> None:
        self.device, self.thread = device, thread
        on_cuda = device.type == "cuda"
        make: Callable[..., torch.cuda.Stream] = torch.cuda.Stream  # which has no types
        self.away, self.home = (make(device) if on_cuda else None for _ in range(2))
        self._here: deque[Group] = deque()
        self._last: tuple[list[ref[Tensor]], ref[Group]] | None = None

    def behind(self, args: tuple[Any, ...]) -> Group | None:
        """The group of the block that gave one of these."""
        if self._last is None:
            return None
        results = [result() for result in self._last[0]]
        return self._last[1]() if any(x is result for x in args for result in results if result is not None) else None

    def add(self, group: Group, results: tuple[Any, ...]) -> None:
        """A block is done."""
        self._here.append(group)
        self._last = [ref(x) for x in results if isinstance(x, Tensor)], ref(group)

    def let_go(self, kept: int) -> None:
        """All but so many, the first ones first."""
        while len(self._here) > kept:
            self._here.popleft().let_go()

    def let_go_others(self, chain: object) -> None:
        """All that are of other passes."""
        others = [group for group in self._here if group.chain is not chain]
        self._here = deque(group for group in self._here if group.chain is chain)
        for group in others:
            group.let_go()

    def beside(self, stream: torch.cuda.Stream | None) -> Any:  # Any: a context manager of torch, untyped
        """Context of copies that begin when the device has done what it was given so far."""
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(stream)

    def mark(self, stream: torch.cuda.Stream | None) -> torch.Event | None:
        """The moment at which what a stream was given is done."""
        return None if stream is None else stream.record_event()

    def wait(self, event: torch.Event | None) -> None:
        """Have the device wait for it."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


_link = cache(Link)


@outside
def _give(saved: Any) -> Tensor:
    """What ``take`` took."""
    if not (isinstance(saved, tuple) and isinstance(saved[0], Piece)):
        return unpack(saved)
    piece, dtype, size, stride, offset = saved
    if piece.here is None or not piece.group.arrived:
        piece.group.arrive()
    assert piece.here is not None, "arrived"
    memory = piece.here.untyped_storage()
    return torch.empty(0, dtype=dtype, device=piece.here.device).set_(memory, offset, size, stride)
