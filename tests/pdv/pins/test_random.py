"""Random pins on random programs: two exact strategies agree on the optimum, and what neither can keep is explained."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from ir.errors import NoPlanFitsError
from ir.graph import Graph
from ir.mesh import Mesh
from pdv.pins import load_pins
from pdv.pins.conflict import contradiction
from pdv.problem import Problem
from pdv.search.meshes import search_mesh
from pdv.search.strategies import STRATEGIES
from tests.pdv import worlds


def random_pins(rng: random.Random, graph: Graph) -> dict[str, Any]:  # Any: plain data
    ops = sorted({node.op.name for node in graph.nodes if not node.is_leaf})
    pins: dict[str, Any] = {}
    if rng.random() < 0.4:
        pins["axes"] = {"a": rng.choice(["data", "tensor", ["data", "tensor"]])}
    if rng.random() < 0.4 and graph.params:
        name = rng.choice([param.attr("name") for param in graph.params])
        pins["tensors"] = {name: {"a": rng.choice(["whole", "cut", "shard 0"])}}
    if rng.random() < 0.5:
        pins["forbid"] = [
            rng.choice([{"op": rng.choice(ops), "axis": "a"}, {"technique": "zero"}, {"technique": "data"}])
        ]
    if rng.random() < 0.3:
        known = ["ddp", "zero-3", "zero-2", "tensor"]
        pins["techniques"] = {"a": rng.choice(known if "linear" in ops else known[:3])}  # tensor is of products
    return pins


def least(problem: Problem, strategy: str) -> tuple[float, NoPlanFitsError | None]:
    try:
        return search_mesh(problem, STRATEGIES[strategy]).cost.seconds, None
    except NoPlanFitsError as error:
        return math.inf, error


@pytest.mark.parametrize("seed", range(30))
def test_two_strategies_agree(seed: int) -> None:
    graph = worlds.random_graph(seed, 5)
    mesh = Mesh.of(a=2, b=3) if seed % 6 == 0 else Mesh.of(a=2)
    pins = load_pins(random_pins(random.Random(seed), graph)).on(graph, mesh)
    problem = worlds.problem(graph, mesh, pins=pins)
    (found, error), (other, _) = least(problem, "backtrack"), least(problem, "dp")
    assert found == pytest.approx(other, rel=1e-9)
    if error is not None:
        blamed = contradiction(problem, error)
        assert blamed is not None
        assert "contradict each other" in blamed.what or "cannot be kept" in blamed.what
