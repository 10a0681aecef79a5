"""How fast steps are simulated: a large one in full, and plans that differ in one operator, in CPU-seconds.

    python benchmarks/simulate_speed.py [--smoke] [--json OUT] [--models A,B] [--changes N]

A Llama-3-405B step on 1,024 devices is simulated once, from its PCG on, with nothing known beforehand. Then, for each
model of the set, random operators of its best plan are split otherwise, one after the other. Each such plan is
simulated twice, in turns: in full (assignment to PCG to tasks to time; collectives and kernels are priced already, and
equal layers simulated once) and by what differs (`pdv.simulate.delta`). Both must give the same picoseconds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.joint import CLUSTERS
from benchmarks.record import Record, arguments, table
from benchmarks.searchers import CASES, Case
from benchmarks.shapes import program
from ir.graph import Node
from ir.operator import Split
from ir.sharding import Sharding, fits, invariant
from ir.types import DType
from ir.verify import divides
from pdv.cluster import Cluster, Device, load_cluster
from pdv.compile import plan_problems
from pdv.cost.compute import ComputeModel
from pdv.pcg.derive import derive
from pdv.pcg.redistribute import Redistribution
from pdv.problem import Assignment, Problem
from pdv.search.chain import ChainSolver
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.delta import Delta
from pdv.simulate.setup import EMITTED, Stages, Workload
from pdv.simulate.stage import Lowered
from pdv.simulate.step import run, simulate

LARGE = "tp=8,pp=16,dp=8,vp=4,schedule=interleaved,micro_batch=1,batch=1024,sp=1"  # 128 micro-batches
CLUSTER = "infiniband-8x8"
CHANGES = 100
ASKED = 7.0  # times as fast; FlexFlow reports 2.2 to 6.9 (Jia et al., SysML'19, table 4)


def main() -> None:
    """Print the tables; with --json write the record."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--models", default=",".join(case.model for case in CASES), help="comma-separated")
    parser.add_argument("--changes", type=int, default=CHANGES, help="of each model")
    options = parser.parse_args()
    record = Record()
    if not options.smoke:
        record.rows.append(large())
    for case in cases_of(options):
        record.rows.append(changes(case, 3 if options.smoke else options.changes))
        record.write(options.json)
    show(record)
    record.print_summary()
    record.write(options.json)


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The models asked for."""
    wanted = options.models.split(",")
    return [Case("mlp", 64)] if options.smoke else [case for case in CASES if case.model in wanted]


def large() -> dict[str, Any]:
    """Llama-3-405B: CPU-seconds from the PCG on, in a process that has simulated nothing yet."""
    from pdv.frontend.arch import arch
    from pdv.frontend.arch_graph import graph
    from pdv.simulate.configuration import configuration, workload

    node = {"count": 128, "devices": 8, "device": "h100-80gb-sxm", "link": "nvlink4"}
    cluster, given, model = (
        load_cluster({"nodes": [node], "network": "ib-ndr"}),
        configuration(LARGE),
        arch("llama-3-405b"),
    )
    made = workload(lambda batch: graph(model, batch, DType.BF16, tp=8), given, cluster, analytic)
    started = time.process_time()
    found = simulate(made)
    spent = time.process_time() - started
    return {
        "model": "llama-3-405b",
        "configuration": LARGE,
        "nodes": len(made.pcg.nodes),
        "cpu_s": spent,
        "step_s": found.step_s,
    }


def analytic(device: Device) -> ComputeModel:
    """By arithmetic: what is timed here is the simulator, not a cost model."""
    return ComputeModel((device,))


def changes(case: Case, count: int) -> dict[str, Any]:
    """One model: CPU-seconds of each change, in full and by what differs."""
    graph, cluster = program(case.model, case.batch, case.sequence).graph, load_cluster(CLUSTERS[CLUSTER])
    (problem,) = plan_problems(graph, cluster, mode="train", memory_limit=float("inf"))
    problem = replace(problem, rules=())  # the graph stays as it was written
    print(f"{case.model}: {len(graph.nodes)} nodes …", file=sys.stderr, flush=True)
    solution = ChainSolver(problem).solve()
    problem, assignment = replace(problem, graph=solution.graph), solution.assignment
    proposals = Proposals(problem, np.random.default_rng(0))
    delta = Delta.of(problem, assignment, cluster, compute_of=analytic)
    delta.ran  # noqa: B018  # as a search that has priced its first plan
    full_s: list[float] = []
    delta_s: list[float] = []
    for _ in range(count):
        node, splits = proposals.draw(assignment)
        started = time.process_time()
        after = delta.changed({node: splits})
        end = after.ran.end
        delta_s.append(time.process_time() - started)
        other = Assignment({**assignment.splits, node: splits}, assignment.storage)
        started = time.process_time()
        expected = in_full(problem, other, cluster, proposals.moves)
        full_s.append(time.process_time() - started)
        assert end == expected, f"{case.model}: {node!r} as {[split.label for split in splits]}: {end} for {expected}"
        delta, assignment = after, other
    return {
        "model": case.model,
        "nodes": len(graph.nodes),
        "mesh": str(problem.mesh),
        "full_s": full_s,
        "delta_s": delta_s,
    }


def in_full(problem: Problem, assignment: Assignment, cluster: Cluster, moves: Redistribution) -> int:
    """Picoseconds of a plan's step, from its assignment on."""
    pcg = derive(problem, assignment, moves).pcg
    made = Workload(problem, pcg, cluster, Stages(), EMITTED, (problem.axes,), analytic)
    return run(Lowered(made, CALIBRATION)).end


class Proposals:
    """Single operators split otherwise, so that the plan can be made."""

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        self.problem, self.rng = problem, rng
        self.moves = Redistribution(problem.mesh, problem.axes)
        self.operators = [node for node in problem.graph.nodes if not node.is_leaf]

    def draw(self, assignment: Assignment) -> tuple[Node, tuple[Split, ...]]:
        """An operator that has other legal splits, and one of them."""
        while True:
            node = self.operators[int(self.rng.integers(len(self.operators)))]
            options = [splits for splits in self.options(node) if splits != assignment.splits[node]]
            legal = [splits for splits in options if self.fits(node, splits, assignment)]
            if legal:
                return node, legal[int(self.rng.integers(len(legal)))]

    def options(self, node: Node) -> list[tuple[Split, ...]]:
        """Splits that divide."""
        mesh = self.problem.mesh
        each = itertools.product(node.op.splits(node.loops), repeat=len(mesh.axes))
        return [splits for splits in each if divides(node.loops, splits, mesh)]

    def fits(self, node: Node, splits: tuple[Split, ...], assignment: Assignment) -> bool:
        """Whether operands can be brought to where they are wanted, and the result to its readers."""
        made = tuple(split.result for split in splits)
        wanted = [tuple(split.operands[i] for split in splits) for i in range(len(node.operands))]
        moved = [(x, self.state(x, assignment), after) for x, after in zip(node.operands, wanted, strict=True)]
        for reader in self.problem.graph.users[node]:
            found = assignment.splits[reader]
            read = [i for i, operand in enumerate(reader.operands) if operand is node]
            moved += [(node, made, tuple(split.operands[i] for split in found)) for i in read]
        mesh = self.problem.mesh
        if not all(fits(x.type, before, mesh) and fits(x.type, after, mesh) for x, before, after in moved):
            return False
        if any(self.moves.chain(x.type, a, b, gradient=x.needs_grad) is None for x, a, b in moved):
            return False
        return node not in self.problem.graph.roots  # where outputs leave is the search's matter

    def state(self, value: Node, assignment: Assignment) -> Sharding:
        """Of a value's result."""
        if value in assignment.splits:
            return tuple(split.result for split in assignment.splits[value])
        storage = assignment.storage.get(value)
        return invariant(self.problem.mesh) if storage is None else storage.sharding


def show(record: Record) -> None:
    """Tables and claims."""
    rows, ratios = [], []
    for row in record.rows:
        if "cpu_s" in row:
            name = "Llama-3-405B on 1,024 devices, 16 stages, 128 micro-batches, interleaved: simulated in full"
            record.claim(name, row["cpu_s"], "CPU-s", f"{row['nodes']} nodes")
            continue
        full, delta = statistics.median(row["full_s"]), statistics.median(row["delta_s"])
        ratios.append(sum(row["full_s"]) / sum(row["delta_s"]))
        rows.append((
            row["model"], str(row["nodes"]), f"{1e3 * full:.1f}", f"{1e3 * delta:.2f}", f"{full / delta:.1f}",
            f"{ratios[-1]:.1f}", f"{min(f / d for f, d in zip(row['full_s'], row['delta_s'], strict=True)):.1f}",
        ))  # fmt: skip
    print()
    table(("model", "nodes", "full, ms", "delta, ms", "median ratio", "all changes", "worst change"), rows)
    if ratios:
        record.claim(
            "delta simulation: times as fast as in full, least of all models", min(ratios), "x", f"asked: {ASKED:g}"
        )
        record.claim("delta simulation: times as fast as in full, median of models", statistics.median(ratios), "x")


if __name__ == "__main__":
    main()
