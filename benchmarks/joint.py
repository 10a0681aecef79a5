"""Joint search of algebra and parallelism beside the two in sequence, and beside parallelism alone, priced alike.

    python benchmarks/joint.py [--smoke] [--json OUT] [--models A,B] [--clusters A,B] [--budget CPU_SECONDS]
        [--resume]

Sequential: the best algebra on one device by the same cost model and rules, that graph frozen, then the best
parallelism; where the joint plan's graph is the cheapest alone, that is the best algebra. Parallel only: the graph as
it was written. "Alone" is what the joint plan's rewrites cost on one device: its graph's price there over the source's.
Above one, a search that rewrites first would never have taken them. The joint search is done once more where memory is
short: "kept" limits what stays allocated to 0.7 of what the joint plan keeps (working sets left out). Its certified gap
is claimed beside that of the plans with room.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.models.shapes import program
from benchmarks.record import Record, arguments, table
from ir.errors import NoPlanFitsError
from ir.graph import Graph
from ir.mesh import Mesh
from pdv.cluster import Cluster, load_cluster
from pdv.pcg.plan_cost import plan_cost
from pdv.planning.problems import plan_problems
from pdv.problem import Problem
from pdv.search.best import BestPlan
from pdv.search.meshes import search_mesh
from pdv.search.strategies.backtrack import backtrack
from pdv.search.strategies.budget import Budget

BUDGET_S = 60.0  # of one search
TIGHT = 0.7  # of what a plan takes: what a device has where memory is short
BETTER = 0.999  # below this share of another plan's time one is called strictly better

# Four kinds of machine, each as the one mesh of its levels.
CLUSTERS: dict[str, dict[str, Any]] = {
    "nvswitch-8": {
        "name": "nvswitch-8",
        "nodes": [{"devices": 8, "device": "h100-80gb-sxm", "link": "nvlink4"}],
        "mesh": {"inner": 8},
    },
    "slow-2x4": {
        "name": "slow-2x4",
        "nodes": [{"count": 2, "devices": 4, "device": "a100-80gb-sxm", "link": "nvlink3"}],
        "network": "ethernet-25g",
        "mesh": {"nodes": 2, "inner": 4},
    },
    "pcie-4": {
        "name": "pcie-4",
        "nodes": [{"devices": 4, "device": "l40s", "link": "pcie4"}],
        "mesh": {"inner": 4},
    },
    "infiniband-8x8": {
        "name": "infiniband-8x8",
        "nodes": [{"count": 8, "devices": 8, "device": "h100-80gb-sxm", "link": "nvlink4"}],
        "network": "ib-ndr",
        "mesh": {"nodes": 8, "inner": 8},
    },
}


@dataclass(frozen=True)
class Case:
    """A model at a global batch; the sequence is for language models."""

    model: str
    batch: int
    sequence: int = 0


# Full-size batches, of which every device gets several samples, and for language models single sequences: there
# operators have to be cut inside.
CASES = (
    Case("gpt2", 64, 1024),
    Case("gpt2", 2, 1024),
    Case("gpt2-large", 2, 1024),
    Case("bert-large", 64, 512),
    Case("bert-large", 2, 512),
    Case("vit", 256),
    Case("vit", 8),
    Case("mlp", 1024),
    Case("xdl", 1024),
    Case("candle-uno", 1024),
    Case("dlrm", 8192),
    Case("nasrnn", 64),
    Case("squeezenet", 256),
    Case("resnext50", 256),
    Case("resnet50", 256),
    Case("llama-3-8b", 8, 2048),
    Case("mixtral-8x7b", 8, 2048),
    Case("inception-v3", 256),
)


Answer = tuple[BestPlan | str, float]
"""A plan, or why there is none; and the CPU-seconds of the search."""


def main() -> None:
    """Print the table; with --json write the record; fail if joint is ever beaten."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument(
        "--models", default=",".join(dict.fromkeys(case.model for case in CASES)), help="comma-separated"
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="CPU-seconds of one search; then the best so far"
    )
    parser.add_argument("--clusters", default=",".join(CLUSTERS), help="comma-separated")
    parser.add_argument("--resume", action="store_true", help="keep the rows that OUT has already")
    options = parser.parse_args()
    record = Record()
    if options.resume and options.json.exists():
        record.rows = json.loads(options.json.read_text())["rows"]
    done = {(row["model"], row["batch"], row["cluster"]) for row in record.rows}
    cases = (Case("gpt2", 2, 1024),) if options.smoke else CASES
    clusters = ["pcie-4"] if options.smoke else options.clusters.split(",")
    for case in cases:
        if case.model not in options.models.split(","):
            continue
        graph = program(case.model, case.batch, case.sequence).graph
        for name in clusters:
            if (case.model, case.batch, name) in done:
                continue
            print(f"{case.model} on {name} …", file=sys.stderr, flush=True)
            record.rows.append(compare(case, graph, load_cluster(CLUSTERS[name]), Budget(options.budget)))
            record.write(options.json)
    show(record.rows)
    claim(record)
    record.print_summary()
    record.write(options.json)
    worst = max((row["joint_over_sequential"] for row in record.rows if row["joint_over_sequential"]), default=0.0)
    assert worst <= 1 + 1e-9, "a sequential search found a cheaper plan than the joint one"


def compare(case: Case, graph: Graph, cluster: Cluster, budget: Budget) -> dict[str, Any]:
    """The three plans of one model on one cluster."""
    (problem,) = plan_problems(graph, cluster, mode="train", memory_limit=cluster.memory_bytes)
    row: dict[str, Any] = {
        "model": case.model,
        "batch": case.batch,
        "sequence": case.sequence,
        "cluster": cluster.name,
        "mesh": str(problem.mesh),
        "source_alone_s": price_alone(problem, graph),
    }
    joint = found_by(problem, budget)
    row |= entries("joint", joint)
    row |= kept(problem, joint, budget)
    row |= entries("parallel", found_by(replace(problem, rules=()), budget))
    rewritten, row["sequential_rules"] = best_algebra(problem, joint, budget)
    row["sequential_alone_s"] = price_alone(problem, rewritten)
    if rewritten.digest == graph.digest:  # nothing to take on one device: then parallelism is all there is
        row["sequential_s"] = row["parallel_s"]
    else:
        row["sequential_s"] = entries("", found_by(replace(problem, graph=rewritten, rules=()), budget))["_s"]
    for other in ("sequential", "parallel"):
        row[f"joint_over_{other}"] = ratio(row["joint_s"], row[f"{other}_s"])
    row["alone"] = ratio(row.get("joint_alone_s"), row["source_alone_s"])
    return row


def kept(problem: Problem, joint: Answer, budget: Budget) -> dict[str, Any]:
    """A row's entries where memory is short: a share of what the joint plan keeps allocated may be."""
    found = joint[0]
    if isinstance(found, str):
        return {}
    try:
        within = backtrack(replace(problem, memory_limit=TIGHT * found.cost.memory_bytes), budget)
    except NoPlanFitsError as error:
        return {"kept_s": None, "kept_refused": str(error)}
    return {"kept_s": within.cost_s, "kept_gap": within.gap, "kept_complete": within.complete}


def found_by(problem: Problem, budget: Budget) -> Answer:
    """The best plan of a search and its CPU-seconds, or why there is none."""
    started = time.process_time()
    try:
        return search_mesh(problem, budget=budget), time.process_time() - started
    except NoPlanFitsError as error:
        return str(error), time.process_time() - started


def entries(kind: str, answer: Answer) -> dict[str, Any]:
    """A row's entries for an answer, under keys that begin with ``kind``."""
    found, seconds = answer
    if isinstance(found, str):
        return {f"{kind}_s": None, f"{kind}_refused": found}
    told = {
        "s": found.cost.seconds,
        "gap": found.gap,
        "complete": found.complete,
        "search_cpu_s": seconds,
        "rules": taken(found),
        "alone_s": price_alone(found.solution.problem, found.solution.graph),
        "peak_bytes": found.cost.peak_bytes,
    }
    return {f"{kind}_{key}": value for key, value in told.items()}


def best_algebra(problem: Problem, joint: Answer, budget: Budget) -> tuple[Graph, dict[str, int]]:
    """The cheapest equal program on one device, where memory is no matter, and the rules that lead to it.

    A search leaves out what saves little, so the joint plan's graph is looked at too.
    """
    alone = search_mesh(on_one_device(problem, problem.graph), budget=budget)
    plans = [found for found in (alone, joint[0]) if not isinstance(found, str)]
    known = [(problem.graph, {}), *((found.solution.graph, taken(found)) for found in plans)]
    return min(known, key=lambda entry: price_alone(problem, entry[0]))


def on_one_device(problem: Problem, graph: Graph) -> Problem:
    """The same model on one of the cluster's devices, all of its memory needs met."""
    return replace(problem, graph=graph, mesh=Mesh(()), axes=(), memory_limit=float("inf"))


def price_alone(problem: Problem, graph: Graph) -> float:
    """Seconds per step of a serial graph on one device."""
    return plan_cost(on_one_device(problem, graph), graph).seconds


def taken(found: BestPlan) -> dict[str, int]:
    """How many blocks each rule was applied in, most first."""
    return dict(Counter(step.rule for step in found.solution.steps).most_common())


def ratio(found: float | None, other: float | None) -> float | None:
    """found / other, where both are."""
    return found / other if found and other else None


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A line per model and cluster."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines: list[tuple[str, ...]] = [
        (
            row["model"],
            row["cluster"],
            *(
                number(row[f"{kind}_s"] and row[f"{kind}_s"] * 1e3, ".3f")
                for kind in ("joint", "sequential", "parallel")
            ),
            number(row["joint_over_sequential"], ".3f"),
            number(row["joint_over_parallel"], ".3f"),
            number(row["alone"], ".4f"),
            number(row.get("joint_gap"), ".1e"),
            number(row.get("kept_gap"), ".1e"),
            ", ".join(f"{rule} x{count}" for rule, count in row.get("joint_rules", {}).items()),
        )
        for row in rows
    ]
    header = (
        "model",
        "cluster",
        "joint ms",
        "sequential ms",
        "parallel only ms",
        "joint/seq",
        "joint/par",
        "alone",
        "gap",
        "kept gap",
    )
    table((*header, "rules"), lines)


def claim(record: Record) -> None:
    """Worst and best ratios, how often joint is strictly better, and where rewrites that cost time alone were taken."""
    compared = [row for row in record.rows if row["joint_over_sequential"]]
    if not compared:
        return
    by_sequence = [row["joint_over_sequential"] for row in compared]
    strictly = [row for row in compared if row["joint_over_sequential"] < BETTER]
    costly = [row for row in strictly if row["alone"] > 1]
    record.claim("joint over sequential, worst", max(by_sequence), "x", "(at most 1: never beaten)")
    record.claim("joint over sequential, best", min(by_sequence), "x")
    record.claim("pairs where joint is strictly better", len(strictly), f"of {len(compared)}")
    record.claim("of these, with rewrites that cost time on one device", len(costly), "pairs")
    for row in costly:
        alone = f"{row['joint_alone_s'] * 1e3:.4g} ms rewritten, {row['source_alone_s'] * 1e3:.4g} ms as written"
        spread = f"of sequential ({', '.join(row['joint_rules'])}; alone: {alone}, x {row['alone']:.4f})"
        record.claim(f"{row['model']} on {row['cluster']}", row["joint_over_sequential"], "x", spread)
    for kind, where in (
        ("joint", "with room"),
        ("kept", f"where {TIGHT:g} of what the plan keeps is allowed"),
    ):
        planned = [row for row in record.rows if row.get(f"{kind}_s")]
        gaps = {f"{row['model']} ({row['batch']}) on {row['cluster']}": row[f"{kind}_gap"] for row in planned}
        if gaps:
            worst = max(gaps, key=lambda name: gaps[name])
            above = sum(gap > 0.01 for gap in gaps.values())
            spread = f"({worst}; {len(gaps)} plans, {above} of them above 1 %)"
            record.claim(f"largest certified gap, {where}", 100 * gaps[worst], "%", spread)


if __name__ == "__main__":
    main()
