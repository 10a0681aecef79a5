"""``run_ranks(worker, n)`` runs a function on n gloo processes and returns what each rank returned.

Processes come from a fork server that has torch and ours loaded, so the first run costs seconds and the others tenths.
A worker that raises ends all ranks at once, and its traceback is the error's message.
"""

from __future__ import annotations

import datetime as dt
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Container, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

COLLECTIVE_TIMEOUT_S = 90
_GRACE_S = 0.5  # a rank that fails makes its peers fail too; wait this long for the first cause
_context = multiprocessing.get_context("forkserver")
PRELOADED = (  # torch._dynamo: the first DTensor of a process imports it, for a second of its time
    "torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint", "safetensors", "numpy",
    "torch.distributed.pipelining", "benchmarks.measured.parity", "tests.pdv.pipelined",  # what workers stand on
    "tests.distributed.harness", "pdv.emit.emission", "tests.pdv.miniatures", "tests.pdv.worlds",
)  # fmt: skip
_context.set_forkserver_preload(list(PRELOADED))


class RankError(AssertionError):
    """At least one rank raised, died or hung."""


def run_ranks(worker: Callable[..., T], size: int, *args: Any, timeout_s: float = 180) -> list[T]:
    """``[worker(*args) on rank 0, ..., on rank size - 1]``.

    ``worker`` is a module-level function; its arguments and its result are pickled. The default process group is
    there when it starts, and RANK, LOCAL_RANK and WORLD_SIZE are set as torchrun sets them.

    Raises:
        RankError: with the traceback of the ranks that failed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the fork server inherits it
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            _context.Process(target=_run_rank, args=(worker, args, (rank, size), folder, pipes[rank][1]), daemon=True)
            for rank in range(size)
        ]
        try:
            for process in processes:
                process.start()
            for _, sender in pipes:
                sender.close()
            return _collect([receiver for receiver, _ in pipes], time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def mark_slow(cases: Iterable[Any], slow: Container[Any]) -> list[Any]:
    """Parameters of a test, those in ``slow`` left to ``pytest -m slow``."""
    marks = {True: (pytest.mark.slow,), False: ()}
    return [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=marks[one in slow]) for one in cases]


def _collect(receivers: list[Connection[Any, Any]], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: list[str] = []
    pending = dict(zip(receivers, range(len(receivers)), strict=True))
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            errors += [] if errors else [f"ranks {sorted(pending.values())} did not answer in time"]
            break
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = pending.pop(receiver)
            try:
                ok, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                ok, value = False, "the process died without an answer"
            if ok:
                results[rank] = value
            else:
                errors.append(f"rank {rank}: {value}")
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    if errors:
        raise RankError("\n".join(errors))
    return [results[rank] for rank in sorted(results)]


def _run_rank(
    worker: Callable[..., Any], args: tuple[Any, ...], place: tuple[int, int], folder: str, sender: Connection[Any, Any]
) -> None:
    import torch
    import torch.distributed as dist

    rank, size = place
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    if "lo" in [name for _, name in socket.if_nameindex()]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        timeout = dt.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        store = f"file://{Path(folder) / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
        answer = True, worker(*args)
    except BaseException:  # noqa: BLE001  # whatever it is, the parent shall see it
        answer = False, traceback.format_exc()
    # By value: torch's own pickling would share memory that dies with this process.
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    os._exit(0)  # not through gloo's teardown, which may wait for peers
