"""How long work shows itself: a live line on a terminal, lines of a log file on request; nothing in pipes and CI.

Entry point: ``progress_bar``, whose follower is told of stages (``pdv.guard.Progress``) and of where a search stands.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Protocol

import typer

from ir.errors import PdvError
from ir.files.writing import unwritable
from pdv.cli.output import print_warning
from pdv.config import VERSION
from pdv.watch import SEARCHING, SEARCHING_PIPELINES, Standing, time_text

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress; in pipes and in CI none is shown.")]
LogOption = Annotated[
    Path | None,
    typer.Option("--log-file", help="Add a line for each step of the work to this file.", show_default=False),
]
WIDTH = 12  # of the bar, in characters: the words beside it say more


class Line(Protocol):
    """Where progress is written: a terminal, or a file."""

    def show(self, stage: str, fraction: float | None, standing: Standing | None) -> None:
        """What is done now, the share that is over, and how far a search is."""

    def say(self, message: str) -> None:
        """A sentence that stays."""


class Follower:
    """What is told of the work so far; called as ``pdv.guard.Progress`` is."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._stage = "starting"
        self._fraction: float | None = None

    def __call__(self, stage: str, fraction: float | None) -> None:
        """Say what is done now."""
        self._stage, self._fraction = stage, fraction
        for line in self._lines:
            line.show(stage, fraction, None)

    def tell(self, standing: Standing) -> None:
        """Say how far the search is."""
        for line in self._lines:
            line.show(self._stage, self._fraction, standing)

    def say(self, message: str) -> None:
        """A sentence on stderr, and in the log."""
        for line in self._lines:
            line.say(message)
        if not any(isinstance(line, _Live) for line in self._lines):
            print(message, file=sys.stderr, flush=True)

    @property
    def searches(self) -> bool:
        """Whether a search runs, which can be ended early."""
        return self._stage in (SEARCHING, SEARCHING_PIPELINES)


@contextmanager
def progress_bar(*, quiet: bool, log: Path | None = None) -> Iterator[Follower]:
    """A follower that draws on stderr, if that is a terminal and nobody asked for quiet, and writes the ``log``.

    Raises:
        WriteError: if there can be no such log.
    """
    with ExitStack() as stack:
        lines: list[Line] = []
        if not (quiet or os.environ.get("CI") or os.environ.get("TERM") == "dumb") and sys.stderr.isatty():
            lines.append(stack.enter_context(_live()))
        if log is not None:
            lines.append(stack.enter_context(_logged(log)))
        yield Follower(lines)


def standing_text(standing: Standing | None) -> str:
    """How far a search is: "mesh 2 of 5, best 104.2 ms, bound 101 ms, gap 3.07 %"."""
    if standing is None:
        return ""
    parts = [standing.looked_at]
    parts += [] if standing.best_s is None else [f"best {time_text(standing.best_s)}"]
    parts += [] if standing.bound_s is None else [f"bound {time_text(standing.bound_s)}"]
    parts += [] if standing.gap is None else [f"gap {standing.gap:.2%}"]
    return ", ".join(parts)


class _Live:
    """A line that is drawn over and over."""

    def __init__(self, update: Callable[[str, float | None, bool], None], say: Callable[[str], None]) -> None:
        self._update, self.say = update, say

    def show(self, stage: str, fraction: float | None, standing: Standing | None) -> None:
        words = standing_text(standing)
        self._update(f"{stage}: {words}" if words else stage, fraction, standing is None)


@contextmanager
def _live() -> Iterator[Line]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    console = Console(stderr=True)
    with Progress(SpinnerColumn(), text, BarColumn(WIDTH), TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def update(words: str, fraction: float | None, now: bool) -> None:
            total = None if fraction is None else 1.0
            bar.update(task, description=words, total=total, completed=fraction or 0.0, refresh=now)

        yield _Live(update, lambda message: console.print(message, markup=False, highlight=False))


class _Log:
    """A file that lines are added to, until it takes no more."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
        except OSError as error:
            raise unwritable(path, error) from error
        self._path, self._started, self._works = path, time.monotonic(), True

    def show(self, stage: str, fraction: float | None, standing: Standing | None) -> None:
        share = "" if fraction is None else f" {fraction:.0%}"
        words = standing_text(standing)
        self.say(f"{stage}{share}{': ' if words else ''}{words}")

    def say(self, message: str) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = " ".join(message.splitlines())
        try:
            if self._works:
                self._file.write(f"{at} {time.monotonic() - self._started:9.3f} s  {line}\n")
        except OSError as error:
            self._end(error)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # some file systems say at the end alone that they are full
            self._end(error)

    def _end(self, error: OSError) -> None:
        if self._works:
            self._works = False
            print_warning(f"{self._path} cannot be written ({error.strerror}); the log ends here")


@contextmanager
def _logged(path: Path) -> Iterator[Line]:
    log = _Log(path)
    try:
        log.say(f"pdv {VERSION} began: {' '.join(sys.argv[1:])}")
        yield log
        log.say("done")
    except BaseException as error:
        log.say(f"ended by {error if isinstance(error, PdvError) else type(error).__name__}")
        raise
    finally:
        log.close()
