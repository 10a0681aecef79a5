"""Where all ranks meet before what needs all of them, or learn that some are elsewhere. Entry point: ``meet``.

A function of which all ranks run their part waits for ever, or takes what another one sends, where only some call it.
Ranks write what they are about to do into the store through which processes found each other, and read what others do.
One whose program ends writes that, so that nobody waits for it, and an error that ends another one since then says so.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from types import TracebackType
from typing import Any

import torch.distributed as dist

PATIENCE_S, FIRST_S = 600.0, 1800.0
"""How long ranks that do not come are waited for, as torch waits: one may write a file, compile, or get data for all.
Whatever comes first in a run is waited for longer. Ranks that come to two different things learn of it at once."""
ENDS_S = 2.0  # how long a rank whose connection is closed has, to say that its program ends
_met: list[str] = []  # what ranks met for, in order
_lost_others: list[BaseException] = []  # the error that ends this process, where another rank's end is its cause
_LEFT = "!"  # before what a rank waits for no longer
_ENDED = "."  # in place of what a rank is about to do that does nothing more
_FOLLOWED = ".."  # the same, of one that ends because another has


def meet(model: Any, what: str) -> None:  # Any: a ParallelModule
    """Wait until all ranks are about to do ``what``.

    Raises:
        RuntimeError: if some are about to do something else, or do not come.
    """
    if model.mesh.ranks is None or dist.get_world_size() == 1:
        return
    patience_s = PATIENCE_S if _met else FIRST_S
    store, rank, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), range(dist.get_world_size())  # noqa: SLF001
    number = len(_met)
    _met.append(what)
    _tell_end(store, rank)
    store.set(_key(number, rank), what)
    keys, end, pause_s = [_key(number, other) for other in ranks], time.monotonic() + patience_s, 1e-4
    while not (all_came := store.check(keys)) and time.monotonic() < end:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    if not all_came:
        store.set(_key(number, rank), _LEFT + what)
    came = [other for other in ranks if all_came or store.check([keys[other]])]
    found = {other: store.get(keys[other]).decode() for other in came}
    if not all_came or any(each != what for each in found.values()):
        before = _met[number - 1] if number else "the beginning"
        raise _apart(what, found, [other for other in ranks if other not in found], before, patience_s)
    if number > 1:
        store.delete_key(_key(number - 2, rank))  # which all have read: they came to the one behind it


@cache
def _tell_end(store: Any, rank: int) -> None:  # Any: a store of torch
    """Let others know when this process ends, by an error or because it stops early; in a store that is there then."""
    _explain_lost_ranks(store, rank)
    inside = store
    while hasattr(inside, "underlying_store"):  # of keys with a prefix
        inside = inside.underlying_store
    if type(inside).__name__ == "TCPStore" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return  # rank 0 holds it: when that ends, torch tells the others; where it has ended, torch warns of each write

    def tell() -> None:
        with suppress(RuntimeError):  # all that torch says of stores
            store.set(_key(len(_met), rank), _FOLLOWED if _lost_others else _ENDED)

    atexit.register(tell)


def _explain_lost_ranks(store: Any, rank: int) -> None:  # Any: a store of torch
    """Let an error of a collective that ends this process say which ranks' programs ended before.

    Torch says "Connection closed by peer" alone, in whatever pass, step or sum this rank was.
    """
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error)):
            _lost_others.append(error)
        if not _lost_others:
            shown(kind, error, trace)
            return
        with _not_terminated():
            shown(kind, error, trace)
            sys.stderr.write(f"[rank{rank}]: {_lost(_ended(store, rank))}\n")

    sys.excepthook = show


@contextmanager
def _not_terminated() -> Iterator[None]:
    """Last words come to their end: torchrun terminates all others as soon as it knows of one process that failed."""
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _ended(store: Any, rank: int) -> list[int]:  # Any: a store of torch
    """The other ranks that wrote that their programs end, or do so in a moment: connections are closed before."""
    others = [other for other in range(dist.get_world_size()) if other != rank]
    end, ended = time.monotonic() + ENDS_S, list[int]()
    with suppress(RuntimeError):  # all that torch says of stores: it may have ended with the rank that held it
        while not (ended := [other for other in others if _wrote_end(store, other)]) and time.monotonic() < end:
            time.sleep(0.05)
    return ended


def _wrote_end(store: Any, rank: int) -> bool:  # Any: a store of torch
    key = _key(len(_met), rank)
    return bool(store.check([key])) and store.get(key).decode() == _ENDED


def _lost(ended: list[int]) -> str:
    what = f"the program of {_name(ended)} has ended" if ended else "another rank has ended, or cannot be reached"
    return (
        f"ranks-apart: {what}, in the middle of what all ranks have a part in. Look for the first error in the log of "
        "the others, which is the cause. If there is none, one left the loop before this one: let all stop at the same "
        "step, by a number that all have, such as the loss that train_step returns, or one that rank 0 broadcasts."
    )


def _key(number: int, rank: int) -> str:
    return f"{__name__}/{number}/{rank}"


def _apart(what: str, found: Mapping[int, str], missing: list[int], before: str, patience_s: float) -> RuntimeError:
    by_what: dict[str, list[int]] = {}
    for rank, each in found.items():
        text = "at the end of the program" if each[:1] == _ENDED else f"in {each.removeprefix(_LEFT)}"
        left = ", where it waits no longer" if each[:1] == _LEFT and not missing else ""
        by_what.setdefault(text + left, []).append(rank)
    parts = [f"{_name(ranks)} {'is' if len(ranks) == 1 else 'are'} {text}" for text, ranks in by_what.items()]
    if missing:
        parts.append(f"{_name(missing)} did not come in {patience_s:.0f} s (last seen in {before})")
    return RuntimeError(
        f"ranks-apart: {'; '.join(parts)}. Every rank has a part in {what}, so all must call it, in one order. Take "
        "the call out of what only some ranks do (if rank == 0:), and do there what is not the model's: write, print."
    )


def _name(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {some}"
