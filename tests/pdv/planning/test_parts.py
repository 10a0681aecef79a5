"""Parts of a cluster: which are looked at, and that one which is faster than all of it is said."""

from __future__ import annotations

from typing import Any

import pytest

import pdv
from pdv.cluster import load_cluster
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import program
from pdv.planning.parts import parts_of
from pdv.report.summary import part_text

SMALL = "gpt:layers=2,hidden=128,heads=4,seq=64,vocab=512"
LARGER = "gpt:layers=2,hidden=512,heads=4,seq=256,vocab=512"
A100, T4 = "a100-80gb-sxm", "t4"


def cluster(*nodes: dict[str, Any], network: str | None = "ethernet-10g") -> dict[str, Any]:
    joined = {"network": network} if network and sum(node.get("count", 1) for node in nodes) > 1 else {}
    return {"name": "some", "nodes": list(nodes), **joined}


def node(devices: int, device: str = A100, count: int = 1) -> dict[str, Any]:
    return {"count": count, "devices": devices, "device": device, **({"link": "nvlink3"} if devices > 1 else {})}


@pytest.mark.parametrize(
    ("described", "parts"),
    [
        (cluster(node(1)), {}),
        (cluster(node(4)), {f"1 {A100}": 1}),
        (cluster(node(7)), {f"1 {A100}": 1, f"4 {A100}": 4, f"6 {A100}": 6}),
        (cluster(node(4, count=2)), {f"1 {A100}": 1, f"a node of 4 {A100}": 4}),
        (cluster(node(4), node(4, T4)), {f"1 {A100}": 1, f"a node of 4 {A100}": 4, f"a node of 4 {T4}": 4}),
        (
            cluster(node(2, count=2), node(2, T4)),
            {f"1 {A100}": 1, f"a node of 2 {A100}": 2, f"the 4 {A100} of 2 nodes": 4, f"a node of 2 {T4}": 2},
        ),
    ],
)
def test_parts_are_of_one_kind_of_device(described: dict[str, Any], parts: dict[str, int]) -> None:
    found = dict(parts_of(load_cluster(described)))
    assert {what: part.num_devices for what, part in found.items()} == parts
    for what, part in found.items():
        assert part.classes[0].device.name in what
        assert all(level.size > 1 for level in part.levels)


def planned(sizes: str, batch: int, described: dict[str, Any], **options: Any) -> dict[str, Any]:
    return dict(pdv.optimize(program(arch(sizes), batch=batch), cluster=described, cost="analytic", **options).document)


def test_a_part_that_is_faster_is_said() -> None:
    """Slow devices behind a slow link cost more than they save; so it is known that the fast one alone does better."""
    document = planned(LARGER, 16, cluster(node(1), node(1, T4), network="ethernet-10g"), budget_s=10.0)
    part = document["part"]
    assert (part["what"], part["devices"]) == (f"1 {A100}", 1)
    assert part["step_s"] < 0.97 * document["simulated"]["step_s"]
    assert f"1 {A100} alone, of 2 devices" in part_text(document)
    alone = planned(LARGER, 16, cluster(node(1)))
    assert part["step_s"] == pytest.approx(alone["simulated"]["step_s"])


def test_nothing_is_said_of_devices_that_are_needed_or_pinned() -> None:
    wide = "gpt:layers=2,hidden=2048,heads=16,seq=1024,vocab=8192"
    assert "part" not in planned(wide, 64, cluster(node(4)), budget_s=10.0)
    slow = cluster(node(1), node(1, T4), network="ethernet-10g")
    assert "part" not in planned(SMALL, 8, slow, stages=2, micro_batches=1, budget_s=10.0)
