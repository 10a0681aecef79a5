"""Plans found against published ones and against lattices of manual settings, all simulated alike.

    python benchmarks/published_plans.py --runs FILE.csv [FILE.csv …] [--json OUT] [--cost analytic] [--lattice]
        [--cases] [--part 3/10] [--merge]

Each row of Megatron's, Megatron Core's and torchtitan's tables whose products are in their own type, and Llama-3 405B
on 8,192 and 16,384 H100, is simulated three ways: as its framework ran it, beside what was measured; the same degrees
as an emitted program would run them; and the plan that ``pdv.optimize`` finds, which is an emitted program, too. With
``--lattice`` the best of a lattice of degrees joins them, again as emitted programs. Plans that do not fit lose.
``--cases`` takes, in place of published runs, the models and clusters of this repository whose planning is timed.
``--part 3/10``: each tenth row, from the third on; with ``--merge`` the other rows of the record stay.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.published.runs import Run, read_runs
from benchmarks.published.simulate import axes_by, fastest, priced_by, workload_of
from benchmarks.record import Record, arguments, merged, part_of, table
from ir.errors import PdvError
from ir.types import DType
from pdv.cluster import Cluster, load_cluster
from pdv.problem.workload import Workload
from pdv.simulate.calibration import CALIBRATION, OF_FRAMEWORKS, Calibration

OWN = "cases"  # a set of its own
SETS = ("megatron2021", "mcore-h100", "torchtitan-a100", "torchtitan-h100", "llama3")
HEADER = (
    "model,params,layers,hidden,heads,seq,vocab,gpu,num_gpus,gpus_per_node,intra_bw,inter_bw,global_batch,micro_batch,tp,pp,"
    "dp,zero,recompute,schedule,measured(value),unit,source,set,precision,mem_gb,notes\n"
)
# Grattafiori et al., "The Llama 3 Herd of Models", 2024 (arXiv 2407.21783v3), section 3.3.2, table 4: tensor parallel
# 8, pipeline 16, 16 and 32 sequences a replica, 400 and 430 TFLOP/s a GPU of the model's own. Optimizer states and
# gradients are sharded, weights kept (ZeRO-2); virtual stages are not stated; nothing is recomputed at this length.
LLAMA = HEADER + "".join(
    f"Llama-3.1-405B,405e9,126,16384,128,8192,128256,H100-80G,{gpus},8,,,2048,1,8,16,{replicas},2,none,interleaved-1F1B,"
    f"{rate},TFLOP/s/GPU (model FLOPs),Grattafiori et al. 2024 table 4,llama3,bf16,,as torchtitan\n"
    for gpus, replicas, rate in ((16384, 128, 400), (8192, 64, 430))
)
SMOKE = HEADER + (
    "made-up,,4,256,4,128,1024,A100-80G,4,4,,,8,2,2,1,2,0,none,none,10,ms/iteration,invented,megatron2021,bf16,,\n"
)
# How an emitted program runs, in the words of ``--manual``.
EMITTED: dict[str, Any] = {
    "flash": True, "fused": False, "dropout": False, "precision": "as-emitted", "gathers": 0, "gradients": True,
    "loss": "in-place", "weights": False, "light": False, "pieces": False, "cast_weights": False,
    "slices": False, "synchronous": False,
}  # fmt: skip
BUDGET_S = 600.0
KEY = ("model", "set", "devices", "batch", "measured_s")  # of a row
CASES = (  # of examples/clusters
    ("llama-3-8b", 512, "8x8-h100"),
    ("llama-3-70b", 128, "8x8-h100"),
    ("gpt3-175b", 512, "32-dgx-a100"),
)
ZEROS: tuple[Literal[0, 1, 3], ...] = (0, 1, 3)


def main() -> None:
    """Simulate each row all ways, and claim how the plans found compare."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--runs", type=Path, nargs="+", default=[], metavar="FILE", help="CSV as training_runs.csv")
    parser.add_argument("--cost", default="analytic", help="what prices kernels, as pdv takes it")
    parser.add_argument("--lattice", action="store_true", help="also the best of a lattice of manual settings")
    parser.add_argument("--only", default="", help="a part of a model's name")
    parser.add_argument("--cases", action="store_true", help="those of this repository, of which nothing is published")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="each N-th row, from the I-th on")
    parser.add_argument("--merge", action="store_true", help="keep what else the record has, of these rows and others")
    options = parser.parse_args()
    every = cases() if options.cases else rows_of(options.runs, smoke=options.smoke)
    chosen = [run for run in every if options.only.lower() in run.model.lower()]
    before = {key_of(row): row for row in merged(options.json, [], *KEY)} if options.merge else {}
    now: list[dict[str, Any]] = []
    for run in chosen[part_of(options.part)]:
        row = compare(run, options.cost, lattice=options.lattice)
        now.append(before.get(key_of(row), {}) | row)  # without --lattice the lattice's best stays
        print(line_of(now[-1]), flush=True)
        if options.merge:  # a row takes minutes: what is done stays
            Record(merged(options.json, now, *KEY)).write(options.json)
    record = Record(merged(options.json, now, *KEY) if options.merge else now)
    show(record)
    record.print_summary()
    record.write(options.json)


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a row of the record from others."""
    return tuple(row[name] for name in KEY)


def rows_of(paths: Sequence[Path], *, smoke: bool) -> Iterator[Run]:
    """Rows of the sets whose products are in their own type, each plan once."""
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as scratch:
        own = Path(scratch) / "own.csv"
        own.write_text(SMOKE if smoke else LLAMA, encoding="utf-8")
        for path in [own] if smoke else [*paths, own]:
            for run in read_runs(path)[0]:
                if run.set in SETS and run.manual["products"] == "own" and run.stated not in seen:
                    seen.add(run.stated)
                    yield run


def cases() -> Iterator[Run]:
    """``CASES`` as runs of which nothing was measured."""
    for model, batch, name in CASES:
        content = yaml.safe_load(Path(f"examples/clusters/{name}.yaml").read_text(encoding="utf-8"))
        devices = load_cluster(content).num_devices
        yield Run(0, OWN, model, model, content, {}, batch, devices, math.inf, None, (), None, None)


def compare(run: Run, cost: str, *, lattice: bool) -> dict[str, Any]:
    """A row of the record: seconds of a step each way, infinite for what does not fit."""
    row: dict[str, Any] = {
        "model": run.model, "set": run.set, "devices": run.devices, "batch": run.batch, "measured_s": run.measured_s,
    }  # fmt: skip
    if run.set != OWN:
        emitted = replace(run, manual=run.manual | EMITTED, recompute=())
        row["as_run_s"] = simulated(run, OF_FRAMEWORKS, cost)
        row["as_emitted_s"] = simulated(emitted, CALIBRATION, cost)
    row |= search(run, cost)
    return row | (best_of_lattice(run, cost) if lattice else {})


def simulated(run: Run, calibration: Calibration, cost: str) -> float:
    """Seconds of a step in the settings that are fastest of those that a row leaves open."""
    try:
        work = workload_of(run, fastest(run, calibration, cost), cost)
    except PdvError:
        return math.inf
    return step_s(work)


def step_s(work: Workload) -> float:
    """Seconds of a step that fits."""
    from pdv.memory import step_memory
    from pdv.simulate.step import simulate

    return simulate(work).step_s if step_memory(work).fits else math.inf


def search(run: Run, cost: str) -> dict[str, Any]:
    """What ``pdv.optimize`` finds for the model, batch and cluster of a run, and how."""
    from pdv.frontend.arch.description import arch
    from pdv.frontend.arch.graph import graph
    from pdv.planning.problems import plan_problems
    from pdv.planning.search import Effort, search_problems
    from pdv.prices import cost_model
    from pdv.report.loaded import workload_of_found

    began = time.process_time()
    cluster = load_cluster(run.cluster)
    compute = cost_model(cost, [entry.device for entry in cluster.classes])
    ask = partial(plan_problems, mode="train", compute=compute)
    problems = ask(graph(arch(run.arch), run.batch, DType.BF16), cluster)
    try:
        result = search_problems(
            problems, cluster, Effort("backtrack", BUDGET_S), None, lambda *_: None, partial(ask, rules=()),
            pipelines="always",
        )  # fmt: skip
    except PdvError as error:
        return {"found_s": math.inf, "how": str(error).splitlines()[0], "cpu_s": time.process_time() - began}
    work = workload_of_found(result.found, cluster)
    stages, execution = work.stages, work.execution
    how = f"{stages.count}x{stages.virtual} stages of {work.problem.mesh}, {execution.micro_batches} micro-batches"
    return {
        "found_s": step_s(work), "gap": result.found.gap, "cpu_s": time.process_time() - began,
        "gap_of": "price" if result.found.step_s is None else "step",
        "how": f"{how}, {execution.order}, recompute {execution.recompute}",
    }  # fmt: skip


def best_of_lattice(run: Run, cost: str) -> dict[str, Any]:
    """The best of degrees, chunks, micro-batches, recomputation and ZeRO, run as emitted programs are.

    With ZeRO-1 and without.
    """
    from pdv.frontend.arch.description import arch
    from pdv.manual.lattice import Lattice, best, points

    @cache
    def part(devices: int) -> Cluster:
        return load_cluster(shrunk(run.cluster, devices))

    described, best_s, told, tried = arch(run.arch), {}, "", 0
    for zero in ZEROS:
        lattice = Lattice(
            tp=(1, 2, 4, 8), pp=(1, 2, 4, 8, 16, 32, 64), micro_batch=(1, 2, 4, 8), recompute=("none", "full"),
            zero=zero, settings=tuple(EMITTED.items()),
        )  # fmt: skip
        tried += len(list(points(described, run.devices, run.batch, lattice)))
        for one in best(
            described, part, run.devices, run.batch, partial(priced_by, cost), partial(axes_by, cost), lattice, keep=1
        ):
            best_s[zero] = one.simulation.step_s
            told = one.given.text() if one.simulation.step_s == min(best_s.values()) else told
    emitted_s = min((best_s[zero] for zero in best_s if zero != 1), default=math.inf)
    return {
        "lattice_s": emitted_s, "lattice_zero1_s": min(best_s.values(), default=math.inf), "lattice": told,
        "tried": tried,
    }  # fmt: skip


def shrunk(cluster: dict[str, Any], devices: int) -> dict[str, Any]:
    """The content of a cluster file of so many devices of another, whose nodes are alike."""
    (node,) = cluster["nodes"]
    whole = load_cluster(cluster).num_devices // node.get("count", 1)  # a preset says how many
    each = math.gcd(devices, whole)  # part of each node, where whole ones would be too many or too few
    nodes = devices // each
    found = cluster | {"nodes": [node | {"count": nodes} | ({"devices": each} if each < whole else {})]}
    network = cluster.get("network")
    if isinstance(network, dict) and "ports_per_node" in network:  # as many for each device as before
        found["network"] = network = network | {"ports_per_node": max(1, network["ports_per_node"] * each // whole)}
    if isinstance(network, dict) and "switches" in network:  # of those that have all of their nodes
        full = [switch for switch in network["switches"] if nodes % switch["nodes"] == 0]
        found |= {"network": {name: value for name, value in network.items() if name != "switches"}}
        found["network"] |= {"switches": full} if full else {}
    return found if nodes > 1 else {name: value for name, value in found.items() if name != "network"}


def line_of(row: dict[str, Any]) -> str:
    """What is printed as soon as a row is done."""
    ways = " ".join(f"{name} {row[name]:.4g}" for name in row if name.endswith("_s"))
    return f"{row['model']} on {row['devices']}, batch {row['batch']}: {ways}; {row['how']}"


def show(record: Record) -> None:
    """A table, and the claims."""
    every = ("as_run_s", "as_emitted_s", "lattice_s", "lattice_zero1_s")
    others = [name for name in every if all(name in row for row in record.rows)]
    table(
        ("model", "devices", "found", *others, "gap"),
        [
            (
                row["model"],
                str(row["devices"]),
                f"{row['found_s']:.4g} s",
                *(f"{row['found_s'] / row[name]:.3f}" for name in others),
                f"{row.get('gap', math.nan):.1%} of the {row.get('gap_of', '')}",
            )
            for row in record.rows
        ],
    )
    for name in others:
        ratios = [row["found_s"] / row[name] for row in record.rows]
        worst = max(range(len(ratios)), key=ratios.__getitem__)
        slower = sum(ratio > 1.0 for ratio in ratios)
        note = f"{slower} of {len(ratios)} slower; worst {record.rows[worst]['model']}"
        record.claim(f"step found over {name.removesuffix('_s')}, worst", max(ratios), "x", note)


if __name__ == "__main__":
    main()
