"""What commands print: results on stdout, all else on stderr; with --json exactly one versioned object on stdout."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

FORMAT_VERSION = 1  # of the objects that --json prints
SHOWN = "pdv.shown"  # what is done about letters that a stream cannot encode

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def open_streams() -> None:
    """Let all be printed wherever pdv was started: from a program that closed its streams, or with few letters.

    A stream that is closed is one to nowhere, lest a file that is opened later gets its number, and with it what
    libraries print. Letters that the encoding lacks are question marks; undecoded bytes of file names are what they
    were. What is printed to a pipe whose reader went away goes nowhere: the command does its work to the end, and its
    exit code says how that went.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
    codecs.register_error(SHOWN, _as_shown)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            if not stream.isatty():
                setattr(sys, name, stream := _unbroken(stream))
            stream.reconfigure(errors=SHOWN)


def leave_streams() -> None:
    """Give up what there is no room for, lest Python try again at its end, and exit by a code of its own."""
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (OSError, AttributeError):  # or there is no stream any more
            setattr(sys, name, None)


class _Outlet(io.FileIO):
    """A stream of this process, whatever becomes of its reader."""

    def write(self, content: ReadableBuffer, /) -> int:
        """How many bytes are done with."""
        try:
            return super().write(content)
        except BrokenPipeError:
            return memoryview(content).nbytes


def _unbroken(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same stream, to which writing does not fail for want of a reader."""
    stream.flush()
    whole_lines = stream.line_buffering or stream.write_through
    outlet = io.BufferedWriter(_Outlet(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(outlet, encoding=stream.encoding, errors=stream.errors, line_buffering=whole_lines)


def _as_shown(error: UnicodeError) -> tuple[bytes, int]:
    """What is printed of letters that cannot be encoded, and where to go on."""
    assert isinstance(error, UnicodeEncodeError), "a handler of what is printed"
    letters = error.object[error.start : error.end]
    return b"".join(bytes([ord(one) - 0xDC00]) if "\udc80" <= one <= "\udcff" else b"?" for one in letters), error.end


def print_json(command: str, **content: object) -> None:
    """The one object of a successful command."""
    print(json.dumps({"format_version": FORMAT_VERSION, "command": command, **content}, indent=2, sort_keys=True))


def print_error(
    command: str, slug: str, message: str, exit_code: int, *, as_json: bool, facts: Mapping[str, object] | None = None
) -> None:
    """The one error of a failed command: a line on stderr, or the object, with ``facts``, on stdout."""
    if as_json and _printed_json(command, {"slug": slug, "message": message, "exit_code": exit_code, **(facts or {})}):
        return
    with suppress(OSError):  # a full disk: the exit code tells all that can be told
        print(f"error: {one_line(message)}", file=sys.stderr)


def _printed_json(command: str, error: Mapping[str, object]) -> bool:
    """Whether there was room for an error on stdout; what is held back there is given up otherwise."""
    try:
        print_json(command, error=error)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        sys.stdout = None
        return False
    return True


def end(command: str, slug: str, message: str, exit_code: int, *, as_json: bool, **content: object) -> NoReturn:
    """The end of a command that has something to show and failed: with --json, the object of both."""
    if as_json:
        print_json(command, error={"slug": slug, "message": message, "exit_code": exit_code}, **content)
    raise typer.Exit(exit_code)


def one_line(message: str) -> str:
    """A message without what would end its line or move it, as names of a user's may have."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in message)


def print_warning(message: str) -> None:
    """A line on stderr that stops nothing."""
    print(f"warning: {message}", file=sys.stderr)


def once(tell: Callable[[str], None]) -> Callable[[str], None]:
    """``tell``, but each message only the first time."""
    told: set[str] = set()

    def first(message: str) -> None:
        if message not in told:
            told.add(message)
            tell(message)

    return first


def print_table(rows: Mapping[str, str]) -> None:
    """Names and values in two columns."""
    width = max((len(name) for name in rows), default=0)
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
