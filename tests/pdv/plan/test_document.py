"""plan.json: plain data, the same for the same plan, and refused where it is damaged."""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from typing import Any

import pytest

from ir.errors import VerificationError
from ir.mesh import Mesh
from pdv.cluster import Cluster, load_cluster
from pdv.plan.derivation import replay
from pdv.plan.document import plan_document, read_problem
from pdv.planning.problems import plan_problems
from pdv.search.best import BestPlan
from pdv.search.meshes import search_meshes
from tests.pdv.worlds import attention_block

GRAPH = attention_block(batch=4)


def cluster() -> Cluster:
    device = {
        "name": "toy",
        "memory": "1 GiB",
        "peak": {"float32": "1 GFLOP/s"},
        "memory_bandwidth": "1 GB/s",
        "launch_latency": "1 us",
        "efficiency": 1.0,
    }
    link = {"name": "wire", "bandwidth": "1 GB/s", "latency": "1 us"}
    return load_cluster({"name": "toys", "nodes": [{"count": 1, "devices": 4, "device": device, "link": link}]})


@cache
def found() -> BestPlan:
    return search_meshes(plan_problems(GRAPH, cluster(), mode="train"))


@cache
def document() -> dict[str, Any]:  # Any: JSON
    made = plan_document(found(), cluster=cluster(), strategy="backtrack", seconds=0.5)
    loaded: dict[str, Any] = json.loads(json.dumps(made, allow_nan=False))
    return loaded


def test_it_is_json_and_says_what_was_found() -> None:
    best = found()
    assert document()["search"]["seconds"] == 0.5
    assert document()["pcg_hash"] == best.pcg.digest
    assert document()["predicted"]["step_time_s"]["mean"] == best.cost.seconds
    assert document()["predicted"]["memory_bytes"] == {"toy": best.cost.peak_bytes}
    assert document()["search"]["lower_bound"] <= document()["search"]["cost"]
    assert 0 <= document()["search"]["gap"] <= 1
    assert [axis["name"] for axis in document()["mesh"]] == [axis.name for axis in best.solution.problem.mesh.axes]
    spent = sum(document()["predicted"]["breakdown_s"].values())
    assert spent == pytest.approx(best.cost.seconds)


def test_two_runs_write_the_same_bytes() -> None:
    again = plan_document(found.__wrapped__(), cluster=cluster(), strategy="backtrack", seconds=0.5)
    assert json.dumps(again) == json.dumps(document())


def test_what_is_written_replays() -> None:
    problem = read_problem(document(), GRAPH)
    assert replay(problem, document()["derivation"]).digest == document()["pcg_hash"]


def test_one_device_is_a_plan_too() -> None:
    alone = cluster().with_mesh({"a": 4})
    best = search_meshes(plan_problems(GRAPH, alone, mode="infer"))
    made = plan_document(best, cluster=alone, strategy="backtrack", seconds=0.0)
    assert best.solution.problem.mesh == Mesh.of(a=4)
    json.dumps(made, allow_nan=False)


def test_another_version_is_refused() -> None:
    with pytest.raises(VerificationError, match="of an older pdv"):
        read_problem({**document(), "format_version": 1}, GRAPH)


VALUES: tuple[Any, ...] = (None, -1, 0, 1.5, "", "x", [], {}, [None], {"a": None}, True)


def damaged(value: Any, rng: random.Random) -> Any:
    """The same JSON with one thing in it replaced or left out."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.2:
            return {name: entry for name, entry in value.items() if name != key}
        return {**value, key: damaged(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], damaged(value[at], rng), *value[at + 1 :]]
    return rng.choice(VALUES)


def test_a_damaged_document_is_refused_or_harmless() -> None:
    rng = random.Random(0)
    parts = ("mesh", "mode", "cluster", "derivation", "laws")
    refused = 0
    for _ in range(200):
        part = rng.choice(parts)
        broken = {**copy.deepcopy(document()), part: damaged(document()[part], rng)}
        try:
            replay(read_problem(broken, GRAPH), broken["derivation"])
        except VerificationError:
            refused += 1
    assert refused > 80


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(VerificationError, match="damaged"):
        read_problem({**document(), "mode": "guess"}, GRAPH)
