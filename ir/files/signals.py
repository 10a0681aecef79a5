"""What this process does for a while when it is sent signals. Entry point: ``handled``."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Handler = Callable[[int, Any], object] | signal.Handlers  # Any: the frame that runs, or None
ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Orders to end: of batch systems and `timeout`, and of a terminal that is closed."""


@contextmanager
def handled(handler: Handler, *numbers: signal.Signals) -> Iterator[None]:
    """Context in which ``handler`` takes these signals; what took them before does so again behind it.

    In another thread than the main one, at which no signal arrives, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():  # None: of a library, which Python cannot give back
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
