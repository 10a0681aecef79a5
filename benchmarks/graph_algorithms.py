"""Graph algorithms written here beside networkx's: whether they give the same, and how fast (docs/decisions/0017).

    python benchmarks/graph_algorithms.py [--smoke] [--json OUT]

Values on which alone all behind them depends: one sweep against networkx's immediate dominators of the reversed graph.
An order to eliminate variables in: the next one with the smallest table, against networkx's of least degree; what
counts is the largest table that each has to make.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import networkx as nx

from benchmarks.joint import CLUSTERS
from benchmarks.models.shapes import program
from benchmarks.record import Record, arguments, table
from ir.graph import Graph, Node, bottlenecks
from ir.types import DType
from pdv.cluster import load_cluster
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph
from pdv.planning.problems import plan_problems
from pdv.search.strategies.budget import Budget
from pdv.search.strategies.pricing import Minimized, NetworkTask, strategy

MODELS = (("gpt2", 64, 1024), ("inception-v3", 256, None))
Sizes = Mapping[int, int]
Scopes = Sequence[tuple[int, ...]]


def timed(run: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """What it gives, and CPU milliseconds of the quickest run."""
    best = math.inf
    for _ in range(repeats):
        started = time.process_time()
        found = run()
        best = min(best, time.process_time() - started)
    return found, 1e3 * best


def dominators(nodes: Sequence[Node], users: Mapping[Node, Sequence[Node]]) -> list[int]:
    """``ir.graph.bottlenecks`` by networkx: values through which everything made before goes on."""
    place = {node: at for at, node in enumerate(nodes)}
    flow = nx.DiGraph()
    flow.add_nodes_from(range(-1, len(nodes) + 1))
    flow.add_edges_from((place[user], at) for at, node in enumerate(nodes) for user in users[node] if user in place)
    flow.add_edges_from((len(nodes), at) for at, node in enumerate(nodes) if not any(u in place for u in users[node]))
    flow.add_edges_from((at, -1) for at, node in enumerate(nodes) if not any(x in place for x in node.operands))
    above = nx.immediate_dominators(flow, len(nodes))
    found, at = [], above[-1]
    while at != len(nodes):
        found.append(at)
        at = above[at]
    return [at for at in sorted(found) if any(user in place for user in users[nodes[at]])]


def smallest_first(scopes: Scopes, sizes: Sizes) -> int:
    """The largest table where the variable with the smallest one goes first, as `--search dp` has it."""
    near = _neighbours(scopes)

    def width(v: int) -> int:
        return math.prod(sizes[other] for other in {v, *near[v]})

    queue, largest = [(width(v), v) for v in near], 0
    heapq.heapify(queue)
    while queue:
        before, v = heapq.heappop(queue)
        if v not in near or before != width(v):
            continue
        largest = max(largest, before)
        around = near.pop(v)
        for other in around:
            near[other] = (near[other] | around) - {v, other}
            heapq.heappush(queue, (width(other), other))
    return largest


def least_degree(scopes: Scopes, sizes: Sizes) -> int:
    """The largest table of networkx's tree decomposition by least degree."""
    plain = nx.Graph()
    for v, around in _neighbours(scopes).items():
        plain.add_edges_from((v, other) for other in around)
        plain.add_node(v)
    _, tree = nx.approximation.treewidth_min_degree(plain)
    return max(math.prod(sizes[v] for v in bag) for bag in tree)


def _neighbours(scopes: Scopes) -> dict[int, set[int]]:
    near: dict[int, set[int]] = {}
    for scope in scopes:
        for v in scope:
            near.setdefault(v, set()).update(set(scope) - {v})
    return near


class _Captured(Exception):  # no error: the search stops where its problem is known
    pass


def network(model: str, batch: int, sequence: int | None) -> tuple[Scopes, Sizes]:
    """The variables of a model's search on 8x8 devices, and which terms mention which."""
    kept: list[NetworkTask] = []

    def capture(task: NetworkTask) -> Minimized:
        kept.append(task)
        raise _Captured

    cluster = load_cluster(CLUSTERS["infiniband-8x8"])
    source = program(model, batch, sequence).graph
    (problem,) = plan_problems(source, cluster, mode="train", memory_limit=math.inf)
    try:
        strategy(capture)(problem, Budget())
    except _Captured:
        flat = kept[0].flat
    return [term.variables for term in flat.terms], dict(flat.sizes)


def values(model: Graph) -> list[Node]:
    """What flows: no leaves."""
    return [node for node in model.nodes if not node.is_leaf]


def main() -> None:
    """Print both tables; with --json write the record."""
    options = arguments(str(__doc__).splitlines()[0]).parse_args()
    record, repeats, models = Record(), 3, MODELS[:1] if options.smoke else MODELS
    graphs = {name: program(name, batch, sequence).graph for name, batch, sequence in models}
    if not options.smoke:
        graphs["llama-3-405b"] = graph(arch("llama-3-405b"), 8, DType.BF16)
    rows = []
    for name, model in graphs.items():
        nodes = values(model)
        ours, ours_ms = timed(lambda nodes=nodes, model=model: bottlenecks(nodes, model.users), repeats)
        theirs, theirs_ms = timed(lambda nodes=nodes, model=model: dominators(nodes, model.users), repeats)
        other = len(set(ours) ^ set(theirs))
        rows.append((name, str(len(nodes)), str(len(ours)), str(other), f"{ours_ms:.2f}", f"{theirs_ms:.2f}"))
        record.rows.append({"what": "bottlenecks", "model": name, "ours_ms": ours_ms, "networkx_ms": theirs_ms})
    table(("model", "operators", "bottlenecks", "of one alone", "sweep, ms", "networkx, ms"), rows)
    rows = []
    for name, batch, sequence in models:
        scopes, sizes = network(name, batch, sequence)
        ours, ours_ms = timed(lambda scopes=scopes, sizes=sizes: smallest_first(scopes, sizes), repeats)
        theirs, theirs_ms = timed(lambda scopes=scopes, sizes=sizes: least_degree(scopes, sizes), 1)
        rows.append((name, str(len(sizes)), f"{ours:,}", f"{theirs:,}", f"{ours_ms:.1f}", f"{theirs_ms:.1f}"))
        record.rows.append({"what": "elimination", "model": name, "largest": ours, "networkx_largest": theirs})
        record.rows[-1] |= {"ours_ms": ours_ms, "networkx_ms": theirs_ms}
    table(("model", "variables", "largest table", "by least degree", "ms", "networkx, ms"), rows)
    record.write(options.json)


if __name__ == "__main__":
    main()
