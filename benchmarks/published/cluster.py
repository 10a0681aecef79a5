"""The cluster of a published run as a cluster file's content: devices and bandwidths as people write them.

`"8x200Gb/s HDR per node"`, `"NVLink3 600GB/s bidir"`, `"A100-40G x8 + V100 x8"`: rates in any unit, per GPU or per
node, one way or both. What is not stated is what such GPUs are usually joined by.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pdv.cluster.presets import LINKS

Row = Mapping[str, str]

# A word in a GPU's name -> (device record or preset, memory it may be told by, link inside a node, network).
# The first that matches is taken, so longer words come first.
DEVICES: tuple[tuple[str, str, str, str], ...] = (
    ("gb200", "gb200", "nvlink5", "ib-ndr"),
    ("gh200", "gh200-96gb", "nvlink4", "ib-ndr"),
    ("b200", "b200-sxm-180gb", "nvlink5", "ib-ndr"),
    ("h200", "h200-141gb-sxm", "nvlink4", "ib-ndr"),
    ("h800", "h800-sxm-80gb", "nvlink4", "ib-ndr"),
    ("h100", "h100-80gb-sxm", "nvlink4", "ib-ndr"),
    ("h20", "h20-sxm-96gb", "nvlink4", "ib-ndr"),
    ("a10080gpcie", "a100-80gb-pcie", "pcie4", "ib-hdr"),
    ("a100pcie", "a100-40gb-pcie", "pcie4", "ib-hdr"),
    ("a10040", "a100-40gb-sxm", "nvlink3", "ib-hdr"),
    ("a100", "a100-80gb-sxm", "nvlink3", "ib-hdr"),
    ("a800", "a100-80gb-sxm", "nvlink3", "ib-hdr"),
    ("v10032", "v100-32gb-sxm", "nvlink2", "ethernet-25g"),
    ("v100", "v100-16gb-sxm", "nvlink2", "ethernet-25g"),
    ("mi300", "mi300x", "xgmi3", "ib-ndr"),
    ("mi250", "mi250-1gcd", "xgmi3", "ib-hdr"),
    ("rtx4090", "rtx-4090", "pcie4", "ethernet-100g"),
    ("rtx3090", "rtx-3090", "pcie4", "ethernet-100g"),
    ("a6000", "rtx-a6000", "pcie4", "ethernet-100g"),
    ("l40s", "l40s", "pcie4", "ethernet-100g"),
    ("l40", "l40", "pcie4", "ethernet-100g"),
    ("a40", "a40", "pcie4", "ib-hdr"),
    ("a10", "a10g", "pcie4", "ethernet-100g"),
    ("l4", "l4", "pcie4", "ethernet-25g"),
    ("p100", "p100-pcie-16gb", "pcie3", "ethernet-25g"),
    ("t4", "t4", "pcie3", "ethernet-25g"),
)  # fmt: skip
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
    stated = re.match(r"\d+", row.get("gpus_per_node") or "")
    per_node = max(1, min(devices, int(stated[0]) if stated else 8))
    nodes: list[dict[str, Any]] = []
    network: dict[str, Any] | str = ""
    for entry, count in kinds:
        _, device, link, usual = entry
        for number, size in ((count // per_node, per_node), (1, count % per_node)):
            if number and size:
                node: dict[str, Any] = {"count": number, "devices": size, "device": device}
                nodes.append(node | (inside_links(row.get("intra_bw", ""), link, size) if size > 1 else {}))
        network = network or between(row.get("inter_bw", ""), usual, per_node)
    found: dict[str, Any] = {"name": "published", "nodes": nodes}
    return found if sum(node["count"] for node in nodes) == 1 else found | {"network": network}


def devices_of(text: str, devices: int) -> list[tuple[tuple[str, str, str, str], int]]:
    """The kinds of device that a cell names, each with how many: as written (``8xA100 + 8xV100``), else even parts."""
    parts = [part for part in re.split(r"[+,|&/]| and ", text) if part.strip()]
    found = [(entry, _count(part)) for part in parts if (entry := _device(part)) is not None]
    if not found:
        raise ValueError(f"GPU {text!r} has no record")
    if len(found) == 1:
        return [(found[0][0], devices)]
    if all(count for _, count in found) and sum(count for _, count in found) == devices:
        return found
    if all(count for _, count in found) and devices % sum(count for _, count in found) == 0:
        times = devices // sum(count for _, count in found)  # counts of a node, or of a part
        return [(entry, count * times) for entry, count in found]
    if devices % len(found):
        raise ValueError(f"{devices} devices of {text!r}: how many of each is not said")
    return [(entry, devices // len(found)) for entry, _ in found]


def _device(text: str) -> tuple[str, str, str, str] | None:
    plain = re.sub(r"[^a-z0-9]", "", re.sub(r"\(.*?\)", "", text.lower()).replace("gb", "g"))
    return next((entry for entry in DEVICES if entry[0] in plain), None)


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
