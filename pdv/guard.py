"""Whatever goes wrong inside is one error that asks for a report, and the report is written: the door of every call.

Entry points: ``door`` and ``guarded`` around what users call, ``note`` where a graph becomes known, ``passing`` around
the user's own functions. A report has the traceback, the versions, and the graph without weights or large constants.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ir.errors import InternalError, PdvError, UsageError, WriteError, did_you_mean
from ir.files.writing import is_full
from pdv.arguments import check_arguments
from pdv.config import VERSION
from pdv.folders import cache_folder

if TYPE_CHECKING:
    from ir.graph import Graph

MOST_BYTES = 16 << 20  # of a traceback or a graph that is kept
MOST_REPORTS = 50
NAME = re.compile(r"[0-9a-f]{12}")
P = ParamSpec("P")
T = TypeVar("T")
Progress = Callable[[str, float | None], None]
"""What a caller gives to be told of (stage, fraction or None)."""
NO_WAY = frozenset({errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP})
"""What is said of a place that no one can get to by that name, or not this user."""
PACKAGES = ("numpy", "torch", "onnx", "safetensors")


@dataclass
class _Call:
    """What is known while a call runs."""

    graph: Graph | None = None
    outside: list[Exception] = field(default_factory=list)


_CALL: ContextVar[_Call | None] = ContextVar("call", default=None)


@contextmanager
def guarded(name: str) -> Iterator[None]:
    """What is raised inside is a `PdvError`: any other exception becomes an `InternalError` that names its report.

    ``name``: what the user called. Interrupts pass, and so do exceptions of the user's own code (``passing``).

    Raises:
        InternalError: in place of an exception that nobody meant.
        WriteError: if a disk was full.
        UsageError: if a place has too long a name, or may not be looked at.
    """
    call = _Call()
    token = _CALL.set(call)
    try:
        yield
    except PdvError:
        raise
    except Exception as error:
        if any(error is one for one in call.outside) or isinstance(error, Warning):  # whoever asks for errors gets them
            raise
        if isinstance(error, OSError) and is_full(error):
            raise _no_room(error) from error
        if isinstance(error, OSError) and error.errno in NO_WAY and error.filename is not None:
            raise _no_way(error) from error
        raise _report(error, name, call.graph) from error
    finally:
        _CALL.reset(token)


def door(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function that users call by ``name``: ``guarded``, and arguments that it does not take are theirs to mend.

    What it does not take is what its signature has no place for, and what its annotations do not admit.
    """

    def wrapped(call: Callable[P, T]) -> Callable[P, T]:
        takes = signature(call)

        @wraps(call)
        def called(*args: P.args, **named: P.kwargs) -> T:
            try:
                given = takes.bind(*args, **named).arguments
            except TypeError as error:
                known = [each for each in takes.parameters if each != "self"]
                mend = " ".join(did_you_mean(each, known) for each in named.keys() - takes.parameters.keys())
                raise UsageError(f"{name}: {error}", f"Allowed: {', '.join(known)}", mend) from None
            with guarded(name):
                check_arguments(call, name, given)
                return call(*args, **named)

        return called

    return wrapped


def _no_room(error: OSError) -> WriteError:
    """The error of a disk that was full where nobody looked for it: of scratch files, or of what is printed."""
    place = error.filename or "a temporary file, or what is printed,"
    mend = f"Free some room ({tempfile.gettempdir()} is for temporary files), or write elsewhere"
    return WriteError(f"{place} cannot be written ({error.strerror})", "A disk with room", mend)


def _no_way(error: OSError) -> UsageError:
    """The error of a place that the system does not let us look at, whatever was wanted there."""
    place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "a file"
    mend = "Choose another place, or have its permissions changed"
    return UsageError(f"{place} cannot be reached ({error.strerror})", "A place that you may look at", mend)


def note(graph: Graph) -> Graph:
    """The same graph; a report of this call will have it."""
    call = _CALL.get()
    if call is not None:
        call.graph = graph
    return graph


def passing(call: Callable[P, T]) -> Callable[P, T]:
    """A function of the user's own: what it raises reaches the user as it is."""

    @wraps(call)
    def called(*args: P.args, **named: P.kwargs) -> T:
        try:
            return call(*args, **named)
        except Exception as error:
            around = _CALL.get()
            if around is not None:
                around.outside.append(error)
            raise

    return called


def _report(error: Exception, name: str, graph: Graph | None) -> InternalError:
    """The error that says what, where in the code, and where the report lies."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    said = " ".join(str(error).split())[:300]
    what = f"{type(error).__name__}{place}{': ' if said else ''}{said}"
    ours = "This is a fault of pdv, not yours"
    try:
        folder = _write_report(error, name, graph)
    except (OSError, ValueError, MemoryError, RecursionError) as failure:
        return InternalError(what, ours, f"Please report it with its traceback; no report could be kept ({failure})")
    kept = "the traceback" if graph is None else "the traceback, and the graph without weights"
    return InternalError(what, ours, f"Please report it, with what lies in {folder} ({kept})", report=str(folder))


def _write_report(error: Exception, name: str, graph: Graph | None) -> Path:
    """The folder of the report; equal failures have one.

    Raises:
        OSError, ValueError: if there is no place for it.
    """
    cache = cache_folder(os.environ)
    if cache is None:
        raise ValueError("there is no home folder")
    trace = "".join(traceback.format_exception(error))
    digest = hashlib.sha256(repr((name, trace, None if graph is None else graph.digest)).encode()).hexdigest()
    folder = cache / "reports" / digest[:12]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(folder / "traceback.txt", f"{name}\n{_versions()}\n\n{trace}")
    if graph is not None:
        from ir.text import print_graph

        _write(folder / "source.graph", print_graph(graph))
    _forget(folder.parent)
    return folder


def _write(path: Path, text: str) -> None:
    path.write_text(text[:MOST_BYTES], encoding="utf-8", errors="backslashreplace")


def _forget(reports: Path) -> None:
    """Remove the oldest reports beyond ``MOST_REPORTS``."""
    found = [path for path in reports.iterdir() if NAME.fullmatch(path.name)]
    for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)[MOST_REPORTS:]:
        shutil.rmtree(path, ignore_errors=True)


def _versions() -> str:
    """What ran, as far as it is loaded."""
    loaded = [(name, getattr(sys.modules.get(name), "__version__", None)) for name in PACKAGES]
    known = ", ".join(f"{name} {version}" for name, version in loaded if version)
    return f"pdv {VERSION}, Python {platform.python_version()}, {platform.platform()}; {known}"
