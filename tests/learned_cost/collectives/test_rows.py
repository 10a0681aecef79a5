"""How names of links and libraries are understood."""

from __future__ import annotations

import numpy as np
import pytest

from learned_cost.collectives.rows import LIBRARIES, LINKS, blocks_used, cases_of, library_class, link_facts
from tests.learned_cost.collectives.worlds import rows_table


@pytest.mark.parametrize(
    ("gpu", "interconnect", "devices", "nodes", "kind", "rate"),
    [
        ("A100-SXM4-80GB", "NVLink3+NVSwitch", 8, 1, "nvlink", 300e9),
        ("A100-PCIE-80GB", "NVLink3 bridge pairs + PCIe4", 2, 1, "nvlink", 300e9),
        ("A100-PCIE-80GB", "NVLink3 bridge pairs + PCIe4", 4, 1, "pcie", 32e9),
        ("B60", "PCIe5x8", 2, 1, "pcie", 32e9),
        ("GTX1080Ti", "PCIe3 tree; IB FDR between nodes", 16, 2, "between", 6.8e9),
        ("GB200", "", 72, 18, "nvlink", 900e9),
        ("unheard-of", "", 2, 1, "pcie", 32e9),
        ("cpu-core", "loopback", 4, 1, "memory", 29e9),
    ],
)
def test_links(gpu: str, interconnect: str, devices: int, nodes: int, kind: str, rate: float) -> None:
    found = link_facts(gpu, interconnect, devices, nodes)
    assert LINKS[found.kind] == kind
    assert found.rate == pytest.approx(rate)


def test_libraries() -> None:
    names = ["nccl", "nccl(torch.distributed)", "vLLM_custom_eager", "TRTLLM", "NCCL 2.0 MPI", "deepep_ll", "gloo", "?"]
    classes = ["nccl", "torch", "eager", "trtllm", "mpi", "deepep_ll", "gloo", "nccl"]
    assert [LIBRARIES[library_class(name)] for name in names] == classes
    assert blocks_used("deepep_normal_sms12") == 12


def test_nodes_and_devices_of_each_are_filled_in() -> None:
    shared = {"gpu": "L40S", "collective": "all_reduce", "bytes": 8, "latency_us": 1.0}
    cases = cases_of(rows_table([{**shared, "n_devices": 16, "n_nodes": 2, "devices_per_node": -1}]))
    assert (cases.per_node[0], cases.nodes[0]) == (8, 2)
    cases = cases_of(rows_table([{**shared, "n_devices": 16, "n_nodes": -1, "devices_per_node": 4}]))
    assert np.array_equal(cases.nodes, [4])


@pytest.mark.parametrize(
    ("gpu", "interconnect", "inner", "ports"),
    [
        ("A100-SXM4-80GB", "NVLink3+NVSwitch; IB between nodes", "nvlink", 8),
        ("GTX1080Ti", "PCIe3 tree; IB FDR between nodes", "pcie", 1),
    ],
)
def test_a_ring_leaves_a_node_by_its_ports(gpu: str, interconnect: str, inner: str, ports: int) -> None:
    found = link_facts(gpu, interconnect, 16, 2)
    assert (LINKS[found.kind], LINKS[found.inner], found.ports) == ("between", inner, ports)
