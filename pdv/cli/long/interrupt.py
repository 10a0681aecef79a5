"""Ctrl-C while a search runs: the best plan so far is taken; a second one, or one at another time, ends the command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ir.errors import NoPlanFitsError
from ir.files.signals import handled
from pdv.cli.long.progress import Follower

KEPT = 10  # exit code: interrupted, and the best plan so far was taken


class Interrupts:
    """What Ctrl-C asked for so far."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._asked = self._said = False

    def stopped(self) -> bool:
        """Whether the search is to end; says so when it is asked first, as a handler may not write."""
        if self._asked and not self._said:
            self._said = True
            self._follower.say("interrupted: taking the best plan so far (Ctrl-C again ends without one)")
        return self._asked

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        """What the signal does.

        Raises:
            KeyboardInterrupt: unless it only ends a search.
        """
        if self._asked or not self._follower.searches:
            raise KeyboardInterrupt
        self._asked = True

    @staticmethod
    def ignore() -> None:
        """From here on all is written: an interrupt comes too late."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def keeping_best(follower: Follower) -> Iterator[Interrupts]:
    """Within, the first Ctrl-C while a search runs asks it to end.

    Raises:
        KeyboardInterrupt: if that search had found nothing yet.
    """
    interrupts = Interrupts(follower)
    with handled(interrupts.handle, signal.SIGINT):
        try:
            yield interrupts
        except NoPlanFitsError:
            if interrupts.stopped():
                raise KeyboardInterrupt from None
            raise
