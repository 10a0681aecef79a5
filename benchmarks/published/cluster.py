"""The cluster of a published run as a cluster file's content: devices and bandwidths as people write them.

`"8x200Gb/s HDR per node"`, `"NVLink3 600GB/s bidir"`, `"A100-40G x8 + V100 x8"`: rates in any unit, per GPU or per
node, one way or both. What is not stated is what such GPUs are usually joined by.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ir.errors import did_you_mean
from pdv.cluster.names import device_in
from pdv.cluster.presets import DEVICES, LINKS

Row = Mapping[str, str]

# A preset's first word -> link inside a node, network: what nodes of such GPUs usually have.
USUAL: tuple[tuple[str, str, str], ...] = (
    ("gb300", "nvlink5", "ib-xdr"), ("gb200", "nvlink5", "ib-ndr"), ("gh200", "nvlink4", "ib-ndr"),
    ("b300", "nvlink5", "ib-xdr"), ("b200", "nvlink5", "ib-ndr"),
    ("h100-94gb-nvl", "pcie5", "ib-ndr"), ("h", "nvlink4", "ib-ndr"),
    ("a100-80gb-pcie", "pcie4", "ib-hdr"), ("a100-40gb-pcie", "pcie4", "ib-hdr"), ("a100", "nvlink3", "ib-hdr"),
    ("v100", "nvlink2", "ethernet-25g"), ("mi300", "xgmi3", "ib-ndr"), ("mi250", "xgmi3", "ib-hdr"),
    ("a40", "pcie4", "ib-hdr"), ("p100", "pcie3", "ethernet-25g"), ("t4", "pcie3", "ethernet-25g"),
    ("l40", "pcie4", "ethernet-100g"), ("l4", "pcie4", "ethernet-25g"),
    ("", "pcie4", "ethernet-100g"),
)  # fmt: skip
DOMAIN = 72  # GPUs of an NVL72 rack, one NVLink domain (GB200 NVL72 data sheet); schedulers hand out equal parts of it
# What collectives reach of a link's line rate. NVLink: NCCL all-reduce, A100 (pdv/cluster/presets.py). PCIe: through
# host memory, median of seven systems of 2 to 8 GPUs in public measurements (0.12 to 0.71). Ethernet: TCP, assumed.
REACHED = {"nvlink": 0.71, "pcie": 0.45, "ethernet": 0.4}
SAME = 0.15  # a stated rate this close to the usual link's is that link's
LINKS_OF_A_GPU = {"nvlink2": 6, "nvlink3": 12, "nvlink4": 18}  # NVIDIA, V100, A100 and H100 datasheets
RATE = re.compile(r"(?:(\d+)\s*x\s*(?:[A-Za-z-]+\s+)*)?(\d+(?:\.\d+)?)\s*([GMT])(b|B|bit)(?:/s|ps)", re.ASCII)
PER_GPU_WORDS = ("per gpu", "/gpu", "a gpu", "per device")
PORT_WORDS = ("hdr", "ndr", "infiniband")  # of which nodes of such GPUs have a port for each


def cluster_of(row: Row, devices: int) -> dict[str, Any]:
    """The content of a cluster file.

    Raises:
        ValueError: if a GPU has no record.
    """
    kinds = devices_of(row.get("gpu", ""), devices)
    per_node = node_size(row.get("gpus_per_node") or "", devices)
    nodes: list[dict[str, Any]] = []
    network: dict[str, Any] | str = ""
    for device, count in kinds:
        _, link, usual = next(entry for entry in USUAL if preset(device).startswith(entry[0]))
        for number, size in ((count // per_node, per_node), (1, count % per_node)):
            if number and size:
                node: dict[str, Any] = {"count": number, "devices": size, "device": device}
                nodes.append(node | (inside_links(row.get("intra_bw", ""), link, size) if size > 1 else {}))
        network = network or between(row.get("inter_bw", ""), usual, per_node)
    found: dict[str, Any] = {"name": "published", "nodes": nodes}
    return found if sum(node["count"] for node in nodes) == 1 else found | {"network": network}


def node_size(text: str, devices: int) -> int:
    """Devices that one fast level joins: of a node as stated, or the largest equal parts of an NVL72 domain."""
    stated = re.match(r"\d+", text)
    if "nvl72" in text.lower() and devices > DOMAIN:
        tray = int(stated[0]) if stated else 4
        return max(size for size in range(tray, DOMAIN + 1, tray) if devices % size == 0)
    return devices if "nvl72" in text.lower() else max(1, min(devices, int(stated[0]) if stated else 8))


def preset(device: str | dict[str, str]) -> str:
    """The preset of a device as a cluster file names it."""
    return device if isinstance(device, str) else device["preset"]


def devices_of(text: str, devices: int) -> list[tuple[str | dict[str, str], int]]:
    """The kinds of device that a cell names, each with how many: as written (``8xA100 + 8xV100``), else even parts."""
    parts = [part for part in re.split(r"[+|&/]|,(?![^(]*\))| and ", text) if part.strip()]
    named = [(found, _count(part)) for part in parts if (found := device_in(part)) is not None]
    if not named:
        near = did_you_mean(text, DEVICES) or "`pdv cluster devices` lists all"
        raise ValueError(f"GPU {text!r} has no record. {near}")
    if len(named) == 1:
        return [(named[0][0], devices)]
    stated = sum(count for _, count in named) if all(count for _, count in named) else 0
    if stated and devices % stated == 0:  # counts of all, of a node, or of a part
        return [(entry, count * (devices // stated)) for entry, count in named]
    if devices % len(named):
        raise ValueError(f"{devices} devices of {text!r}: how many of each is not said")
    return [(entry, devices // len(named)) for entry, _ in named]


def _count(text: str) -> int:
    match = re.search(r"(?:^|\s)(\d+)\s*[x*]\s*[a-zA-Z]", text) or re.search(r"[x*:=]\s*(\d+)\s*$", text.strip())
    return int(match[1]) if match else 0


def inside_links(text: str, usual: str, devices: int) -> dict[str, Any]:
    """The links of a node. ``"4 inter-GPU connects"``: so many between any two, which leaves groups, joined by PCIe."""
    inside = inside_link(text, usual)
    between_two = re.search(r"(\d+) inter-gpu connects", text.lower())
    if between_two is None or usual not in LINKS_OF_A_GPU:
        return {"link": inside}
    group = LINKS_OF_A_GPU[usual] // int(between_two[1]) + 1
    if group >= devices or devices % group:
        return {"link": inside}
    return {"link": "pcie4", "parts": [{"devices": group, "link": inside}]}


def inside_link(text: str, usual: str) -> str | dict[str, Any]:
    """The link inside a node: the usual one, or one of a stated rate (of NVLink, what collectives reach of it)."""
    rate = bandwidth(text, 1)
    if rate is None or "config" in text.lower():  # a setting of somebody's simulator says nothing of the hardware
        return usual
    kind = next((kind for kind in REACHED if usual.startswith(kind)), "")
    line_rate = kind == "pcie" or any(word in text.lower() for word in ("nvlink", "dir"))  # uni- and bidirectional
    reached = REACHED[kind] if kind and line_rate else 1.0
    if abs(rate * reached / LINKS[usual].link.bandwidth_bytes_per_s - 1) < SAME:
        return usual
    return {"preset": usual, "name": "stated", "bandwidth": f"{rate * reached / 1e9:.6g} GB/s"}


def between(text: str, usual: str, per_node: int) -> str | dict[str, Any]:
    """The network: the usual one, or one of a stated rate, as one port a device."""
    rate = bandwidth(text, per_node)
    if rate is None:
        return usual
    rate *= REACHED["ethernet"] if usual.startswith("ethernet") else 1.0
    return {
        "preset": usual, "name": "stated", "bandwidth": f"{rate / 1e9:.6g} GB/s", "ports_per_node": per_node,
    }  # fmt: skip


def bandwidth(text: str, per_node: int) -> float | None:
    """Bytes/s of one device and direction; a rate is a node's unless the text says that it is a GPU's."""
    match = RATE.search(text)
    if match is None:
        return None
    scale = {"M": 1e6, "G": 1e9, "T": 1e12}[match[3]] / (1 if match[4] == "B" else 8)
    rate = float(match[2]) * scale * int(match[1] or 1)
    lower = text.lower()
    if "bidir" in lower:
        rate /= 2
    port = any(word in lower for word in PORT_WORDS) and not match[1] and "node" not in lower
    return rate if port or any(word in lower for word in PER_GPU_WORDS) else rate / per_node
