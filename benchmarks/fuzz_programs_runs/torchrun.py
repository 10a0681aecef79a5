"""Programs by the way that users go: planned by ``pdv.optimize`` under pins, saved, and started by torchrun."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.fuzz_programs_runs.assignment import assigned, draw_plan, problem_of
from benchmarks.fuzz_programs_runs.campaign import Result
from benchmarks.fuzz_programs_runs.draw import draw_module
from benchmarks.fuzz_programs_runs.judge import Judge, Verdict
from benchmarks.fuzz_programs_runs.module import Module
from benchmarks.fuzz_programs_runs.observe import observe_package
from benchmarks.fuzz_programs_runs.spec import PlanSpec, Program
from benchmarks.record import ROOT, environment
from ir.errors import PdvError
from ir.graph import Graph, Node
from ir.operator import Split
from ir.sharding import State
from pdv.problem import Pins

DEVICES = (2, 4, 8)
TIMEOUT_S = 600


def by_torchrun(seed: int, count: int) -> Iterator[Result]:
    """Programs whose modules no other part of a campaign draws."""
    for number in range(count):
        started = time.process_time()
        module = draw_module(seed, -1 - number)
        judge = Judge(module)
        loaded = judge.loaded
        if isinstance(loaded, Verdict):
            yield Result(f"{seed}-torchrun-{number}", None, loaded, time.process_time() - started)
            continue
        devices = DEVICES[number % len(DEVICES)]
        plan = draw_plan(loaded.graph, devices, random.Random(f"torchrun {seed} {number}"))
        verdict = _judged(judge, loaded.graph, plan)
        yield Result(f"{seed}-torchrun-{number}", Program(module, plan), verdict, time.process_time() - started)


def _judged(judge: Judge, graph: Graph, plan: PlanSpec) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        package = Path(folder) / "fuzzed_pdv"
        try:
            _save(judge, graph, plan, package)
        except PdvError as error:
            return Verdict("refused", "save", error.slug, str(error))
        except Exception as error:  # noqa: BLE001  # finding these is what this is for
            return Verdict("crash", "save", type(error).__name__, traceback.format_exc(limit=-6))
        judge.write_data(package.parent, plan)
        done = _torchrun(Path(folder), plan.devices)
        if done.returncode:
            return Verdict("crash", "torchrun", str(done.returncode), done.stderr[-2000:])
        ranks = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(plan.devices)]  # our own
        return judge.compared("torchrun", plan, ranks)


def _save(judge: Judge, graph: Graph, plan: PlanSpec, package: Path) -> None:
    """Write the package of ``plan`` and verify it."""
    import pdv

    node = {"devices": plan.devices, "device": "cpu-core", "link": "loopback-gloo"}
    found = pdv.optimize(
        Module(judge.spec), judge.data.batches[0], cluster={"nodes": [node]}, mode=plan.mode, mesh=dict(plan.mesh),
        pins=None if plan.searched else pins_of(graph, plan), rules="none" if not plan.searched else None,
    )  # fmt: skip
    found.save(package)
    pdv.verify(package)


def pins_of(graph: Graph, plan: PlanSpec) -> Pins:
    """What leaves the search no choice but the plan's own."""
    problem = problem_of(graph, plan)
    chosen = assigned(problem, plan)
    splits: Mapping[str, tuple[Split, ...]] = {node.digest: splits for node, splits in chosen.splits.items()}
    rests = {param.attr("name"): storage.sharding for param, storage in chosen.storage.items()}

    def split(node: Node, axis: str, option: Split) -> bool:
        known = splits.get(node.digest)
        return known is None or option == known[problem.mesh.index(axis)]

    def storage(param: Node, axis: str, state: State) -> bool:
        known = rests.get(param.attr("name"))
        return known is None or state == known[problem.mesh.index(axis)]

    return Pins(split, storage, "free", "drawn")


def _torchrun(folder: Path, devices: int) -> Any:  # Any: a finished process
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    script = str(ROOT / "benchmarks/fuzz_programs.py")
    variables = environment(GLOO_SOCKET_IFNAME="lo")
    return subprocess.run(
        [sys.executable, *command, script, "--worker", str(folder)],
        check=False, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip


def observe_here(folder: Path) -> None:
    """One rank's part."""
    found = observe_package(folder / "fuzzed_pdv")
    torch.save(found, folder / f"{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
