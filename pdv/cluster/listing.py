"""The presets as tables: devices, links, networks, nodes. Entry points: `preset_tables`, `presets_as_dict`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from pdv.cluster.description import Device
from pdv.cluster.nodes import NODES, PresetNode
from pdv.cluster.presets import DEVICES, LINKS
from pdv.cluster.units import COMPUTE, LINK_BANDWIDTH, MEMORY, MEMORY_BANDWIDTH, TIME

NETWORKS = ("ib-", "ethernet-", "efa-", "roce-", "slingshot-", "omni-path-")


def is_network(link: str) -> bool:
    """Whether a preset's link joins nodes."""
    return link.startswith(NETWORKS)


def preset_tables() -> list[tuple[str, dict[str, str]]]:
    """(title, name -> text) of each kind."""
    rates = {
        name: f"{LINK_BANDWIDTH.format(preset.link.bandwidth_bytes_per_s)} a {preset.port_of}, "
        f"{TIME.format(preset.link.latency_s)} a step"
        for name, preset in LINKS.items()
    }
    return [
        ("devices", {name: _device(device) for name, device in DEVICES.items()}),
        ("links inside a node", {name: text for name, text in rates.items() if not is_network(name)}),
        ("networks between nodes", {name: text for name, text in rates.items() if is_network(name)}),
        ("nodes", {name: _node(node) for name, node in NODES.items()}),
    ]


def presets_as_dict() -> dict[str, object]:
    """As JSON-ready data."""
    return {
        "devices": [{**asdict_device(device), "reached": device.efficiency} for device in DEVICES.values()],
        "links": [{**asdict(preset.link), "port_of": preset.port_of} for preset in LINKS.values()],
        "nodes": [asdict(node) for node in NODES.values()],
    }


def asdict_device(device: Device) -> dict[str, object]:
    """A device's rates and sizes."""
    return {
        "name": device.name,
        "kind": device.kind,
        "memory_bytes": device.memory_bytes,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
        "peak_flops": dict(device.peak_flops),
    }


def _device(device: Device) -> str:
    best = max(device.peak_flops, key=lambda dtype: (device.peak_flops[dtype], dtype))
    return (
        f"{MEMORY.format(device.memory_bytes)} at {MEMORY_BANDWIDTH.format(device.memory_bandwidth_bytes_per_s)}, "
        f"{best} {COMPUTE.format(device.peak_flops[best])}, {device.efficiency:.0%} of it reached"
    )


def _node(node: PresetNode) -> str:
    parts = "".join(f" in {part['name']}s of {part['devices']} ({part['link']})," for part in node.parts)
    link = f" over {_name(node.link)}," if node.link is not None else ""
    network = node.network
    ports = "" if network is None else f" {network['ports_per_node']} x {network['preset']}{_own_rate(network)}"
    return f"{node.devices} x {node.device}{link}{parts}{ports}"


def _name(link: str | Mapping[str, object]) -> str:
    return link if isinstance(link, str) else f"{link['preset']}{_own_rate(link)}"


def _own_rate(link: Mapping[str, object]) -> str:
    return f" of {link['bandwidth']}" if "bandwidth" in link else ""
