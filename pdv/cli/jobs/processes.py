"""Jobs as processes, several at once: each is `pdv optimize --json`, so that one that dies takes no other with it.

Entry point: ``Runs``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pdv
from ir.files.reading import parse_json
from ir.files.signals import handled
from pdv.cli.jobs.spec import Job

KILLING = 3  # the interrupt from which on processes are killed: the second one ended them already


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        exit_code: of its process; None if it was not begun.
        seconds: that it took.
        plan: plan.json, if there is one.
        error: what `pdv optimize --json` printed in place of a plan, or how the process ended.
    """

    job: Job
    exit_code: int | None = None
    seconds: float = 0.0
    plan: Mapping[str, Any] | None = None  # Any: JSON
    error: Mapping[str, Any] | None = None


class Runs:
    """The processes of all jobs.

    Args:
        folder: where a file's relative paths start.
        packages: where each job writes its own folder.
        more: words that every job gets.
    """

    def __init__(self, folder: Path, packages: Path, more: Sequence[str] = ()) -> None:
        self._folder, self._packages, self._more = folder, packages.absolute(), tuple(more)
        self._living: set[subprocess.Popen[str]] = set()
        self._lock = threading.RLock()  # a handler of signals runs in a thread that may hold it
        self.interrupts = 0

    def outcomes(self, jobs: Sequence[Job], at_once: int, told: Callable[[Outcome], None]) -> tuple[Outcome, ...]:
        """What became of all jobs, in their order; ``told`` hears of each as it ends."""
        environment = own_environment(at_once)
        with ThreadPoolExecutor(max_workers=at_once) as pool, self._passing_on():
            futures = [pool.submit(self._run, job, environment) for job in jobs]
            try:
                for future in as_completed(futures):
                    told(future.result())
            except BaseException:  # of the one who is told: no process outlives this one, and none is begun
                with self._lock:
                    self.interrupts += 1
                    self._stop(signal.SIGKILL)
                raise
        return tuple(future.result() for future in futures)

    def _run(self, job: Job, environment: Mapping[str, str]) -> Outcome:
        words = [*job.words, *self._more, "--output", str(self._packages / job.package), "--json"]
        with self._lock:
            if self.interrupts:
                return Outcome(job)
            began = time.monotonic()
            process = subprocess.Popen(  # noqa: S603  # our own program
                [sys.executable, "-P", "-m", "pdv", "optimize", *words],
                cwd=self._folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # a terminal's Ctrl-C comes through this process, once
            )
            self._living.add(process)
        try:
            printed, said = process.communicate()
        finally:
            with self._lock:
                self._living.discard(process)
        return _outcome(job, process.returncode, time.monotonic() - began, printed, said)

    @contextmanager
    def _passing_on(self) -> Iterator[None]:
        """Within, Ctrl-C goes to all processes, and no further one is begun."""
        with handled(self._handle, signal.SIGINT, signal.SIGTERM):
            yield

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        with self._lock:
            self.interrupts += 1
            self._stop(signal.SIGKILL if self.interrupts >= KILLING else signal.Signals(number))

    def _stop(self, number: signal.Signals) -> None:
        with self._lock:
            for process in self._living:
                process.send_signal(number)


def own_environment(at_once: int) -> dict[str, str]:
    """Of a process that shares the cores with others, and finds this pdv wherever it is started."""
    given = [Path(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    here = Path(pdv.__file__).parents[1]
    path = os.pathsep.join(dict.fromkeys(str(each.absolute()) for each in (*given, here)))
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // at_once))}
    return {**threads, **os.environ, "PYTHONPATH": path}


def _outcome(job: Job, exit_code: int, seconds: float, printed: str, said: str) -> Outcome:
    """What a process left."""
    try:
        found = parse_json(printed)
    except ValueError:
        found = None
    if isinstance(found, dict) and "plan" in found:
        return Outcome(job, exit_code, seconds, found["plan"])
    if isinstance(found, dict) and "error" in found:
        return Outcome(job, exit_code, seconds, error=found["error"])
    last = next(iter(reversed(said.strip().splitlines())), "")
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    message = f"its process ended by {how} and printed no plan" + (f": {last[:200]}" if last else "")
    return Outcome(job, exit_code, seconds, error={"slug": "process", "message": message, "exit_code": exit_code})
