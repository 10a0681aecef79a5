"""Steps of emitted programs on this machine's processes against the simulator: many plans of several models.

    python benchmarks/loopback.py [--record benchmarks/results/ranking.json] [--cost measured] [--smoke] [--json OUT]

The plans and their measured steps are those of `benchmarks/ranking.py`, which runs them; here each is simulated as the
emitted program runs it, with the collectives that were measured in the same run. Groups are a model on so many
processes. Constants of a step on a CPU are fitted on one half of the groups (`--fit`), so both halves are reported.
"""

from __future__ import annotations

import json
import math
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measured.many_plans import GROUPS, program_of
from benchmarks.ranking import here, links
from benchmarks.record import ROOT, Record, arguments, table
from ir.graph import Graph
from pdv.problem.workload import Workload, workload_of_pcg
from pdv.simulate.calibration import CALIBRATION, Calibration
from pdv.simulate.step import simulate

Row = dict[str, Any]  # Any: JSON
FITTED = ("kernels_cpu", "copies_cpu")


def main() -> None:
    """Simulate every plan of the record, and claim errors and orders."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--record", type=Path, default=ROOT / "benchmarks" / "results" / "ranking.json")
    parser.add_argument("--cost", default="measured", help="what prices kernels, as pdv takes it")
    parser.add_argument("--fit", action="store_true", help="fit constants on half of the groups, and print them")
    options = parser.parse_args()
    source = Record(rows=json.loads(options.record.read_text())["rows"])
    rows = [row for row in source.rows if "step_s" in row]
    if options.smoke:
        rows = [row for row in rows if row["group"] == "mlp on 2"][:3]
    works = workloads(source, rows, options.cost)
    if options.fit:
        print(fit([pair for pair in zip(rows, works, strict=True) if half_of(pair[0]) == 0]))
        return
    record = Record(rows=[row_of(row, work) for row, work in zip(rows, works, strict=True)])
    for name in ("all", "half 0", "half 1"):
        claim(record, name, [row for row in record.rows if name in ("all", f"half {row['half']}")])
    show(record.rows)
    record.print_summary()
    record.write(options.json)


def half_of(row: Row) -> int:
    """0 or 1, equal within a group."""
    return zlib.crc32(row["group"].encode()) % 2


def workloads(source: Record, rows: Sequence[Row], cost: str) -> list[Workload]:
    """Each plan replayed, on the machine as it is."""
    groups = {group.name: group for group in GROUPS}
    models = dict.fromkeys(groups[row["group"]].model for row in rows)
    graphs = {model: program_of(model).graph for model in models}
    asked = [(row, groups[row["group"]]) for row in rows]
    return [workload_of(source, row, graphs[group.model], group.processes, cost) for row, group in asked]


def workload_of(source: Record, row: Row, graph: Graph, processes: int, cost: str) -> Workload:
    """A plan of the record as the emitted program runs it."""
    return workload_of_pcg(*here(row, graph, processes, links(source, processes), cost))


def row_of(row: Row, work: Workload) -> Row:
    """A plan's measured and simulated step."""
    found = simulate(work, draws=8)
    return {
        "plan": row["key"], "group": row["group"], "half": half_of(row), "measured_s": row["step_s"],
        "predicted_s": found.step_s, "std_s": found.std_s, "breakdown": found.totals,
    }  # fmt: skip


def claim(record: Record, name: str, rows: Sequence[Row]) -> None:
    """Error of the step time; Kendall's tau over all plans, and within groups."""
    if not rows:
        return
    from scipy.stats import kendalltau

    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    record.claim(f"{name}: error of the step time", 100 * statistics.fmean(errors), "%", f"{len(rows)} plans")
    pairs = [(row["measured_s"], row["predicted_s"]) for row in rows]
    record.claim(f"{name}: Kendall's tau over all plans", float(kendalltau(*zip(*pairs, strict=True))[0]), "")
    groups = {
        row["group"]: [(r["measured_s"], r["predicted_s"]) for r in rows if r["group"] == row["group"]] for row in rows
    }
    taus = [float(kendalltau(*zip(*group, strict=True))[0]) for group in groups.values()]
    record.claim(f"{name}: Kendall's tau within groups, mean", statistics.fmean(taus), "", f"{len(taus)} groups")
    slower = [min(group, key=lambda pair: pair[1])[0] / min(group)[0] - 1 for group in groups.values()]
    record.claim(f"{name}: slower than the group's best, worst", 100 * max(slower), "%")


def show(rows: Sequence[Row]) -> None:
    """Measured against predicted, by plan."""
    cells = [
        (row["plan"], f"{row['measured_s'] * 1e3:.1f}", f"{row['predicted_s'] * 1e3:.1f} ± {row['std_s'] * 1e3:.1f}")
        for row in rows
    ]
    table(("plan", "measured ms", "predicted ms"), cells)


def fit(pairs: Sequence[tuple[Row, Workload]]) -> Calibration:
    """Least squares of log ratios, groups alike."""
    from scipy.optimize import least_squares

    sizes = {row["group"]: sum(other["group"] == row["group"] for other, _ in pairs) for row, _ in pairs}

    def at(logs: Sequence[float]) -> Calibration:
        return replace(CALIBRATION, **{name: math.exp(value) for name, value in zip(FITTED, logs, strict=True)})

    def residual(calibration: Calibration, row: Row, work: Workload) -> float:
        ratio = simulate(work, calibration=calibration, draws=0).step_s / row["step_s"]
        return math.log(ratio) / math.sqrt(sizes[row["group"]])

    def residuals(logs: Sequence[float]) -> list[float]:
        return [residual(at(logs), row, work) for row, work in pairs]

    start = [math.log(getattr(CALIBRATION, name)) for name in FITTED]
    return at(least_squares(residuals, start, loss="soft_l1", f_scale=0.05, diff_step=0.05).x)


if __name__ == "__main__":
    main()
