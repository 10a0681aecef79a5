"""The end of the interpreter, which waits for threads that still hold collectives. Entry point: ``wait_at_exit``.

A collective of gloo keeps a copy of the state of the thread that started it, with what Python has in there: the context
of a backward pass, hooks of what autograd saves. The thread that ran it drops all that some time after it is done, and
needs the interpreter's lock to do so. From an interpreter that ends no thread gets the lock: the thread is unwound
inside a destructor, which aborts the process ("terminate called without an active exception"), whoever started the
collective; DistributedDataParallel alone ends so, too. So a mark lies in the state of the main thread, and hence in
every copy. What runs at exit takes it away and waits until the last copy is dropped.
"""

from __future__ import annotations

import atexit
import threading
import time
from contextvars import ContextVar
from functools import cache
from weakref import ref

import torch

LONGEST_S = 2.0  # of collectives that do not end, as other ranks have failed
_POLL_S = 0.002
_SETTLE_S = 0.02  # hooks are dropped behind the mark
_KEY = f"{__name__}.mark"


class Mark:
    """Is alive while a copy of the thread's state is."""


_mark: ContextVar[Mark | None] = ContextVar(_KEY, default=None)


@cache
def wait_at_exit() -> None:
    """From now on, collectives that the main thread starts are waited for at exit."""
    if threading.current_thread() is threading.main_thread():  # the state of another is dropped without the lock
        atexit.register(wait_for, mark_collectives())


def mark_collectives() -> ref[Mark]:
    """Mark what this thread starts from now on.

    In contexts, too, as which of a state's objects is dropped last is open: the mark goes with the later one.
    """
    mark = Mark()
    _mark.set(mark)
    torch._C._stash_obj_in_tls(_KEY, mark)  # noqa: SLF001  # as backward its context
    return ref(mark)


def wait_for(mark: ref[Mark], longest_s: float = LONGEST_S) -> None:
    """Mark no more, and wait until nothing holds the mark."""
    _mark.set(None)
    if hasattr(torch._C, "_remove_obj_from_tls"):  # noqa: SLF001  # since torch 2.13
        torch._C._remove_obj_from_tls(_KEY)  # noqa: SLF001
    else:
        torch._C._stash_obj_in_tls(_KEY, None)  # noqa: SLF001
    latest = time.monotonic() + longest_s
    while mark() is not None and time.monotonic() < latest:
        time.sleep(_POLL_S)  # whoever waits for the lock gets it
    time.sleep(_SETTLE_S)
