"""All strategies on the same problems: cost reached against time, on eight models x four clusters.

    python benchmarks/searchers.py [--smoke] [--json OUT] [--plot FILE] [--models A,B] [--clusters A,B] [--seconds S]
                                    [--strategies A;B] [--rows JSON ...]

Each strategy gets the same CPU time on one mesh per cluster, what it needs to build its tables included; what ends by
itself may take longer (``dp`` and ``backtrack`` are not cut short). Costs are those of whole plans, derived and priced
alike. ``backtrack`` alone also searches rewrites; "backtrack, no rewrites" is the best that the others could reach.
With --plot, FILE.png and FILE.svg. With --rows nothing is run: records made before are joined, later rows replacing
earlier ones of the same problem and strategy.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.joint import CLUSTERS, Case
from benchmarks.models.shapes import program
from benchmarks.record import Record, arguments, table
from ir.errors import NoPlanFitsError
from ir.graph import Graph
from pdv.cluster import Cluster, load_cluster
from pdv.planning.problems import plan_problems
from pdv.problem import Problem
from pdv.search.solver.tables import TooWideError
from pdv.search.strategies import STRATEGIES, Budget

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CASES = (
    Case("gpt2", 64, 1024),
    Case("bert-large", 64, 512),
    Case("llama-3-8b", 64, 2048),
    Case("vit", 256),
    Case("resnet50", 256),
    Case("inception-v3", 256),
    Case("dlrm", 8192),
    Case("mlp", 1024),
)
PLAIN = "backtrack, no rewrites"
NAMES = (PLAIN, *STRATEGIES)
SECONDS = 10.0
EFFORT = 20.0  # strategies that sample use up their time
NEAR = 1.01  # within 1 % of the best


def main() -> None:
    """Print the tables; with --json write the record, with --plot the figure."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--models", default=",".join(case.model for case in CASES), help="comma-separated")
    parser.add_argument("--clusters", default=",".join(CLUSTERS), help="comma-separated")
    parser.add_argument("--strategies", default=";".join(NAMES), help="separated by semicolons")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="CPU time of each strategy on each problem")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw cost against time")
    parser.add_argument("--rows", type=Path, nargs="+", metavar="JSON", default=[], help="join earlier records")
    options = parser.parse_args()
    record = Record()
    record.rows = joined([row for path in options.rows for row in json.loads(path.read_text())["rows"]])
    if not options.rows:
        measure(record, options)
    relate(record.rows)
    show(record.rows)
    claim(record)
    record.print_summary()
    record.write(options.json)
    if options.plot:
        draw(record.rows, options.plot)


def measure(record: Record, options: argparse.Namespace) -> None:
    """Run what was asked for, written as it comes."""
    cases = (Case("mlp", 64),) if options.smoke else [c for c in CASES if c.model in options.models.split(",")]
    clusters = ["pcie-4"] if options.smoke else options.clusters.split(",")
    for case in cases:
        graph = program(case.model, case.batch, case.sequence).graph
        for name in clusters:
            seconds = 1.0 if options.smoke else options.seconds
            record.rows += compare(case, graph, load_cluster(CLUSTERS[name]), seconds, options.strategies.split(";"))
            record.write(options.json)


def joined(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The latest row of each problem and strategy, in the order of the tables."""
    latest = {(row["model"], row["cluster"], row["strategy"]): row for row in rows}
    models = [case.model for case in CASES]
    return sorted(latest.values(), key=lambda row: (models.index(row["model"]), list(CLUSTERS).index(row["cluster"])))


def relate(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row its cost over the best without rewrites, and when it came within 1 % of that."""
    plain = {(row["model"], row["cluster"]): row["cost_s"] for row in rows if row["strategy"] == PLAIN}
    for row in rows:
        best = plain.get((row["model"], row["cluster"]))
        row["over_plain"] = row["cost_s"] / best if row["cost_s"] and best else None
        row["near_s"] = next((at for at, cost in row["trace"] if best and cost <= NEAR * best), None)


def compare(
    case: Case, graph: Graph, cluster: Cluster, seconds: float, strategies: Sequence[str]
) -> list[dict[str, Any]]:
    """One row per strategy on one problem, with its trace."""
    (problem,) = plan_problems(graph, cluster, mode="train", memory_limit=cluster.memory_bytes)
    rows = []
    for name in strategies:
        print(f"{case.model} on {cluster.name}: {name} …", file=sys.stderr, flush=True)
        of = replace(problem, rules=()) if name == PLAIN else problem
        row = run("backtrack" if name == PLAIN else name, of, seconds)
        same = {"model": case.model, "batch": case.batch, "sequence": case.sequence, "cluster": cluster.name}
        rows.append({**same, "mesh": str(problem.mesh), "nodes": len(graph.nodes), "strategy": name, **row})
    return rows


def run(name: str, problem: Problem, seconds: float) -> dict[str, Any]:
    """What one strategy reaches, and when."""
    trace: list[tuple[float, float]] = []
    budget = Budget(seconds, effort=EFFORT, on_best=lambda cpu_s, cost_s: trace.append((cpu_s, cost_s)))
    started = time.process_time()
    row: dict[str, Any] = {"cost_s": None, "bound_s": None, "trace": trace}
    try:
        solution = STRATEGIES[name](problem, budget)
        row |= {"cost_s": solution.cost_s, "bound_s": solution.lower_bound_s or None}
        row |= {"memory_bytes": solution.memory_bytes, "rewrites": len(solution.steps)}
    except NoPlanFitsError as error:
        row["error"] = error.what
    except TooWideError as error:
        row["error"] = f"too wide: {error}"
    return {**row, "cpu_s": time.process_time() - started}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Final cost over the best without rewrites, and CPU-seconds until within 1 % of it."""
    problems = list(dict.fromkeys((row["model"], row["cluster"]) for row in rows))
    for title, key in (("cost / best without rewrites", "over_plain"), ("CPU-s to within 1 % of it", "near_s")):
        print(f"\n{title}")
        lines = []
        for model, cluster in problems:
            here = {row["strategy"]: row for row in rows if (row["model"], row["cluster"]) == (model, cluster)}
            lines.append((model, cluster, *(_cell(here.get(name), key) for name in NAMES)))
        table(("model", "cluster", *NAMES), lines)
    print()


def _cell(row: dict[str, Any] | None, key: str) -> str:
    if row is None:
        return ""
    if row["cost_s"] is None:
        return "none"
    value = row[key]
    return "-" if value is None else f"{value:.3f}" if key == "over_plain" else f"{value:.1f}"


def claim(record: Record) -> None:
    """Per strategy: how far from the best, how often there, and how soon."""
    for name in NAMES:
        rows = [row for row in record.rows if row["strategy"] == name]
        ratios = [row["over_plain"] for row in rows if row["over_plain"]]
        near = [row["near_s"] for row in rows if row["near_s"] is not None]
        if not ratios:
            continue
        spread = f"(from {min(ratios):.3f} to {max(ratios):.3f}; a plan on {len(ratios)} of {len(rows)})"
        record.claim(f"{name}: cost over the best without rewrites, median", statistics.median(ratios), "x", spread)
        if near:
            spread = f"(on the {len(near)} of {len(rows)} where it gets there; {min(near):.2f} to {max(near):.2f})"
            record.claim(f"{name}: time to within 1 %, median", statistics.median(near), "CPU-s", spread)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel per problem: how much more than the best without rewrites, against CPU-seconds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    clusters = list(dict.fromkeys(row["cluster"] for row in rows))
    figure, panels = plt.subplots(
        len(models), len(clusters), figsize=(3.2 * len(clusters), 2.2 * len(models)), squeeze=False, sharex=True
    )
    plain = {(row["model"], row["cluster"]): row["cost_s"] for row in rows if row["strategy"] == PLAIN}
    for row in rows:
        panel = panels[models.index(row["model"])][clusters.index(row["cluster"])]
        _line(panel, row, plain[row["model"], row["cluster"]])
        panel.set_title(f"{row['model']}, {row['cluster']}", fontsize=8)
    for panel in panels[-1]:
        panel.set_xlabel("CPU-seconds", fontsize=8)
    for line in panels:
        line[0].set_ylabel("% above best", fontsize=8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=len(labels), fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".png"), dpi=110)
    figure.savefig(path.with_suffix(".svg"))


def _line(panel: Axes, row: dict[str, Any], plain: float | None) -> None:
    """One strategy's steps, drawn on to where it ended."""
    colour = f"C{NAMES.index(row['strategy'])}"
    unit = plain or 1.0
    times = [at for at, _ in row["trace"]] + [row["cpu_s"]]
    costs = [100 * (cost / unit - 1) for _, cost in row["trace"]]
    panel.step(times, [*costs, costs[-1]] if costs else [math.nan], where="post", color=colour, label=row["strategy"])
    if costs:
        panel.plot(times[-2:-1], costs[-1:], ".", color=colour)
    panel.set_xscale("log")
    panel.set_yscale("symlog", linthresh=1.0)
    panel.tick_params(labelsize=7)


if __name__ == "__main__":
    main()
