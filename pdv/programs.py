"""Programs that are run to their end, and end with this one, however it is told to. Entry point: ``run_to_end``."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_to_end(
    words: Sequence[str], environment: Mapping[str, str], *, capture: bool = False
) -> subprocess.CompletedProcess[str]:
    """Its exit code and, to ``capture``, what it said. It is told what this process is told meanwhile.

    torchrun's processes would go on without it: to end alone is not to end them.

    Raises:
        KeyboardInterrupt, SystemExit: if it was told to end, and its output is captured: nobody else says so.
    """
    pipe = subprocess.PIPE if capture else None
    with (
        subprocess.Popen(list(words), env=environment, stdout=pipe, stderr=pipe, text=True) as program,  # noqa: S603  # ours, or the user's own
        _handed_on(program) as told,
    ):
        said, errors = program.communicate()
    if capture and told:
        raise KeyboardInterrupt if told[0] == signal.SIGINT else SystemExit(128 + told[0])
    return subprocess.CompletedProcess(list(words), program.returncode, said, errors)


@contextmanager
def _handed_on(program: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Context in which a program is sent what this process is sent; numbers of the signals that were."""
    told: list[int] = []

    def hand_on(number: int, _: object) -> None:
        told.append(number)
        if number != signal.SIGINT or not _is_on_terminal():
            program.send_signal(number)

    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield told
        return
    before = {number: signal.signal(number, hand_on) for number in SIGNALS}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_on_terminal() -> bool:
    """Whether what is typed there (Ctrl-C) is told to all programs that this one has started, too, by the terminal."""
    try:
        with Path("/dev/tty").open() as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
