"""A package's own steps on this machine, part by part beside what was predicted. Entry point: ``bench``.

The steps run in processes of their own (`learned_cost.profile.steps`): one alone, several under torchrun. What is told
is the step, computing, exposed communication and the optimizer; each collective and each run of equal blocks; memory.
What was measured is kept as a profile, by which `pdv optimize --cost FOLDER` plans again.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ir.cost_model import Query
from ir.errors import UsageError
from ir.evaluation.id_ranges import ranges_of
from ir.graph import Graph
from ir.types import DType
from ir.verify import infer_shardings, node_local_loops, node_splits
from pdv.cluster import Cluster
from pdv.cost.comm import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    joint_link,
    reduce_scatter_seconds,
)
from pdv.emit.analysis.outline import BlockRun
from pdv.emit.emission import Emission
from pdv.emit.package import emission_of
from pdv.pcg.norms import is_taken_by_norm
from pdv.plan.package import read_document
from pdv.plan.running import running_of
from pdv.prices import priced_by
from pdv.problem import Problem
from pdv.programs import run_to_end
from pdv.report.loaded import Loaded, load_plan, workload_of_plan

Document = dict[str, Any]  # Any: JSON
SECONDS = {
    "all_reduce": all_reduce_seconds, "all_gather": all_gather_seconds, "reduce_scatter": reduce_scatter_seconds,
    "all_to_all": all_to_all_seconds,
}  # fmt: skip
COMPUTING = ("compute", "recomputation", "host")
TAIL = 500  # characters of what a process said before it failed
ERROR = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", re.ASCII)


@dataclass(frozen=True)
class Asked:
    """What to run.

    Attributes:
        folder: where measurements are kept; None: nowhere.
        budget_s: of the steps; of collectives as much again.
        cost: the files that priced the plan, where they do not ship.
    """

    directory: Path
    folder: Path | None
    budget_s: float = 10.0
    cost: str | None = None


def bench(asked: Asked) -> Document:
    """Run a package's steps and compare.

    Raises:
        UsageError: if the directory is no package, or its steps do not run on this host.
    """
    document = read_document(asked.directory)
    if not (asked.directory / "model.py").is_file():
        raise UsageError(f"{asked.directory} has no model.py", mend="Plan a model with weights, and write its package")
    plan = load_plan(asked.directory, priced_by(document, asked.cost))
    cluster = Cluster.from_dict(document["cluster"])
    device = "cuda" if all(entry.device.kind == "gpu" for entry in cluster.classes) else "cpu"
    if len(cluster.nodes) > 1 or sum(group.count for group in cluster.nodes) > 1:
        count = sum(group.count for group in cluster.nodes)
        raise UsageError(f"the plan is for {count} hosts, and this is one", mend="Bench a plan of one host")
    request = request_of(plan, asked, device)
    answer = run_steps(asked, request, cluster.num_devices)
    return {"device": device, "record": answer["record"], **compare(plan, answer)}


def request_of(plan: Loaded, asked: Asked, device: str) -> Document:
    """What the processes are told."""
    graph, count = plan.source.graph, plan.execution.micro_batches
    ranges = ranges_of(graph)
    inputs = []
    for node in graph.inputs:
        least, below = ranges.get(node.attr("name"), (0, 2))
        inputs.append(_value(node.type.shape, node.type.dtype, count, least, below))
    _, first = graph.outputs[0]
    shape = first.type.shape
    if not shape or not first.type.dtype.is_floating:
        raise UsageError("the model's first output has no rows of numbers", mend="Bench a model that puts out logits")
    numbers = len(shape) < 2
    below = 2 if numbers else shape[-1]
    target = _value(shape if numbers else shape[:-1], first.type.dtype if numbers else DType.I64, count, 0, below)
    record = record_of(plan.document)
    return {
        "package": asked.directory.resolve().name, "device": device, "mode": plan.document["mode"], "inputs": inputs,
        "target": target, "budget_s": asked.budget_s, "folder": asked.folder and str(asked.folder.resolve()),
        "record": None if asked.folder is None else record,
    }  # fmt: skip


def record_of(document: Mapping[str, Any], folder: Path | None = None) -> str | None:  # Any: JSON
    """The name of the record of a plan's first kind of device, of ``folder``, too; None if there is none."""
    from learned_cost.devices.device import find, load_records

    device = Cluster.from_dict(document["cluster"]).classes[0].device
    found = find(device.name, load_records(folder).values())
    return None if found is None else found.name


def _value(shape: Sequence[int], dtype: DType, micro_batches: int, least: int = 0, below: int = 2) -> Document:
    rows = [shape[0] * micro_batches, *shape[1:]] if shape else []
    return {"shape": rows, "dtype": dtype.torch_name, "least": least, "below": below}


def run_steps(asked: Asked, request: Document, processes: int) -> Document:
    """The answer of the processes.

    Raises:
        UsageError: if there is none; it says what a process said.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "request.json"
        path.write_text(json.dumps(request))
        words = ["-m", "learned_cost.profile.steps", str(path)]
        if processes > 1:
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *words]
        paths = str(asked.directory.resolve().parent), *filter(None, sys.path), os.environ.get("PYTHONPATH", "")
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        done = run_to_end([sys.executable, *words], environment, capture=True)
        answer = path.with_name("answer.json")
        if done.returncode or not answer.is_file():
            said = _reason(done.stderr)
            raise UsageError(f"the steps ended with exit status {done.returncode}: {said}", mend="Mend what it says")
        found: Document = json.loads(answer.read_text())
        return found


def _reason(said: str) -> str:
    """The first exception that a process ended with, without torchrun's own; else what was said last."""
    errors = [line for line in said.splitlines() if ERROR.match(line) and "ChildFailedError" not in line]
    return " ".join((errors[0] if errors else said[-TAIL:]).split())


def compare(plan: Loaded, answer: Mapping[str, Any]) -> Document:
    """Each part as predicted and as measured, and which is off by most."""
    from pdv.memory import step_memory
    from pdv.simulate.step import simulate

    workload = workload_of_plan(plan)
    simulated, memory = simulate(workload), step_memory(workload)
    parts = simulated.totals
    rows = [{"part": name, **_pair(*pair)} for name, pair in _parts(parts, answer, plan.stages.count).items()]
    worst = max(rows, key=lambda row: abs(row["measured_s"] - row["predicted_s"]))
    step = {**_pair(simulated.step_s, answer["step_s"]), "std_s": simulated.std_s, "measured_std_s": answer["std_s"]}
    return {
        "step": step,
        "steps": answer["steps"],
        "parts": rows,
        "worst": {"part": worst["part"], "seconds": worst["measured_s"] - worst["predicted_s"]},
        "blocks": _blocks(plan, answer["blocks"]),
        "collectives": [_collective(plan.problem, row) for row in answer["collectives"]],
        "memory": {"predicted_bytes": memory.worst.total_bytes, "measured_bytes": answer["peak_bytes"]},
    }


def _parts(parts: Mapping[str, float], answer: Mapping[str, Any], stages: int) -> dict[str, tuple[float, float]]:
    """Seconds predicted and measured by part; of a pipeline, sends hide in the passes, which are one part."""
    predicted = sum(parts.get(name, 0.0) for name in COMPUTING)
    moved = sum(s for name, s in parts.items() if name not in (*COMPUTING, "optimizer"))
    optimizer = parts.get("optimizer", 0.0), answer["optimizer_s"]
    if stages > 1:
        return {"passes of all stages": (predicted + moved, answer["passes_s"]), "optimizer": optimizer}
    computed = min(answer["compute_s"], answer["passes_s"])
    return {
        "computing": (predicted, computed),
        "communication and waiting": (moved, answer["passes_s"] - computed),
        "optimizer": optimizer,
    }


def _pair(predicted_s: float, measured_s: float) -> Document:
    error = (predicted_s - measured_s) / measured_s if measured_s > 0.0 else None
    return {"predicted_s": predicted_s, "measured_s": measured_s, "error": error}


def _collective(problem: Problem, row: Mapping[str, Any]) -> Document:
    """With the price that the plan's links give it; None where no axes make so many."""
    size, found = row["devices"], None
    for number in range(1, len(problem.axes) + 1):
        for axes in itertools.combinations(problem.axes, number):
            axis = joint_link(axes)
            if found is None and axis.size == size > 1:
                found = SECONDS[row["collective"]](axis, row["bytes"])
    pair = {"predicted_s": None, "measured_s": row["seconds"]} if found is None else _pair(found, row["seconds"])
    return {name: row[name] for name in ("collective", "bytes", "devices", "count")} | pair


def _blocks(plan: Loaded, measured: Sequence[Mapping[str, Any]]) -> list[Document]:
    """Runs of equal blocks, as the text has them; of one stage, and where the text's runs are those measured."""
    if plan.stages.count > 1 or not measured:
        return []
    running = running_of(plan.problem, plan.derived, plan.stages, plan.execution)
    emission = emission_of(plan.derived.pcg, plan.problem.mesh, plan.document, running)
    prices = _prices(plan.problem, emission.graph, emission)
    runs = [item for outline in emission.outlines(_no_shape) for item in outline.items if isinstance(item, BlockRun)]
    if [len(run.blocks) for run in runs] != [row["blocks"] for row in measured]:
        return []
    found = []
    for run, row in zip(runs, measured, strict=True):
        ways = list(zip(*(prices[node] for node in run.blocks[0]), strict=True))
        for way, seconds in zip(("forward", "backward"), ways, strict=True):
            if row[f"{way}_s"] is not None:
                pair = _pair(sum(seconds), row[f"{way}_s"])
                found.append({"block": row["name"], "blocks": row["blocks"], "pass": way, **pair})
    return found


def _prices(problem: Problem, graph: Graph, emission: Emission) -> dict[Any, tuple[float, float]]:  # Any: nodes
    """Seconds forward and backward of each operator of the text; none of moves, nor of what a batch norm does."""
    shardings = infer_shardings(graph, emission.mesh)
    queries = {}
    for node in graph.nodes:
        if not node.is_leaf and node.op.kind != "parallel":
            splits = node_splits(node, [shardings[operand] for operand in node.operands], emission.mesh)
            loops = node_local_loops(node, splits, emission.mesh)
            if not is_taken_by_norm(node, loops):
                queries[node] = Query.of(node, loops, train=problem.train)
    found = dict.fromkeys(graph.nodes, (0.0, 0.0))
    for node, estimate in zip(queries, problem.compute.nodes(list(queries.values())), strict=True):
        found[node] = estimate.forward.mean_s, estimate.backward.mean_s
    return found


def _no_shape(name: str) -> tuple[int, ...]:
    raise UsageError(f"the shape of {name} is in the weights alone", mend="Plan the model again")
