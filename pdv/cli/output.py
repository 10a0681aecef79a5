"""What commands print: results on stdout, all else on stderr; with --json exactly one versioned object on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, NoReturn

import typer

FORMAT_VERSION = 1  # of the objects that --json prints

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def print_json(command: str, **content: object) -> None:
    """The one object of a successful command."""
    print(json.dumps({"format_version": FORMAT_VERSION, "command": command, **content}, indent=2, sort_keys=True))


def print_error(
    command: str, slug: str, message: str, exit_code: int, *, as_json: bool, facts: Mapping[str, object] | None = None
) -> None:
    """The one error of a failed command: a line on stderr, or the object, with ``facts``, on stdout."""
    if as_json:
        print_json(command, error={"slug": slug, "message": message, "exit_code": exit_code, **(facts or {})})
    else:
        with suppress(OSError):  # a full disk: the exit code tells all that can be told
            print(f"error: {one_line(message)}", file=sys.stderr)


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
