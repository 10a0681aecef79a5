"""How fast the search's cost models answer, and what learned prices cost a search.

    python benchmarks/cost_speed.py [--smoke] [--json OUT]

Queries are the operators of GPT-2 and Inception-v3, under every cut that a 2x4 mesh allows, asked by blocks of 256.
"new" has never been asked, "known" has; searches are of these models on 2x4 GPUs, with each cost model.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from benchmarks.record import Record, arguments, table
from ir.cost_model import CostModel, Query
from ir.errors import WeightsError
from ir.graph import Graph
from ir.mesh import Mesh
from ir.verify import divides, node_local_loops
from pdv.cluster import Cluster, load_cluster
from pdv.cluster.presets import DEVICES
from pdv.planning.problems import plan_problems
from pdv.prices import cost_model
from pdv.search.meshes import search_meshes

TWO_BY_FOUR = {
    "nodes": [{"count": 2, "devices": 4, "device": "a100-80gb-sxm", "link": "nvlink3"}], "network": "ib-hdr",
}  # fmt: skip
MODELS = ("analytic", "learned", "measured")
BLOCK = 256


def main() -> None:
    """Time queries and searches."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--cost", nargs="*", default=MODELS, help="cost models: names as --cost takes them")
    options = parser.parse_args()
    options.cost = usable(options.cost)
    names = ("mlp",) if options.smoke else ("gpt2", "inception-v3")
    size = "small" if options.smoke else "full"
    cluster = load_cluster(TWO_BY_FOUR)
    graphs = {name: graph_of(name, size) for name in names}
    asked = [query for graph in graphs.values() for query in queries(graph)]
    record = Record()
    for name in options.cost:
        record.rows.append({"cost": name, "queries": len(asked), **rates(model_of(name, cluster), asked)})
    for (name, graph), cost in itertools.product(graphs.items(), options.cost):
        record.rows.append({"search": name, "cost": cost, **searched(graph, cluster, cost)})
    claim(record, options.cost)
    record.print_summary()
    record.write(options.json)


def usable(names: Sequence[str]) -> list[str]:
    """The cost models that can be asked here; that no weights ship is said, anything else is an error."""
    found = []
    for name in names:
        try:
            cost_model(name, [DEVICES["cpu-core"]])
        except WeightsError as error:
            if name not in MODELS:
                raise
            print(f"{name} is left out: {error}")
        else:
            found.append(name)
    return found


def model_of(name: str, cluster: Cluster) -> CostModel:
    """One cost model, with nothing in its cache."""
    return cost_model(name, [entry.device for entry in cluster.classes])


def graph_of(name: str, size: str) -> Graph:
    """A benchmark model's graph."""
    from benchmarks.models import build
    from pdv.frontend import load_program

    return load_program(*build(name, "full" if size == "full" else "small", batch=16)).graph


def queries(graph: Graph) -> list[Query]:
    """Every operator under every cut along the axes of a 2x4 mesh, each question once."""
    mesh = Mesh.of(x=2, y=4)
    found: dict[object, Query] = {}
    for node in graph.nodes:
        if node.is_leaf:
            continue
        types = tuple(operand.type for operand in node.operands)
        wanted = tuple(operand.needs_grad for operand in node.operands)
        for splits in itertools.product(node.op.splits(node.loops), repeat=2):
            if divides(node.loops, splits, mesh):
                loops = node_local_loops(node, splits, mesh)
                key = node.op.name, tuple(loops.extents.values()), types, node.type, tuple(node.attrs.items()), wanted
                found.setdefault(key, Query(node.op, loops, types, node.type, node.attrs, wanted))
    return list(found.values())


def rates(model: CostModel, asked: Sequence[Query]) -> dict[str, float]:
    """Queries a CPU-second: new, and known."""
    blocks = [asked[start : start + BLOCK] for start in range(0, len(asked), BLOCK)]
    model.nodes(blocks[0][:1])  # load what is loaded on first use
    return {"new_per_s": _rate(model, blocks, 1), "known_per_s": _rate(model, blocks, 5)}


def _rate(model: CostModel, blocks: Sequence[Sequence[Query]], times: int) -> float:
    started = time.process_time()
    for _ in range(times):
        for block in blocks:
            model.nodes(block)
    return times * sum(map(len, blocks)) / max(time.process_time() - started, 1e-9)


def searched(graph: Graph, cluster: Cluster, cost: str) -> dict[str, float]:
    """CPU-seconds of a search over all meshes, loading of weights included, and what the plan costs by either model."""
    started = time.process_time()
    compute = model_of(cost, cluster)
    found = search_meshes(plan_problems(graph, cluster, mode="train", compute=compute))
    seconds = time.process_time() - started
    return {"search_cpu_s": seconds, "cost_s": found.cost.seconds, "gap": found.gap, "states": found.states}


def claim(record: Record, names: Sequence[str]) -> None:
    """Rates, and searches against the analytic ones."""
    rates_of = {row["cost"]: row for row in record.rows if "new_per_s" in row}
    shown = []
    for name in names:
        record.claim(f"{name}: queries not asked before", rates_of[name]["new_per_s"], "1/CPU-s")
        record.claim(f"{name}: queries asked before", rates_of[name]["known_per_s"], "1/CPU-s")
    for row in (row for row in record.rows if "search" in row):
        plain = next(r for r in record.rows if r.get("search") == row["search"] and r["cost"] == names[0])
        ratio = row["search_cpu_s"] / max(plain["search_cpu_s"], 1e-9)
        record.claim(f"{row['search']}: search with {row['cost']} costs over {names[0]}", ratio, "x")
        shown.append((row["search"], row["cost"], f"{row['search_cpu_s']:.2f}", f"{row['cost_s'] * 1e3:.4g}"))
    table(("search", "cost model", "CPU-s", "step ms"), shown)


if __name__ == "__main__":
    main()
