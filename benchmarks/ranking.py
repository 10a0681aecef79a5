"""Are plans ordered right? Many plans of one model are run on this machine's processes and priced by each cost model.

    python benchmarks/ranking.py [--smoke] [--plans 15] [--folder DIR] [--groups 1] [--json OUT]
    python benchmarks/ranking.py --rescore benchmarks/results/ranking.json

Within a group (model, batch, processes) every two plans are a pair; pairs whose measured steps differ by less than
10 % are left out. Groups that the record has already are not run again. A step is forward, loss, backward and AdamW;
gloo's collectives and the machine's speed are measured in the same run, and a device is a process with its share of a
core. With --folder DIR and --prepare once, then --groups 1 and --json OUT, each run takes one group further.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cost_speed import usable
from benchmarks.measured.many_plans import GROUPS, Group, module_of, plans_of, problem_of, program_of
from benchmarks.measured.run_packages import on_ranks, run_collectives, run_packages
from benchmarks.record import Record, arguments, table
from ir.graph import Graph
from ir.mesh import Axis, Mesh
from pdv.cluster import Cluster, load_cluster
from pdv.cluster.presets import DEVICES
from pdv.cost.breakdown import PlanCost
from pdv.cost.comm import AxisLink
from pdv.cost.curves import Curves
from pdv.emit.package import emit_package
from pdv.measure.speed import present_speed
from pdv.pcg.plan_cost import plan_cost, realize
from pdv.plan.derivation import replay_steps
from pdv.prices import cost_model
from pdv.problem import Problem

APART = 0.1  # of the faster one: pairs closer than that are noise
MODELS = ("analytic", "learned", "measured", "auto")
COLLECTIVE_STD = 0.2  # of gloo's collectives between runs of this benchmark, two ranks, 2026-11-21
SIZES = tuple(4**power * 1024 for power in range(8))
Row = dict[str, Any]  # Any: JSON


def main() -> None:
    """Run what the record lacks, then score."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--plans", type=int, default=15, help="plans of each group")
    parser.add_argument("--seconds", type=float, default=50.0, help="for each group's steps")
    parser.add_argument("--groups", type=int, default=len(GROUPS), help="at most so many that the record lacks")
    parser.add_argument("--folder", type=Path, help="where packages are kept, to be run later")
    parser.add_argument("--prepare", action="store_true", help="only write the packages")
    parser.add_argument("--rescore", type=Path, metavar="RECORD", help="price and score what a record has measured")
    parser.add_argument("--cost", nargs="*", default=MODELS, help="cost models: names as --cost takes them")
    options = parser.parse_args()
    source: Path | None = options.rescore or options.json
    record = Record(rows=json.loads(source.read_text())["rows"] if source and source.exists() else [])
    if options.rescore is None:
        groups, count = (GROUPS[1:2], 3) if options.smoke else (GROUPS, options.plans)
        with tempfile.TemporaryDirectory() as scratch:
            lacking = [group for group in groups if not any(row["group"] == group.name for row in record.rows)]
            for group in lacking[: options.groups]:
                record.rows += measured(group, options.folder or Path(scratch), count, options)
                record.write(options.json)
    if not options.prepare:
        score(record, usable(options.cost))
        record.print_summary()
        record.write(options.json)


def measured(group: Group, folder: Path, count: int, options: Any) -> list[Row]:
    """The plans of a group, written if they are not there yet, and run."""
    rows = packages(group, folder / group.name.replace(" ", "-"), count)
    if options.prepare:
        return []
    started = time.monotonic()
    seconds = 1.0 if options.smoke else options.seconds
    directories = [(row["key"], row.pop("directory")) for row in rows]
    inputs = [x.numpy() for x in module_of(group.model)[1]]
    machine_speed = present_speed(DEVICES["cpu-core"], group.processes).factor
    times = on_ranks(run_packages, group.processes, directories, inputs, group.loss, seconds)
    links = on_ranks(run_collectives, group.processes, SIZES[:2] if options.smoke else SIZES)
    print(f"{group.name}: {len(rows)} plans in {time.monotonic() - started:.0f} s", flush=True)
    plans = [{**row, **found, "machine_speed": machine_speed} for row, found in zip(rows, times, strict=True)]
    return [*plans, {"group": group.name, "links": links}]


def packages(group: Group, folder: Path, count: int) -> list[Row]:
    """Write a group's packages; what was written before is read."""
    index = folder / "plans.json"
    if index.exists():
        rows: list[Row] = json.loads(index.read_text())
        return rows
    program, rows = program_of(group.model), []
    for number, plan in enumerate(plans_of(group, program, count)):
        problem = plan.found.solution.problem
        directory = folder / f"{group.model}_{group.processes}_{number}"
        directory.mkdir(parents=True, exist_ok=True)
        emit_package(plan.found.pcg, problem.mesh, {"mode": "train"}, program.weights, directory)
        rows.append(
            {
                "group": group.name, "key": f"{group.name} {number}", "asked": plan.asked,
                "mesh": {axis.name: axis.size for axis in problem.mesh.axes},
                "speed": problem.axes[0].link.bandwidth_bytes_per_s, "pcg_hash": plan.found.pcg.digest,
                "derivation": json.dumps(plan.steps), "directory": str(directory),
            }
        )  # fmt: skip
    index.write_text(json.dumps(rows))
    return rows


def score(record: Record, names: Sequence[str]) -> None:
    """Price every plan by every model; claim pairs ordered right, Kendall's tau and the error of step times."""
    plans = [row for row in record.rows if "step_s" in row]
    run = [group for group in GROUPS if any(row["group"] == group.name for row in plans)]
    graphs = {model: program_of(model).graph for model in dict.fromkeys(group.model for group in run)}
    for group in run:
        rows = [row for row in plans if row["group"] == group.name]
        for row, name in itertools.product(rows, names):
            cost = priced(row, graphs[group.model], group.processes, links(record, group.processes), name)
            row.setdefault("predicted_s", {})[name] = cost.step_s
            row.setdefault("predicted_std_s", {})[name] = cost.std_s
            row.setdefault("parts_s", {})[name] = parts(cost)
    show(plans, names)
    for name in names:
        pairs, right, tau, error = scores(plans, name)
        record.claim(f"{name}: pairs more than 10 % apart", pairs, "pairs")
        record.claim(f"{name}: pairs ordered right", 100 * right, "%")
        record.claim(f"{name}: Kendall's tau, mean over groups", tau, "")
        record.claim(f"{name}: mean error of the step time", 100 * error, "%")


def links(record: Record, processes: int) -> dict[int, Curves]:
    """By size of a group: medians over what was measured beside all groups of plans on so many processes."""
    found: dict[int, dict[tuple[str, float], list[float]]] = {}
    for row in record.rows:
        measured = row.get("links", ())
        if max((one["n"] for one in measured), default=0) == processes:
            for one in measured:
                point = one["collective"], one["bytes"]
                found.setdefault(one["n"], {}).setdefault(point, []).append(one["latency_s"])
    medians = {n: [(*key, statistics.median(s)) for key, s in points.items()] for n, points in found.items()}
    return {n: Curves.of(points, "measured", COLLECTIVE_STD) for n, points in medians.items()}


def parts(cost: PlanCost) -> dict[str, float]:
    """Seconds of a price by what they are for."""
    return {
        "compute": cost.compute_s, "communication": cost.communication_s, "optimizer": cost.optimizer_s,
        "outside": cost.outside.mean_s, **{f"from {name}": s for name, s in cost.seconds_by_source.items()},
    }  # fmt: skip


def priced(row: Row, graph: Graph, processes: int, curves: Mapping[int, Curves], name: str) -> PlanCost:
    """A measured plan's price."""
    problem, pcg, _ = here(row, graph, processes, {} if name == "analytic" else curves, name)
    return plan_cost(problem, pcg)


def here(
    row: Row, graph: Graph, processes: int, curves: Mapping[int, Curves], cost: str
) -> tuple[Problem, Graph, Cluster]:
    """A measured plan, replayed as it was planned, on the machine as it is: its problem, PCG and cluster."""
    mesh = Mesh(tuple(Axis(axis, size) for axis, size in row["mesh"].items()))
    problem = problem_of(graph, mesh, speed=row["speed"])
    rewritten, assignment = replay_steps(problem, json.loads(row["derivation"]))
    pcg = realize(replace(problem, graph=rewritten), assignment).derived.pcg
    assert pcg.digest == row["pcg_hash"], f"{row['key']} replays to another graph"
    cluster = load_cluster(machine(processes, row.get("machine_speed", 1.0)))
    link, wider = cluster.levels[-1].link, tuple(sorted(curves.items()))
    axes = tuple(AxisLink(axis.size, link, curves.get(axis.size), library="gloo", wider=wider) for axis in mesh.axes)
    compute = cost_model(cost, [entry.device for entry in cluster.classes])
    return replace(problem, graph=rewritten, axes=axes, compute=compute), pcg, cluster


def machine(processes: int, speed: float) -> Mapping[str, Any]:
    """The machine at hand as a cluster: a device is a process with its share of a core, at the speed that it had."""
    share = min(1.0, (os.cpu_count() or processes) / processes)
    device = {"preset": "cpu-core", "share": share, "speed": speed}
    return {"nodes": [{"devices": processes, "device": device, "link": "loopback-gloo"}]}


def scores(plans: Sequence[Row], name: str) -> tuple[int, float, float, float]:
    """(pairs apart, share ordered right, Kendall's tau over all pairs by group, mean relative error)."""
    pairs, right = 0, 0
    taus = []
    for group in dict.fromkeys(row["group"] for row in plans):
        rows = [row for row in plans if row["group"] == group]
        agree = []
        for a, b in itertools.combinations(rows, 2):
            fast, slow = sorted((a, b), key=lambda row: float(row["step_s"]))
            ordered = fast["predicted_s"][name] < slow["predicted_s"][name]
            agree.append(1 if ordered else -1)
            if slow["step_s"] > (1 + APART) * fast["step_s"]:
                pairs += 1
                right += ordered
        taus.append(statistics.mean(agree) if agree else 0.0)
    error = statistics.mean(abs(row["predicted_s"][name] - row["step_s"]) / row["step_s"] for row in plans)
    return pairs, right / max(pairs, 1), statistics.mean(taus), error


def show(plans: Sequence[Row], names: Sequence[str]) -> None:
    """Measured against predicted, by plan."""
    rows = [
        (row["key"], row["asked"], f"{row['step_s'] * 1e3:.1f}", *(f"{row['predicted_s'][n] * 1e3:.1f}" for n in names))
        for row in plans
    ]
    table(("plan", "asked", "measured ms", *names), rows)


if __name__ == "__main__":
    main()
