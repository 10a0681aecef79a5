"""Are plans ordered right, and their steps foretold? Many plans of one model are run on this machine's processes, and
simulated as the emitted program runs them by each cost model: the step that `pdv optimize` prints.

    python benchmarks/ranking.py [--smoke] [--plans 15] [--folder DIR] [--groups 1] [--json OUT]
    python benchmarks/ranking.py --rescore OUT [--cost auto] [--fit]

Within a group (model, batch, processes) every two plans are a pair; pairs whose measured steps differ by less than
10 % are left out. Groups that the record has already are not run again. A step is forward, loss, backward and AdamW;
gloo's collectives and the machine's speed are measured in the same run, and a device is a process with its share of a
core. With --folder DIR and --prepare once, then --groups 1 and --json OUT, each run takes one group further. A record
is scored again (--rescore) as long as its plans replay to the graphs that ran. Constants of a step on a CPU are fitted
on one half of the groups (--fit).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import tempfile
import time
import zlib
from collections import Counter
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
from learned_cost.evaluation.evaluate import Z90
from pdv.cluster import Cluster, load_cluster
from pdv.cluster.presets import DEVICES
from pdv.cost.comm import CALLED_S, AxisLink, calling_s
from pdv.cost.curves import Curves
from pdv.emit.package import emit_package
from pdv.measure.speed import present_speed
from pdv.pcg.plan_cost import realize
from pdv.plan.derivation import replay_steps
from pdv.prices import cost_model
from pdv.problem import Problem
from pdv.problem.workload import Workload, workload_of_pcg
from pdv.simulate.calibration import CALIBRATION, Calibration
from pdv.simulate.step import simulate

FITTED = ("kernels_cpu", "copies_cpu")
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
    parser.add_argument("--fit", action="store_true", help="fit constants on half of the groups, and print them")
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
    if options.fit:
        print(fit(record, usable(options.cost)[-1]))
    elif not options.prepare:
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
    """Simulate every plan by every model; claim what the steps say of each."""
    for name in names:
        for row, work in workloads(record, name):
            found = simulate(work, draws=8)
            row.setdefault("predicted_s", {})[name] = found.step_s
            row.setdefault("predicted_std_s", {})[name] = found.std_s
            row.setdefault("parts_s", {})[name] = found.totals
    plans = [row for row in record.rows if "step_s" in row]
    show(plans, names)
    for name in names:
        claim(record, plans, name)


def workloads(record: Record, name: str) -> list[tuple[Row, Workload]]:
    """The plans that a record ran, each replayed on the machine as it was, as the emitted program runs it."""
    groups = {group.name: group for group in GROUPS}
    plans = [(row, groups[row["group"]]) for row in record.rows if "step_s" in row]
    graphs = {model: program_of(model).graph for model in dict.fromkeys(group.model for _, group in plans)}
    curves = {count: links(record, count) if name != "analytic" else {} for count in {g.processes for _, g in plans}}
    return [
        (row, workload_of_pcg(*here(row, graphs[group.model], group.processes, curves[group.processes], name)))
        for row, group in plans
    ]


def fit(record: Record, name: str) -> Calibration:
    """Least squares of log ratios on half of the groups, these alike."""
    from scipy.optimize import least_squares

    pairs = [(row, work) for row, work in workloads(record, name) if zlib.crc32(row["group"].encode()) % 2 == 0]
    sizes = Counter(row["group"] for row, _ in pairs)

    def at(logs: Sequence[float]) -> Calibration:
        return replace(CALIBRATION, **{name: math.exp(value) for name, value in zip(FITTED, logs, strict=True)})

    def residual(calibration: Calibration, row: Row, work: Workload) -> float:
        ratio = simulate(work, calibration=calibration, draws=0).step_s / row["step_s"]
        return math.log(ratio) / math.sqrt(sizes[row["group"]])

    def residuals(logs: Sequence[float]) -> list[float]:
        return [residual(at(logs), row, work) for row, work in pairs]

    start = [math.log(getattr(CALIBRATION, name)) for name in FITTED]
    return at(least_squares(residuals, start, loss="soft_l1", f_scale=0.05, diff_step=0.05).x)


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
    called_s = CALLED_S if curves else calling_s(entry.device for entry in cluster.classes)
    axes = tuple(
        AxisLink(axis.size, link, curves.get(axis.size), library="gloo", wider=wider, called_s=called_s)
        for axis in mesh.axes
    )
    compute = cost_model(cost, [entry.device for entry in cluster.classes])
    return replace(problem, graph=rewritten, axes=axes, compute=compute), pcg, cluster


def machine(processes: int, speed: float) -> Mapping[str, Any]:
    """The machine at hand as a cluster: a device is a process with its share of a core, at the speed that it had."""
    share = min(1.0, (os.cpu_count() or processes) / processes)
    device = {"preset": "cpu-core", "share": share, "speed": speed}
    return {"nodes": [{"devices": processes, "device": device, "link": "loopback-gloo"}]}


def claim(record: Record, plans: Sequence[Row], name: str) -> None:
    """Pairs ordered right, Kendall's tau, how much slower the plan chosen is than its group's best; error of steps."""
    pairs = right = 0
    taus, slower = [], []
    for group in dict.fromkeys(row["group"] for row in plans):
        rows = sorted((row for row in plans if row["group"] == group), key=lambda row: float(row["step_s"]))
        agree = []
        for fast, slow in itertools.combinations(rows, 2):
            ordered = fast["predicted_s"][name] < slow["predicted_s"][name]
            agree.append(1 if ordered else -1)
            if slow["step_s"] > (1 + APART) * fast["step_s"]:
                pairs += 1
                right += ordered
        taus.append(statistics.mean(agree) if agree else 0.0)
        slower.append(min(rows, key=lambda row: float(row["predicted_s"][name]))["step_s"] / rows[0]["step_s"] - 1)
    off = {row["key"]: row["predicted_s"][name] / row["step_s"] - 1 for row in plans}
    held = [abs(row["predicted_s"][name] - row["step_s"]) < Z90 * row["predicted_std_s"][name] for row in plans]
    record.claim(f"{name}: pairs more than 10 % apart", pairs, "pairs")
    record.claim(f"{name}: pairs ordered right", 100 * right / max(pairs, 1), "%")
    record.claim(f"{name}: Kendall's tau, mean over groups", statistics.mean(taus), "")
    record.claim(f"{name}: slower than the group's best, worst", 100 * max(slower), "%")
    record.claim(f"{name}: mean error of the step time", 100 * statistics.mean(map(abs, off.values())), "%")
    record.claim(f"{name}: steps in their 90 % interval", 100 * statistics.mean(held), "%")


def show(plans: Sequence[Row], names: Sequence[str]) -> None:
    """Measured against predicted, by plan."""
    rows = [
        (row["key"], row["asked"], f"{row['step_s'] * 1e3:.1f}", *(f"{row['predicted_s'][n] * 1e3:.1f}" for n in names))
        for row in plans
    ]
    table(("plan", "asked", "measured ms", *names), rows)


if __name__ == "__main__":
    main()
