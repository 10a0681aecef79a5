"""What the whole planner costs as models and clusters grow: search, proof and check in one process, in CPU-seconds.

    python benchmarks/scale.py [--smoke] [--json OUT] [--plot FILE]

Each case reads its graph from text (exporting a model is torch's time, not the planner's), searches with every shipped
rule, proves the plan, and runs the text that is emitted of it on simulated ranks, in a process of its own that is
charged all its CPU time, imports (torch's for the check, too) included. Sweeps grow the
number of layers on one mesh, and the number of devices under one model.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.planning import measure
from benchmarks.record import Record, arguments, table

if TYPE_CHECKING:
    from ir.graph import Graph

Sizes = tuple[int, ...]
AXES = ("a", "b", "c")
PER_NODE = 8


@dataclass(frozen=True)
class Case:
    """A model and a mesh of H100s, eight to a node. ``limit_gib`` per device; None: as much as one has."""

    model: str
    mesh: Sizes
    batch: int
    layers: int = 0
    limit_gib: float | None = None

    @property
    def devices(self) -> int:
        """How many there are."""
        return math.prod(self.mesh)

    @property
    def name(self) -> str:
        """What tables call it."""
        layers = f", {self.layers} layers" if self.layers else ""
        limit = f", {self.limit_gib:g} GiB" if self.limit_gib is not None else ""
        return f"{self.model}{layers} on {'x'.join(map(str, self.mesh))}{limit}"


CLAIMED = (
    Case("llama-3-8b", (8, 8), 64, 32),
    Case("llama-3-8b", (4, 4, 4), 64, 32),
    Case("llama-3-8b", (8, 8, 8), 256, 32),
    Case("llama-3-8b", (8, 8), 64, 32, 16.0),
    Case("llama-3-405b", (128, 8), 256, 126),
    Case("inception-v3", (8, 8), 512),
    Case("gpt2", (2, 4), 16),
)
SEQUENCES = {"gpt2": 1024}
# with room, so that growth is that of the program and the mesh
LAYERS = tuple(Case("llama-3-405b", (128, 8), 256, layers, 1024.0) for layers in (8, 16, 32, 64, 126))
DEVICES = tuple(Case("llama-3-8b", mesh, 256, 32, 1024.0) for mesh in ((8,), (2, 8), (8, 8), (32, 8), (128, 8)))
SMOKE = (Case("mlp", (2, 2), 64),)


def main() -> None:
    """Run the cases and the two sweeps; print CPU-seconds, peak memory and gap of each."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--case", nargs=2, metavar=("CASE", "FOLDER"), help="run one case in this process")
    parser.add_argument("--export", nargs=2, metavar=("CASE", "FOLDER"), help="leave one case's graph in a folder")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw both sweeps")
    options = parser.parse_args()
    if options.case or options.export:
        text, folder = options.case or options.export
        case = Case(**{**json.loads(text), "mesh": tuple(json.loads(text)["mesh"])})
        print(json.dumps(plan(case, Path(folder)) if options.case else export(case, Path(folder))))
        return
    record = Record()
    cases = SMOKE if options.smoke else tuple(dict.fromkeys((*CLAIMED, *LAYERS, *DEVICES)))
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases:
            record.rows.append(run(case, Path(scratch)))
            record.write(options.json)
    show(record.rows)
    if not options.smoke:
        claim(record)
    record.print_summary()
    record.write(options.json)
    if options.plot:
        draw(record.rows, options.plot)


def run(case: Case, scratch: Path) -> dict[str, Any]:
    """One case: exported where no case of the same graph was, then planned."""
    folder = scratch / f"{case.model}-{case.batch}-{case.layers}"
    text = json.dumps(vars(case))
    if not folder.exists():
        folder.mkdir()
        measure([sys.executable, __file__, "--export", text, str(folder)])
    print(case.name, file=sys.stderr, flush=True)
    found = measure([sys.executable, __file__, "--case", text, str(folder)])
    return {"case": case.name, **vars(case), "devices": case.devices, **json.loads(found.pop("stdout")), **found}


def export(case: Case, folder: Path) -> dict[str, float]:
    """The canonical graph of a case, as text."""
    from benchmarks.models import shapes
    from pdv.frontend import load_program
    from pdv.plan.source import write_source

    if case.layers:
        made = shapes.llama(case.batch, 2048, shapes.LLAMAS[case.model], num_hidden_layers=case.layers)
        graph = load_program(*made).graph
    else:
        graph = shapes.program(case.model, case.batch, SEQUENCES.get(case.model, 0)).graph
    write_source(graph, folder)
    return {"nodes": float(len(graph.nodes))}


def plan(case: Case, folder: Path) -> dict[str, Any]:
    """Search and proof, timed; of the search also what it takes to write the plan out, node by node."""
    from ir.proof.exact import verify_equal
    from pdv.check import check_text
    from pdv.emit.emission import Emission, shapes_in
    from pdv.frontend.program import Weights
    from pdv.plan.source import read_source
    from pdv.search.meshes import search_meshes
    from pdv.search.priced_chain import PricedChain

    make, written = PricedChain.made, [0.0]  # seconds in which plans are made into graphs

    def timed(*args: Any) -> Any:  # Any: passed on
        began = time.process_time()
        made = make(*args)
        written[0] += time.process_time() - began
        return made

    PricedChain.made = timed  # type: ignore[method-assign]
    graph = read_source(folder)
    problems = problems_of(case, graph)
    started = time.process_time()
    found = search_meshes(problems)
    searched = time.process_time()
    mesh = found.solution.problem.mesh
    verify_equal(graph, found.pcg, mesh)
    proved = time.process_time()
    emission = Emission.of(found.pcg, mesh, train=True)
    emission.body(shapes_in(Weights()))
    emitted = time.process_time()
    checked = check_text(graph, emission, Weights())
    return {
        "nodes": len(graph.nodes),
        "search_cpu_s": searched - started,
        "written_cpu_s": written[0],
        "proof_cpu_s": proved - searched,
        "emission_cpu_s": emitted - proved,
        "check_cpu_s": time.process_time() - emitted,
        "checked": checked.statement,
        "step_s": found.cost.seconds,
        "gap": found.gap,
        "rewrites": sorted({step.rule for step in found.solution.steps}),
    }


def problems_of(case: Case, graph: Graph) -> Any:  # Any: problems, whose module imports late
    """The case's problem: one mesh, every shipped rule."""
    from pdv.cluster import load_cluster
    from pdv.planning.problems import plan_problems

    nodes = max(1, case.devices // PER_NODE)
    described = {
        "nodes": [{"count": nodes, "devices": case.devices // nodes, "device": "h100-80gb-sxm", "link": "nvlink4"}],
        "network": "ib-ndr",
    }
    cluster = load_cluster(described).with_mesh(dict(zip(AXES, case.mesh, strict=False)))
    limit = None if case.limit_gib is None else case.limit_gib * 2**30
    return plan_problems(graph, cluster, mode="train", memory_limit=limit)


def show(rows: list[dict[str, Any]]) -> None:
    """The rows as a table."""
    header = (
        "case",
        "nodes",
        "search CPU-s",
        "proof CPU-s",
        "emission CPU-s",
        "check CPU-s",
        "process CPU-s",
        "peak GiB",
        "step s",
        "gap",
    )
    lines: list[tuple[str, ...]] = [
        (row["case"], str(row["nodes"]), f"{row['search_cpu_s']:.2f}", f"{row['proof_cpu_s']:.2f}",
         f"{row['emission_cpu_s']:.2f}", f"{row['check_cpu_s']:.2f}", f"{row['cpu_s']:.2f}",
         f"{row['peak_bytes'] / 2**30:.2f}", f"{row['step_s']:.4g}", f"{row['gap']:.1e}")
        for row in rows
    ]  # fmt: skip
    table(header, lines)


def claim(record: Record) -> None:
    """The figures that are asked for."""
    by_name = {row["case"]: row for row in record.rows}
    for case in CLAIMED:
        row = by_name[case.name]
        record.claim(f"{case.name}: search", row["search_cpu_s"], "CPU-s")
        record.claim(f"{case.name}: proof and check", row["proof_cpu_s"] + row["check_cpu_s"], "CPU-s")
        record.claim(f"{case.name}: process in all", row["cpu_s"], "CPU-s")
        record.claim(f"{case.name}: peak memory", row["peak_bytes"] / 2**30, "GiB")
        record.claim(f"{case.name}: certified gap", row["gap"], "")
    for what, cases in (("layers 8 to 126", LAYERS), ("devices 8 to 1,024", DEVICES)):
        first, last = by_name[cases[0].name], by_name[cases[-1].name]
        record.claim(f"{what}: growth of search", last["search_cpu_s"] / first["search_cpu_s"], "x")
        decided = [row["search_cpu_s"] - row["written_cpu_s"] for row in (first, last)]
        record.claim(f"{what}: the same until the plan is decided, not yet written out", decided[1] / decided[0], "x")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Search time over layers, and over devices."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    by_name = {row["case"]: row for row in rows}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    for axes, cases, key in ((left, LAYERS, "layers"), (right, DEVICES, "devices")):
        found = [by_name[case.name] for case in cases if case.name in by_name]
        axes.plot([row[key] for row in found], [row["search_cpu_s"] for row in found], "o-", label="search")
        axes.plot([row[key] for row in found], [row["proof_cpu_s"] for row in found], "s--", label="proof")
        axes.set(xlabel=key, ylabel="CPU-seconds", ylim=(0, None), xscale="log", title=cases[0].model)
        axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
