"""Processes of a cell: planning in one of its own, then a rank on each device of the cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster_runs.clusters import Cluster
from benchmarks.cluster_runs.networks import Machine
from benchmarks.record import ROOT, environment

Row = dict[str, Any]  # Any: JSON
PLAN_S = 900.0


def write_packages(task: str, cluster: Cluster, folder: Path, candidates: Sequence[str]) -> Row:
    """Write the package that pdv plans for a task on a cluster, and its candidates; what was predicted of each."""
    words = [sys.executable, "-m", "benchmarks.cluster_runs.plan", task, cluster.name, str(folder), *candidates]
    done = subprocess.run(words, check=False, env=environment(), capture_output=True, text=True, timeout=PLAN_S)
    if done.returncode:
        raise RuntimeError(f"planning {task} for {cluster.name} failed: {done.stderr.strip()[-2000:]}")
    found: Row = json.loads((folder / "plans.json").read_text())
    return found


def run_ranks(machine: Machine, spec: Row, limit_s: float) -> Row:
    """The answer of rank 0 of a cell; all ranks have ended when it comes back.

    Raises:
        RuntimeError: if a rank failed, or the cell took longer than the limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        world = machine.cluster.size
        path = Path(folder, "spec.json")
        path.write_text(json.dumps({**spec, "folder": folder, "world": world}))
        ranks = []
        try:
            for rank in range(world):
                variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
                words = [sys.executable, "-m", "benchmarks.cluster_runs.measure", str(path), str(rank)]
                ranks.append(
                    subprocess.Popen(
                        machine.command(rank, words),
                        env=environment(GLOO_SOCKET_IFNAME=machine.interface, **variables),
                        cwd=ROOT,
                        stdout=None if rank == 0 else subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,  # a rank's error is in a file
                        start_new_session=True,  # the kernel shares cores by session
                    )
                )
            _wait(ranks, time.monotonic() + limit_s)
        finally:
            for process in ranks:
                _kill(process)
        answer = Path(folder, "answer.json")
        if not answer.exists():
            told = sorted(Path(folder).glob("error-*"), key=lambda path: path.stat().st_mtime_ns)  # the cause first
            raise RuntimeError(told[0].read_text() if told else "the ranks ended without an answer")
        found: Row = json.loads(answer.read_text())
        return found


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> None:
    """Until all have ended, one has failed, or it is too late; others have two seconds to tell why."""
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks):
            time.sleep(2)
            return
        if time.monotonic() > deadline:
            raise RuntimeError("the cell took longer than its limit")
        time.sleep(0.2)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
