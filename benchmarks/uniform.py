"""How uniform plans are: of each model and cluster, the classes that are written, their instances, and the price.

    python benchmarks/uniform.py [--smoke] [--json OUT] [--only TEXT ...] [--graphs FOLDER] [--before JSON]

A model of equal layers should come out as one class and one list. Whatever differs from layer to layer shows as more
classes, as fewer instances, or as lines of the model's own forward. With --graphs, exported graphs are kept in a
folder. With --before, a record made earlier is shown beside each row.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, Record, arguments, table
from ir.graph import Graph


@dataclass(frozen=True)
class Case:
    """A model at a global batch on a cluster: an example's name, or sizes of a mesh of H100s, eight to a node.

    ``layers`` are those that every plan repeats; ``limit_gib`` is a device's memory, where it is less than it has.
    """

    model: str
    layers: int
    batch: int
    cluster: str | tuple[int, ...]
    sequence: int = 0
    limit_gib: float | None = None

    @property
    def name(self) -> str:
        """What tables call it."""
        where = self.cluster if isinstance(self.cluster, str) else "x".join(map(str, self.cluster))
        sizes = "x".join(map(str, [self.batch, *([self.sequence] if self.sequence else [])]))
        return f"{self.model} {sizes} on {where}" + (f", {self.limit_gib:g} GiB" if self.limit_gib else "")


CASES = (
    Case("gpt2", 12, 16, "laptop-4", 128),
    Case("gpt2", 12, 16, (2, 4), 128),
    Case("gpt2", 12, 16, "8x8-h100", 128),
    Case("gpt2", 12, 16, "2x8-a40-pairs", 128, 1.0),
    Case("gpt2", 12, 64, "2x8-a100", 1024),
    Case("gpt2", 12, 64, "2x8-a100", 1024, 4.0),
    Case("gpt2", 12, 64, "8x8-h100", 1024),
    Case("gpt2", 12, 64, "mixed-a100-v100", 1024),
    Case("gpt2-large", 36, 64, "2x8-a100", 1024),
    Case("bert", 12, 64, "2x8-a100", 512),
    Case("bert-large", 24, 64, "8x8-h100", 512),
    Case("vit", 12, 16, "laptop-4"),
    Case("vit", 12, 64, "2x8-a100"),
    Case("llama-3-8b", 32, 64, "2x8-a100", 2048),
    Case("llama-3-8b", 32, 64, "8x8-h100", 2048),
    Case("llama-3-8b", 32, 64, "8x8-h100", 2048, 16.0),
    Case("llama-3-8b", 32, 256, (8, 8, 8), 2048),
    Case("llama-3-70b", 80, 64, "8x8-h100", 2048),
    Case("llama-3-405b", 126, 256, (128, 8), 2048),
)
SMOKE = (Case("gpt2", 12, 32, "2x8-a100", 128),)


def main() -> None:
    """Print the table; with --json write the record."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="cases whose names hold one of these")
    parser.add_argument("--graphs", type=Path, metavar="FOLDER", help="keep exported graphs here")
    parser.add_argument("--before", type=Path, metavar="JSON", help="an earlier record to compare with")
    options = parser.parse_args()
    cases = [case for case in CASES if any(text in case.name for text in options.only or [""])]
    before = {row["case"]: row for row in json.loads(options.before.read_text())["rows"]} if options.before else {}
    record = Record()
    with tempfile.TemporaryDirectory() as scratch:
        for case in SMOKE if options.smoke else cases:
            print(f"{case.name} …", file=sys.stderr, flush=True)
            record.rows.append(measure(case, options.graphs or Path(scratch)))
            record.write(options.json)
    show(record.rows, before)
    claim(record)
    record.print_summary()
    record.write(options.json)


def measure(case: Case, graphs: Path) -> dict[str, Any]:
    """One row: what is written of the plan that is found, its price, and the CPU-seconds of its search."""
    from pdv.emit.analysis.outline import BlockRun
    from pdv.emit.emission import Emission, shapes_in
    from pdv.frontend.program import Weights
    from pdv.search.meshes import search_meshes

    problems = problems_of(case, graph_of(case, graphs))
    started = time.process_time()
    found = search_meshes(problems)
    seconds = time.process_time() - started
    solution = found.solution
    emission = Emission.of(found.pcg, solution.problem.mesh, train=True)
    shape_of = shapes_in(Weights())
    items = [item for outline in emission.outlines(shape_of) for item in outline.items]
    runs = [len(item.blocks) for item in items if isinstance(item, BlockRun)]
    return {
        "case": case.name,
        "layers": case.layers,
        "classes": len(runs),
        "instances": runs,
        "lines": len(emission.body(shape_of).splitlines()),
        "mesh": str(solution.problem.mesh),
        "step_s": found.cost.seconds,
        "gap": found.gap,
        "search_cpu_s": seconds,
    }


def graph_of(case: Case, graphs: Path) -> Graph:
    """The model's canonical graph, exported where the folder does not hold it yet."""
    from benchmarks.models.shapes import program
    from pdv.plan.source import read_source, write_source

    folder = graphs / f"{case.model}-{case.batch}-{case.sequence}"
    if not folder.exists():
        graph = program(case.model, case.batch, case.sequence).graph
        folder.mkdir(parents=True)
        write_source(graph, folder)
    return read_source(folder)


def problems_of(case: Case, graph: Graph) -> Any:  # Any: problems, whose module imports late
    """The case's problems: one for each mesh that the cluster allows."""
    from benchmarks.scale import AXES, PER_NODE
    from pdv.cluster import load_cluster
    from pdv.compile import plan_problems

    if isinstance(case.cluster, str):
        cluster = load_cluster(ROOT / "examples" / "clusters" / f"{case.cluster}.yaml")
    else:
        mesh = dict(zip(AXES, case.cluster, strict=False))
        count = max(1, _product(case.cluster) // PER_NODE)
        nodes = [{"count": count, "devices": PER_NODE, "device": "h100-80gb-sxm", "link": "nvlink4"}]
        cluster = load_cluster({"nodes": nodes, "network": "ib-ndr"}).with_mesh(mesh)
    limit = cluster.memory_bytes if case.limit_gib is None else case.limit_gib * 2**30
    return plan_problems(graph, cluster, mode="train", memory_limit=limit)


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def show(rows: list[dict[str, Any]], before: Mapping[str, dict[str, Any]]) -> None:
    """The rows as a table; what was before stands left of an arrow."""

    def cell(row: dict[str, Any], text: Any) -> str:  # Any: a function of a row
        return " -> ".join([*([text(before[row["case"]])] if row["case"] in before else []), text(row)])

    def blocks(row: dict[str, Any]) -> str:
        return "+".join(map(str, row["instances"])) or "none"

    header = ("case", "layers", "blocks of each class", "lines", "step ms", "gap", "search CPU-s")
    lines: list[tuple[str, ...]] = [
        (row["case"], str(row["layers"]), cell(row, blocks), cell(row, lambda r: str(r["lines"])),
         cell(row, lambda r: f"{r['step_s'] * 1e3:.3f}"), cell(row, lambda r: f"{r['gap']:.1e}"),
         cell(row, lambda r: f"{r['search_cpu_s']:.1f}"))
        for row in rows
    ]  # fmt: skip
    table(header, lines)


def claim(record: Record) -> None:
    """The figures that are asked for."""
    one = sum(row["instances"] == [row["layers"]] for row in record.rows)
    record.claim("models written as one class, an instance for each layer", one, f"of {len(record.rows)}")
    record.claim("classes in all", sum(row["classes"] for row in record.rows), "")
    record.claim("lines of model.py in all", sum(row["lines"] for row in record.rows), "")


if __name__ == "__main__":
    main()
