"""Nodes as they are sold or rented, as presets: devices, what joins them, and their network ports.

Entry point: `NODES`. Other names that people give them are in `pdv.cluster.names`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PresetNode:
    """A node as sold: what a cluster file would say of it, and of its network ports."""

    name: str
    devices: int
    device: str
    link: str | Mapping[str, object] | None
    network: Mapping[str, object] | None
    parts: tuple[Mapping[str, object], ...] = ()
    source: str = ""


# Sources: the vendors' data sheets and the clouds' instance pages. "ports" are those for traffic between nodes alone
# (storage and management ports are left out).
NODES: dict[str, PresetNode] = {
    preset.name: preset
    for preset in (
        PresetNode(
            "dgx-1v", 8, "v100-16gb-sxm", "nvlink2", {"preset": "ib-edr", "ports_per_node": 4},
            source="DGX-1 V100 data sheet: 8 V100 on NVLink2 in a hybrid cube mesh (taken as all to all), 4 EDR ports",
        ),
        PresetNode(
            "dgx-2", 16, "v100-32gb-sxm", "nvlink2", {"preset": "ib-edr", "ports_per_node": 8},
            source="DGX-2 data sheet: 16 V100 on NVSwitch, 8 EDR ports",
        ),
        PresetNode(
            "dgx-a100", 8, "a100-80gb-sxm", "nvlink3", {"preset": "ib-hdr", "ports_per_node": 8, "rails": True},
            source="DGX A100 data sheet: 8 A100 on NVSwitch, 8 HDR ports",
        ),
        PresetNode(
            "dgx-h100", 8, "h100-80gb-sxm", "nvlink4", {"preset": "ib-ndr", "ports_per_node": 8, "rails": True},
            source="DGX H100 data sheet: 8 H100 on NVSwitch, 8 NDR ports",
        ),
        PresetNode(
            "hgx-h200", 8, "h200-141gb-sxm", "nvlink4", {"preset": "ib-ndr", "ports_per_node": 8, "rails": True},
            source="HGX H200 data sheet; ports as in a DGX H200",
        ),
        PresetNode(
            "hgx-h800", 8, "h800-sxm-80gb", "nvlink4-h800", {"preset": "ib-ndr", "ports_per_node": 8, "rails": True},
            source="DeepSeek-V3 technical report, section 3.1: 8 H800 on NVSwitch; one NDR port each",
        ),
        PresetNode(
            "dgx-b200", 8, "b200-sxm-180gb", "nvlink5", {"preset": "ib-ndr", "ports_per_node": 8, "rails": True},
            source="DGX B200 data sheet: 8 B200 on NVSwitch, 8 ports of 400 Gb/s",
        ),
        PresetNode(
            "gb200-nvl72", 72, "gb200", "nvlink5", {"preset": "ib-ndr", "ports_per_node": 72},
            source="GB200 NVL72 data sheet: 72 GPUs in one NVLink domain; a port of 400 Gb/s each",
        ),
        PresetNode(
            "gh200", 1, "gh200-96gb", None, {"preset": "ib-ndr", "ports_per_node": 1},
            source="GH200 data sheet: one GPU a node; one NDR port",
        ),
        PresetNode(
            "alps", 4, "gh200-96gb", {"preset": "nvlink4", "bandwidth": "128 GB/s"},
            {"preset": "slingshot-11", "ports_per_node": 4},
            source="CSCS Alps: 4 GH200 a node, 150 GB/s a direction between each two, a Slingshot 11 port each",
        ),
        PresetNode(
            "p3.16xlarge", 8, "v100-16gb-sxm", "nvlink2", {"preset": "ethernet-25g", "ports_per_node": 1},
            source="AWS instance page: 8 V100 on NVLink, 25 Gb/s",
        ),
        PresetNode(
            "p3dn.24xlarge", 8, "v100-32gb-sxm", "nvlink2", {"preset": "efa-100", "ports_per_node": 1},
            source="AWS instance page: 8 V100 on NVLink, 100 Gb/s",
        ),
        PresetNode(
            "p4d.24xlarge", 8, "a100-40gb-sxm", "nvlink3", {"preset": "efa-100", "ports_per_node": 4},
            source="AWS instance page: 8 A100 on NVSwitch, 4 x 100 Gb/s EFA",
        ),
        PresetNode(
            "p5.48xlarge", 8, "h100-80gb-sxm", "nvlink4", {"preset": "efa-100", "ports_per_node": 32},
            source="AWS instance page: 8 H100 on NVSwitch, 3,200 Gb/s EFA in 32 cards",
        ),
        PresetNode(
            "g4dn.12xlarge", 4, "t4", "pcie3", {"preset": "ethernet-25g", "bandwidth": "50 Gb/s", "ports_per_node": 1},
            source="AWS instance page: 4 T4 on PCIe, 50 Gb/s",
        ),
        PresetNode(
            "g5.12xlarge", 4, "a10g", "pcie4", {"preset": "ethernet-25g", "bandwidth": "40 Gb/s", "ports_per_node": 1},
            source="AWS instance page: 4 A10G on PCIe, 40 Gb/s",
        ),
        PresetNode(
            "g5.48xlarge", 8, "a10g", {"preset": "socket", "ports": 1}, {"preset": "efa-100", "ports_per_node": 1},
            ({"name": "socket", "devices": 4, "link": "pcie4"},),
            source="AWS instance page: 8 A10G on PCIe (two sockets), 100 Gb/s",
        ),
        PresetNode(
            "a2-highgpu-8g", 8, "a100-40gb-sxm", "nvlink3", {"preset": "ethernet-100g", "ports_per_node": 1},
            source="Google Cloud machine page: 8 A100 on NVSwitch, 100 Gb/s",
        ),
        PresetNode(
            "a3-highgpu-8g", 8, "h100-80gb-sxm", "nvlink4", {"preset": "roce-200", "ports_per_node": 4},
            source="Google Cloud machine page: 8 H100 on NVSwitch, 4 x 200 Gb/s for GPU traffic",
        ),
        PresetNode(
            "nd-a100-v4", 8, "a100-40gb-sxm", "nvlink3", {"preset": "ib-hdr", "ports_per_node": 8, "rails": True},
            source="Azure size page: 8 A100 on NVSwitch, a port of 200 Gb/s each",
        ),
        PresetNode(
            "nd-h100-v5", 8, "h100-80gb-sxm", "nvlink4", {"preset": "ib-ndr", "ports_per_node": 8, "rails": True},
            source="Azure size page: 8 H100 on NVSwitch, a port of 400 Gb/s each",
        ),
        PresetNode(
            "dgx-b300", 8, "b300-sxm-270gb", "nvlink5", {"preset": "ib-xdr", "ports_per_node": 8, "rails": True},
            source="DGX B300 data sheet: 8 B300 on NVSwitch, 8 ports of 800 Gb/s",
        ),
        PresetNode(
            "gb300-nvl72", 72, "gb300", "nvlink5", {"preset": "ib-xdr", "ports_per_node": 72},
            source="GB300 NVL72 data sheet: 72 GPUs in one NVLink domain; a port of 800 Gb/s each",
        ),
        PresetNode(
            "p3.8xlarge", 4, "v100-16gb-sxm", "nvlink2", {"preset": "ethernet-10g", "ports_per_node": 1},
            source="AWS instance page: 4 V100 on NVLink, 10 Gb/s",
        ),
        PresetNode(
            "p4de.24xlarge", 8, "a100-80gb-sxm", "nvlink3", {"preset": "efa-100", "ports_per_node": 4},
            source="AWS instance page: 8 A100 of 80 GB on NVSwitch, 4 x 100 Gb/s EFA",
        ),
        PresetNode(
            "p5en.48xlarge", 8, "h200-141gb-sxm", "nvlink4", {"preset": "efa-200", "ports_per_node": 16},
            source="AWS instance page: 8 H200 on NVSwitch, 3,200 Gb/s EFA in 16 cards",
        ),
        PresetNode(
            "p6-b200.48xlarge", 8, "b200-sxm-180gb", "nvlink5", {"preset": "efa-200", "ports_per_node": 16},
            source="AWS instance page: 8 B200 on NVSwitch, 3,200 Gb/s EFA, cards as in p5en",
        ),
        PresetNode(
            "a2-ultragpu-8g", 8, "a100-80gb-sxm", "nvlink3", {"preset": "ethernet-100g", "ports_per_node": 1},
            source="Google Cloud machine page: 8 A100 of 80 GB on NVSwitch, 100 Gb/s",
        ),
        PresetNode(
            "a3-megagpu-8g", 8, "h100-80gb-sxm", "nvlink4", {"preset": "roce-200", "ports_per_node": 8},
            source="Google Cloud machine page: 8 H100 on NVSwitch, 8 x 200 Gb/s for GPU traffic",
        ),
        PresetNode(
            "a3-ultragpu-8g", 8, "h200-141gb-sxm", "nvlink4", {"preset": "roce-400", "ports_per_node": 8},
            source="Google Cloud machine page: 8 H200 on NVSwitch, 8 x 400 Gb/s, RoCE",
        ),
        PresetNode(
            "a4-highgpu-8g", 8, "b200-sxm-180gb", "nvlink5", {"preset": "roce-400", "ports_per_node": 8},
            source="Google Cloud machine page: 8 B200 on NVSwitch, 8 x 400 Gb/s, RoCE",
        ),
        PresetNode(
            "ndm-a100-v4", 8, "a100-80gb-sxm", "nvlink3", {"preset": "ib-hdr", "ports_per_node": 8, "rails": True},
            source="Azure size page: 8 A100 of 80 GB on NVSwitch, a port of 200 Gb/s each",
        ),
        PresetNode(
            "nd-h200-v5", 8, "h200-141gb-sxm", "nvlink4", {"preset": "ib-ndr", "ports_per_node": 8, "rails": True},
            source="Azure size page: 8 H200 on NVSwitch, a port of 400 Gb/s each",
        ),
        PresetNode(
            "mi300x-platform", 8, "mi300x", "xgmi3", {"preset": "ib-ndr", "ports_per_node": 8, "rails": True},
            source="MI300X platform data sheet: 8 MI300X all to all; a port of 400 Gb/s each, as usually built",
        ),
    )
}  # fmt: skip
