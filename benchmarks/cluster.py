"""Training steps on clusters with real links: what pdv emits against what an expert launches with torch.

    python benchmarks/cluster.py [--cell TASK CLUSTER] [--tasks ...] [--clusters ...] [--json OUT] [--smoke]

A cell is a model on a cluster of four processes: hosts are network namespaces of this machine, their links are shaped
(root is needed; what cannot be laid out is said and left out). In one process group every competitor is checked against
one process, tuned over micro-batches, buckets and the order of ranks, and then stepped in turn with pdv's program. A
step is forward, loss, backward and AdamW, from a barrier to the end of the slowest rank. Cells that the record has
already are not run again.
"""

from __future__ import annotations

import json
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster_runs.clusters import CLUSTERS, Cluster
from benchmarks.cluster_runs.launch import run_ranks, write_packages
from benchmarks.cluster_runs.networks import lay_out, missing
from benchmarks.cluster_runs.strategies import OWN, is_own
from benchmarks.record import Record, arguments, table

TASKS = ("gpt-256", "gpt-512", "llama", "vit", "recommender", "mlp")
SLOW = ("100mbit", "star", "slow-member", "fast-pairs")  # with links under 1 Gbit/s
DRAWS = 2000
Row = dict[str, Any]  # Any: JSON


def main() -> None:
    """Run what the record lacks, then tell."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument(
        "--cell", nargs=2, action="append", metavar=("TASK", "CLUSTER"), help="this one alone; repeatable"
    )
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS), choices=list(CLUSTERS))
    parser.add_argument("--rounds", type=int, default=20, help="steps of each finalist")
    parser.add_argument("--tune", type=int, default=2, help="steps of each setting that is tried, after the first")
    parser.add_argument("--limit", type=float, default=3000.0, help="seconds for a cell")
    parser.add_argument("--only", nargs="*", default=[], help="these competitors alone")
    parser.add_argument("--quotas", action="store_true", help="no process takes what others leave of a core")
    parser.add_argument(
        "--candidates", nargs="*", default=["ddp", "tensor", "ddp_tensor"], help="pinned plans beside it"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that namespaces are removed
    if options.smoke:
        name = "1gbit" if missing(CLUSTERS["1gbit"]) is None else "loopback"
        options.cell, options.rounds, options.tune = [("tiny", name)], 3, 1
        options.only = options.only or ["DDP", "PP2xDP2"]
    failed: list[str] = []
    record = Record(rows=json.loads(options.json.read_text())["rows"] if options.json and options.json.exists() else [])
    for task, name in options.cell or [(task, name) for name in options.clusters for task in options.tasks]:
        if any((row["task"], row["cluster"]) == (task, name) for row in record.rows):
            continue
        if lacking := missing(CLUSTERS[name], quotas=options.quotas):
            print(f"{task} on {name} is left out: {lacking}")
            continue
        try:
            record.rows.append(run_cell(task, CLUSTERS[name], options))
        except RuntimeError as error:  # the other cells are measured all the same
            failed.append(f"{task} on {name}: {error}")
            print(failed[-1], flush=True)
        record.write(options.json)
    tell(record)
    record.write(options.json)
    sys.exit("\n".join(["these cells failed:", *failed]) if failed else None)


def run_cell(task: str, cluster: Cluster, options: Any) -> Row:
    """Plan, lay out, measure."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        candidates = [] if options.smoke else options.candidates
        planned = write_packages(task, cluster, Path(folder), candidates)
        print(f"{task} on {cluster.name}: planned in {time.monotonic() - started:.0f} s", flush=True)
        spec = {
            "task": task, "cluster": cluster.name, "rounds": options.rounds, "tune": options.tune, "only": options.only,
            "folder_of_plans": folder, "plans": list(planned["plans"]),
        }  # fmt: skip
        with lay_out(cluster, quotas=options.quotas) as machine:
            found = run_ranks(machine, spec, options.limit)
    found = json.loads(json.dumps(found).replace(f"{folder}/", ""))  # where packages lay is this machine's own
    seconds = time.monotonic() - started
    row = {"task": task, "cluster": cluster.name, "quotas": options.quotas, "seconds": seconds, **planned, **found}
    print(f"{task} on {cluster.name}: {seconds:.0f} s", flush=True)
    show([row])
    return row


def tell(record: Record) -> None:
    """The table, and what is claimed of it."""
    rows = record.rows
    if not rows:
        return
    show(rows)
    show_parts(rows)
    speedups = {cell(row): best(row)[1] / median(row, OWN) for row in rows}
    record.claim("best expert / pdv, geometric mean", geometric(speedups.values()), "x", f"{len(rows)} cells")
    worst = min(speedups, key=lambda key: speedups[key])
    record.claim("best expert / pdv, least", speedups[worst], "x", worst)
    good = sum(ratio(row)[1] <= 1 / 0.97 for row in rows)  # the lower end of the interval of pdv / best
    record.claim("cells not slower than 0.97 of the best", 100 * good / len(rows), "%")
    names = [
        name for name in rows[0]["strategies"] if not is_own(name) and all(name in row["strategies"] for row in rows)
    ]
    single = {name: geometric([median(row, name) / median(row, OWN) for row in rows]) for name in names}
    if single:
        name = min(single, key=lambda key: single[key])
        record.claim("best single strategy / pdv, geometric mean", single[name], "x", name)
    slow = [
        median(row, "DDP") / median(row, OWN) for row in rows if row["cluster"] in SLOW and "DDP" in row["strategies"]
    ]
    if slow:
        record.claim("DDP / pdv under 1 Gbit/s, geometric mean", geometric(slow), "x", f"{len(slow)} cells")
    errors = [abs(predicted(row) / median(row, OWN) - 1) for row in rows]
    record.claim("error of the predicted step", 100 * statistics.fmean(errors), "%", "mean over cells")
    near = [min(median(row, name) for name in row["strategies"] if is_own(name)) / median(row, OWN) for row in rows]
    record.claim("cells whose plan is within 3 % of its candidates", 100 * sum(x > 0.97 for x in near) / len(near), "%")
    record.print_summary()


def cell(row: Row) -> str:
    """Its name."""
    return f"{row['task']} on {row['cluster']}"


def median(row: Row, name: str) -> float:
    """Seconds of a step."""
    return float(statistics.median(row["strategies"][name]["steps_s"]))


def predicted(row: Row, name: str = "plan") -> float:
    """Seconds of a step, as the plan states them."""
    return float(row["plans"][name]["predicted_s"])


def best(row: Row) -> tuple[str, float]:
    """The competitor with the shortest median step."""
    experts = [name for name in row["strategies"] if not is_own(name)]
    return min(((name, median(row, name)) for name in experts), key=lambda pair: pair[1])


def ratio(row: Row) -> tuple[float, float, float]:
    """Median step of pdv by that of the best, and a 90 % bootstrap interval over the rounds that both ran in."""
    own, other = row["strategies"][OWN], row["strategies"][best(row)[0]]
    pairs = list(zip(own["steps_s"][:: other["every"]], other["steps_s"], strict=False))
    draw = random.Random(0)
    drawn = [draw.choices(pairs, k=len(pairs)) for _ in range(DRAWS)]
    ratios = sorted(statistics.median(a for a, _ in some) / statistics.median(b for _, b in some) for some in drawn)
    return median(row, OWN) / best(row)[1], ratios[int(0.05 * DRAWS)], ratios[int(0.95 * DRAWS)]


def geometric(values: Any) -> float:
    """Mean."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def show(rows: Sequence[Row]) -> None:
    """Steps by cell."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        order = sorted((name for name in row["strategies"] if name != OWN), key=lambda name: median(row, name))
        others = ", ".join(f"{name} {median(row, name) * 1e3:.0f}" for name in order)
        middle, low, high = ratio(row)
        own = f"{median(row, OWN) * 1e3:.0f} ({predicted(row) * 1e3:.0f})"
        lines.append((cell(row), own, f"{middle:.2f}", f"{low:.2f}-{high:.2f}", others))
    table(("cell", "pdv ms (predicted)", "pdv / best", "90 %", "others, ms"), lines)


def show_parts(rows: Sequence[Row]) -> None:
    """Where the steps of pdv's program and of the best expert's go."""
    lines = []
    for row in rows:
        for name in (OWN, best(row)[0]):
            parts, found = row["strategies"][name]["profile"], row["strategies"][name]
            calls = ", ".join(f"{count} {what}" for what, count in parts["collectives"].items())
            train, whole = statistics.median(found["train_s"]), statistics.median(found["steps_s"])
            seconds = (train, parts["on_core_s"], parts["queued_s"], parts["blocked_s"], whole - train)
            figures = (f"{value * 1e3:.0f}" for value in seconds)
            lines.append((cell(row), name, *figures, calls))
    header = ("cell", "who", "train ms", "on a core", "for a core", "blocked", "optimizer ms", "collectives of rank 0")
    table(header, lines)


if __name__ == "__main__":
    main()
