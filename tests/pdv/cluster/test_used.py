"""A network where machines talk faster than neighbours inside one is used: the heavy collectives go over it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdv
from pdv.plan.document import read_problem
from pdv.plan.package import Plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048, bias=False), nn.Linear(2048, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return x + y


def planned(**cluster: Any) -> Plan:  # Any: YAML
    model = nn.Sequential(Block(), Block())  # of 64 rows two plans are within 0.1 % of each other, and change places
    return pdv.optimize(model, (torch.zeros(128, 512),), cluster={"mesh": {"node": 2, "gpu": 2}} | cluster)


def with_links(inside: str, network: str) -> dict[str, Any]:
    node = {"count": 2, "devices": 2, "device": "t4", "link": {"name": "in", "bandwidth": inside, "latency": "2 us"}}
    ports = {"name": "net", "bandwidth": network, "latency": "2 us", "ports_per_node": 2}
    return {"nodes": [node], "network": ports}


def with_wires() -> dict[str, Any]:
    """Machines whose cards are joined in pairs across machines by fast wires."""
    wire = {"name": "wire", "bandwidth": "50 GB/s", "latency": "2 us"}
    inside = {"name": "in", "bandwidth": "1 GB/s", "latency": "2 us"}
    links = [{"between": [f"n0.g{place}", f"n1.g{place}"], "link": wire} for place in range(2)]
    return {"nodes": [{"count": 2, "devices": 2, "device": "t4", "link": inside}], "links": links}


def cut_over(plan: Plan, axis: str) -> list[str]:
    """What each operator is cut along, over one axis."""
    return [operator["splits"][axis] for operator in plan.document["operators"]]


@pytest.mark.parametrize("fast", [with_links("1 GB/s", "50 GB/s"), with_wires()], ids=["network", "wires"])
def test_a_fast_network_carries_what_a_fast_link_inside_would(fast: dict[str, Any]) -> None:
    over_network, over_inside = planned(**fast), planned(**with_links("50 GB/s", "1 GB/s"))
    assert cut_over(over_network, "node") == cut_over(over_inside, "gpu")
    assert cut_over(over_network, "gpu") == cut_over(over_inside, "node")
    # more is cut, and so more is communicated, over the fast axis
    assert cut_over(over_network, "node").count("none") < cut_over(over_network, "gpu").count("none")
    seconds = [plan.document["predicted"]["step_time_s"]["mean"] for plan in (over_network, over_inside)]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-9)


def test_an_axis_over_several_levels_is_kept_in_the_plan() -> None:
    """A replay prices chains of collectives by the same levels."""
    plan = planned(**with_links("50 GB/s", "1 GB/s"), mesh={"all": 4})
    (axis,) = read_problem(plan.document, plan.source).axes
    assert [(stage.size, stage.link.name) for stage in axis.stages] == [(2, "net"), (2, "in")]
    assert axis.link.bandwidth_bytes_per_s == 2e9
