"""Work in a process of its own, whose crash or silence is an answer. Entry point: ``Isolated``."""

from __future__ import annotations

import multiprocessing
import resource
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

SILENCE_S = 240.0  # between two signs of life; machines are shared
MEMORY_BYTES = 10 << 30  # of addresses: a table of the search beyond this is a crash to be found, not to be had
_context = multiprocessing.get_context("forkserver")
PRELOADED = (
    "benchmarks.fuzz_programs_runs.shrink",
    "pdv.frontend.load",
    "pdv.emit.package",
    "pdv.search.meshes",
    "torch",
)


class DiedError(Exception):
    """The process is gone or silent; ``at`` is the last that it said."""

    def __init__(self, reason: str, at: str) -> None:
        super().__init__(reason)
        self.at = at


class Isolated:
    """Calls a module-level function ``work(*args, progress)`` in a process that lives until it crashes."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.work = work
        self._process: Any = None
        self._pipe: Connection[Any, Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """What ``work`` returns.

        Raises:
            DiedError: if the process died, or said nothing for too long.
            RuntimeError: with the traceback of what ``work`` raised.
        """
        pipe = self._alive()
        pipe.send(args)
        at = ""
        while True:
            try:
                if not pipe.poll(SILENCE_S):
                    raise EOFError
                kind, value = pipe.recv()
            except (EOFError, OSError):
                silent = self._process.is_alive()
                self.close()
                raise DiedError("nothing happened for too long" if silent else "the process died", at) from None
            if kind == "at":
                at = value
            elif kind == "raised":
                raise RuntimeError(value)
            else:
                return value

    def _alive(self) -> Connection[Any, Any]:
        if self._process is None or not self._process.is_alive() or self._pipe is None:
            _context.set_forkserver_preload(list(PRELOADED))
            self._pipe, theirs = _context.Pipe()
            self._process = _context.Process(target=_serve, args=(self.work, theirs))
            self._process.start()
            theirs.close()
        return self._pipe

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(work: Callable[..., Any], pipe: Connection[Any, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    def say(at: str) -> None:
        pipe.send(("at", at))

    while True:
        try:
            args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = "done", work(*args, say)
        except Exception:  # noqa: BLE001  # whoever asked shall see it
            answer = "raised", traceback.format_exc()
        pipe.send(answer)
