"""Programs that are run to their end, and end with this one, however it is told to. Entry point: ``run_to_end``."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ir.files.signals import handled


def run_to_end(
    words: Sequence[str], environment: Mapping[str, str], *, capture: bool = False
) -> subprocess.CompletedProcess[str]:
    """Its exit code and, to ``capture``, what it said. It is told what this process is told meanwhile.

    torchrun's processes would go on without it: to end alone is not to end them.

    Raises:
        KeyboardInterrupt, SystemExit: if it was told to end, and its output is captured: nobody else says so.
    """
    pipe, signals = subprocess.PIPE if capture else None, _Signals()
    with (
        # before there is a program: what comes while it starts is handed on then
        handled(signals.hand_on, signal.SIGINT, signal.SIGTERM),
        subprocess.Popen(list(words), env=environment, stdout=pipe, stderr=pipe, text=True) as program,  # noqa: S603  # ours, or the user's own
    ):
        signals.hand_to(program)
        said, errors = program.communicate()
    if capture and signals.told:
        raise KeyboardInterrupt if signals.told[0] == signal.SIGINT else SystemExit(128 + signals.told[0])
    return subprocess.CompletedProcess(list(words), program.returncode, said, errors)


@dataclass
class _Signals:
    """Those that this process was ``told``, of which a program that was not there yet is told ``late``."""

    told: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    program: subprocess.Popen[str] | None = None

    def hand_on(self, number: int, _: object) -> None:
        """A signal."""
        self.told.append(number)
        if number == signal.SIGINT and _is_on_terminal():
            return
        if self.program is None:
            self.late.append(number)
        else:
            self.program.send_signal(number)

    def hand_to(self, program: subprocess.Popen[str]) -> None:
        """What came, and what comes."""
        self.program = program
        for number in self.late:
            program.send_signal(number)


def _is_on_terminal() -> bool:
    """Whether what is typed there (Ctrl-C) is told to all programs that this one has started, too, by the terminal."""
    try:
        with Path("/dev/tty").open() as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
