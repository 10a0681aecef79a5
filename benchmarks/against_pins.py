"""What is searched freely beside what is pinned, of random models on random clusters whose memory is short.

    python benchmarks/against_pins.py [--smoke] [--seed N] [--count 40] [--json OUT]

Each case is a model, a batch and a cluster; it is planned with all the memory that its plan takes, and with shares of
that. Under each limit every number of stages is also pinned, with and without recomputation, and so is one micro-batch.
A pinned plan that fits is *missed* where the free search finds none, and *beats* it where its simulated step is more
than 3 % shorter. Both are faults of the search: what is pinned is among what it looks at. A pinned plan *refutes* the
free search's certificate where its step is shorter than what that says no plan's is.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.record import Record, arguments, table
from ir.errors import NoPlanFitsError, UsageError
from ir.types import DType
from pdv.cluster import Cluster, load_cluster
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph
from pdv.memory import needed_bytes
from pdv.pipelines.pinned import FREE, Pinned
from pdv.planning.problems import plan_problems
from pdv.planning.search import Effort, search_problems
from pdv.prices import cost_model
from pdv.report.loaded import workload_of_found
from pdv.search.best import BestPlan
from pdv.simulate.step import simulate

MODELS = (
    "gpt:layers=6,hidden=256,heads=4,seq=128,vocab=512",
    "gpt:layers=9,hidden=384,heads=6,seq=256,vocab=5003",
    "llama:layers=8,hidden=512,heads=8,seq=512,vocab=4000",
    "llama:layers=5,hidden=768,heads=12,kv_heads=4,seq=256,vocab=32000",
    "bert:layers=4,hidden=512,heads=8,seq=128,vocab=30000",
)
DEVICES, LINKS, NETWORKS = ("t4", "a100-40gb-sxm", "rtx-3090"), ("pcie4", "nvlink3"), ("ethernet-10g", "ib-hdr")
BATCHES = (6, 8, 12, 16, 32, 48, 64)
SHARES = ((0.6, 1.0), (0.3, 0.7), (0.15, 0.4))  # of what the best plan takes: a limit from each range
CONTEXT = 2.0**29  # bytes that a device has in use before anything is planned
STAGES = (1, 2, 3, 4, 6)
BEATEN = 1.03  # times the pinned plan's step
BUDGET_S = 20.0


@dataclass(frozen=True)
class Case:
    """A model, its batch, a cluster as a file describes it, and how a limit of memory is drawn."""

    model: str
    batch: int
    cluster: dict[str, Any]
    shares: tuple[float, ...]


def main() -> None:
    """Plan each case freely and pinned; claim how many pinned plans fit, were missed, and beat the free one."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="cases")
    options = parser.parse_args()
    record = Record()
    for case in draw(options.seed, 1 if options.smoke else options.count):
        record.rows += run(case)
        record.write(options.json)
    show(record)
    record.print_summary()
    record.write(options.json)


def draw(seed: int, count: int) -> Iterator[Case]:
    """Cases of more than one device."""
    rng = random.Random(seed)
    while count:
        node = {"count": rng.choice((1, 2, 3)), "devices": rng.choice((1, 2, 3, 4))}
        node |= {"device": rng.choice(DEVICES), "link": rng.choice(LINKS)}
        cluster = {"name": "drawn", "nodes": [node], "network": rng.choice(NETWORKS)}
        shares = tuple(rng.uniform(*span) for span in SHARES)
        case = Case(rng.choice(MODELS), rng.choice(BATCHES), cluster, shares)
        if node["count"] * node["devices"] > 1:
            count -= 1
            yield case


def run(case: Case) -> list[dict[str, Any]]:
    """A row for each limit."""
    cluster = load_cluster(case.cluster)
    plan = partial(plan_within, case, cluster)
    free = plan(None, FREE)
    if free is None:
        return []
    most = needed_bytes(workload_of_found(free, free.on(cluster)))
    limits = [CONTEXT + (most - CONTEXT) * share for share in case.shares]
    return [{**asdict(case), "limit": limit, **compare(partial(plan, limit), cluster)} for limit in limits]


def compare(plan: Any, cluster: Cluster) -> dict[str, Any]:
    """Seconds of the free plan's step, of each pinned plan that fits, and CPU-seconds of the free search."""
    began = time.process_time()
    free = plan(FREE)
    took = time.process_time() - began
    counts = [count for count in STAGES if cluster.num_devices % count == 0]
    ways = [Pinned(stages=count, recompute=again) for count in counts for again in ("none", "full")]
    ways.append(Pinned(stages=1, micro_batches=1))
    pinned = {_name(way): _step_s(found, cluster) for way in ways if (found := plan(way)) is not None}
    least_s = 0.0 if free is None else free.lower_bound_s
    return {"free_s": free and _step_s(free, cluster), "least_s": least_s, "pinned_s": pinned, "cpu_s": took}


def plan_within(case: Case, cluster: Cluster, limit: float | None, pinned: Pinned) -> BestPlan | None:
    """The plan found; None where none fits, or none can be as it is pinned."""
    compute = cost_model("auto", [entry.device for entry in cluster.classes])
    model = graph(arch(case.model), case.batch, DType.BF16)
    try:
        problems = plan_problems(model, cluster, mode="train", memory_limit=limit, rules=(), compute=compute)
        effort = Effort("backtrack", BUDGET_S)
        return search_problems(
            problems, cluster, effort, None, lambda *_: None, None, pipelines="always", pinned=pinned
        ).found
    except (NoPlanFitsError, UsageError):
        return None


def _step_s(found: BestPlan, cluster: Cluster) -> float:
    return simulate(workload_of_found(found, found.on(cluster))).step_s


def show(record: Record) -> None:
    """Pinned plans that the free search missed, or that beat its own; and the figures of all."""
    fitting = 0
    missed: list[tuple[str, ...]] = []
    beaten: list[tuple[str, ...]] = []
    refuting: list[tuple[str, ...]] = []
    for row in record.rows:
        fitting += len(row["pinned_s"])
        for name, seconds in row["pinned_s"].items():
            node, free = row["cluster"]["nodes"][0], row["free_s"]
            words = (row["model"], str(row["batch"]), str(node), f"{row['limit']:.0f}", name, f"{1e3 * seconds:.4g}")
            if free is None:
                missed.append((*words, "none"))
            elif free > BEATEN * seconds:
                beaten.append((*words, f"{1e3 * free:.4g}"))
            if seconds < row["least_s"]:
                refuting.append((*words, f"{1e3 * row['least_s']:.4g}"))
    if missed or beaten or refuting:
        table(("model", "batch", "hosts", "limit", "pinned", "ms", "free or least ms"), missed + beaten + refuting)
    record.claim("pinned plans that fit", fitting, "plans", f"under {len(record.rows)} limits")
    record.claim("missed by the free search", len(missed), "plans")
    record.claim("more than 3 % faster than the free search's", len(beaten), "plans")
    record.claim("faster than its certificate says any is", len(refuting), "plans")
    gaps = [1.0 - row["least_s"] / row["free_s"] for row in record.rows if row["free_s"]]
    record.claim("gap of the free search's certificate, median", 100 * statistics.median(gaps or [0.0]), "%")


def _name(pinned: Pinned) -> str:
    return ", ".join(f"{name} {value}" for name, value in asdict(pinned).items() if value is not None)


if __name__ == "__main__":
    main()
