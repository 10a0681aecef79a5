"""Many small tasks in few processes, none of which may take the others down.

A process works through tasks one after the other; one that takes too long, or dies, costs its own task and is replaced.
Entry point: ``each_apart``.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")
LATE, DIED = "timed out", "the process died"


def each_apart(
    run: Callable[[Task], Result], tasks: Sequence[Task], *, seconds: float, jobs: int = 1
) -> Iterator[tuple[int, Result | str]]:
    """(number of a task, what came of it), as they end; ``LATE`` or ``DIED`` where nothing did.

    run: gives something that can be pickled; raises nothing. jobs: how many processes.
    """
    context = multiprocessing.get_context("fork")
    left = list(enumerate(tasks))[::-1]
    workers: dict[Connection, tuple[ForkProcess, int]] = {}

    def start() -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(run, tasks, theirs, ours), daemon=True)
        process.start()
        theirs.close()
        workers[ours] = process, -1
        return ours

    def give(pipe: Connection) -> None:
        if left:
            number, _ = left.pop()
            workers[pipe] = workers[pipe][0], number
            pipe.send(number)
        else:
            workers.pop(pipe)[0].kill()

    for _ in range(min(jobs, len(left))):
        give(start())
    while workers:
        ready = wait(list(workers), timeout=seconds)
        for pipe in ready or list(workers):  # where nothing is ready, each has had its time
            assert isinstance(pipe, Connection)
            process, number = workers[pipe]
            try:
                found = pipe.recv() if ready else LATE
            except EOFError:
                found = DIED
            yield number, found
            if found not in (LATE, DIED):
                give(pipe)
                continue
            process.kill()
            del workers[pipe]
            if left:
                give(start())


def _work(run: Callable[[Any], Any], tasks: Sequence[Any], pipe: Connection, other: Connection) -> None:
    other.close()
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # what libraries say on the way
        while True:
            try:
                pipe.send(run(tasks[pipe.recv()]))
            except (EOFError, BrokenPipeError):
                return
