"""Models x clusters: the plan found beside the experts' (DDP, FSDP, Megatron TP, TP+SP, hybrids), priced alike.

python benchmarks/plans.py [--smoke] [--json OUT]
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.models.experts import Role, expert
from benchmarks.models.shapes import program
from benchmarks.record import ROOT, Record, arguments, table
from ir.errors import NoPlanFitsError
from ir.graph import Graph
from pdv.cluster import Cluster, load_cluster
from pdv.pcg.techniques import techniques
from pdv.planning.problems import plan_problems
from pdv.problem import Problem
from pdv.search.best import BestPlan
from pdv.search.meshes import search_mesh, search_meshes

CLUSTERS: dict[str, str | dict[str, Any]] = {
    "laptop-4": "laptop-4.yaml",
    "2x8-a100": "2x8-a100.yaml",
    "8x8-h100": "8x8-h100.yaml",
    "mixed-a100-v100": "mixed-a100-v100.yaml",
    "fast-inside-slow-between": {
        "name": "fast-inside-slow-between",
        "nodes": [{"count": 4, "devices": 8, "device": "a100-80gb-sxm", "link": "nvlink3"}],
        "network": "ethernet-25g",
    },
}


@dataclass(frozen=True)
class Case:
    """A model at a global batch; the sequence is for language models."""

    model: str
    batch: int
    sequence: int = 0


CASES = (
    Case("gpt2", 64, 1024),
    Case("llama-3-8b", 64, 2048),
    Case("bert", 64),
    Case("vit", 64),
    Case("resnet50", 64),
)


def main() -> None:
    """Print the table; with --json write the record."""
    options = arguments(str(__doc__).splitlines()[0]).parse_args()
    record = Record()
    cases = (Case("gpt2", 32, 128),) if options.smoke else CASES
    names = ("2x8-a100",) if options.smoke else tuple(CLUSTERS)
    for case in cases:
        graph = program(case.model, case.batch, case.sequence).graph
        for name in names:
            print(f"{case.model} on {name} …", file=sys.stderr, flush=True)
            record.rows += compare(case, graph, load(name))
    show(record)
    worst = max((row["found_over_expert"] for row in record.rows if row["found_over_expert"]), default=0.0)
    record.claim("found over best expert, worst case", worst, "x", "(at most 1 means never worse)")
    record.print_summary()
    record.write(options.json)
    assert worst <= 1 + 1e-9, "an expert's plan is cheaper than the one found"


def load(name: str) -> Cluster:
    """One of the clusters by name."""
    description = CLUSTERS[name]
    path = ROOT / "examples" / "clusters"
    return load_cluster(path / description if isinstance(description, str) else description)


def compare(case: Case, graph: Graph, cluster: Cluster) -> list[dict[str, Any]]:
    """One row for the plan found and one for each expert's, all on this cluster."""
    problems = plan_problems(graph, cluster, mode="train", memory_limit=cluster.memory_bytes)
    started = time.process_time()
    try:
        found = search_meshes(problems)
    except NoPlanFitsError as error:
        return [_row(case, cluster, "found", None, error=str(error))]
    seconds = time.process_time() - started
    rows = [_row(case, cluster, "found", found, search_s=seconds)]
    for problem in problems:
        rows += [_expert_row(case, cluster, problem, roles) for roles in expert_roles(case, problem)]
    best = min((row["step_s"] for row in rows[1:] if row["step_s"]), default=None)
    rows[0]["found_over_expert"] = rows[0]["step_s"] / best if best else None
    rows[0]["techniques"] = techniques(found.pcg, found.solution.problem.mesh)
    return rows


def expert_roles(case: Case, problem: Problem) -> Iterator[dict[str, Role]]:
    """The usual plans for a mesh: one role for all axes, or data outside and tensors inside."""
    names = [axis.name for axis in problem.mesh.axes]
    language = case.model != "resnet50"
    if "group" not in names:  # one role for all axes is the same plan on every mesh
        for role in ("ddp", "fsdp", *(("tp", "tp+sp") if language else ())):
            yield dict.fromkeys(names, role)  # type: ignore[arg-type]  # literals lose their type in the tuple
    if len(names) == 2 and language:
        for outer in ("ddp", "fsdp"):
            for inner in ("tp", "tp+sp"):
                yield {names[0]: outer, names[1]: inner}  # type: ignore[dict-item]


def _expert_row(case: Case, cluster: Cluster, problem: Problem, roles: dict[str, Role]) -> dict[str, Any]:
    """The fastest plan that keeps the expert's roles; where it does not fit, the expert has to choose other roles."""
    pins = expert(roles, problem.mesh)
    name = pins.name
    try:
        found = search_mesh(replace(problem, pins=pins, memory_limit=math.inf))
    except NoPlanFitsError as error:
        return _row(case, cluster, name, None, error=error.what, possible=False, mesh=str(problem.mesh))
    if found.cost.peak_bytes > cluster.memory_bytes:
        return _row(case, cluster, name, None, peak_bytes=found.cost.peak_bytes, mesh=str(problem.mesh))
    return _row(case, cluster, name, found)


def _row(case: Case, cluster: Cluster, plan: str, found: BestPlan | None, **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": case.model,
        "batch": case.batch,
        "sequence": case.sequence,
        "cluster": cluster.name,
        "plan": plan,
        "step_s": None,
        "found_over_expert": None,
    }
    if found is not None:
        row |= {
            "mesh": str(found.solution.problem.mesh),
            "step_s": found.cost.seconds,
            "compute_s": found.cost.compute_s,
            "communication_s": found.cost.communication_s,
            "peak_bytes": found.cost.peak_bytes,
            "gap": found.gap,
        }
    return row | more


def show(record: Record) -> None:
    """The table: per model and cluster, every plan that fits with its price, the best first."""
    lines = []
    for row in record.rows:
        step = f"{row['step_s'] * 1e3:.2f}" if row["step_s"] else "does not fit"
        if not row.get("possible", True):
            step = "cannot cut"  # the heads, say, do not divide by the axis
        memory = f"{row['peak_bytes'] / 2**30:.2f}" if row.get("peak_bytes") else "-"
        ratio = f"{row['found_over_expert']:.3f}" if row["found_over_expert"] else ""
        lines.append((row["model"], row["cluster"], row["plan"], row.get("mesh", "-"), step, memory, ratio))
    table(("model", "cluster", "plan", "mesh", "step ms", "GiB", "found / best expert"), lines)
    for row in record.rows:
        if "techniques" in row:
            found = "; ".join(f"{axis}: {', '.join(names)}" for axis, names in row["techniques"].items())
            print(f"{row['model']} on {row['cluster']}: {found}")


if __name__ == "__main__":
    main()
