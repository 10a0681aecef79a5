"""From a node's NVLinks and sockets to `link`, `parts` and `links` of a cluster file. Entry point: `inside`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdv.cluster.detect.facts import NodeFacts, Pair
from pdv.cluster.presets import LINKS, host_link
from pdv.cluster.units import TIME

# NVLink of a device by its name's beginning: preset, and GB/s a direction of one link (vendor data sheets)
GENERATIONS: tuple[tuple[str, str, float], ...] = (
    ("p100", "nvlink1", 20.0), ("v100", "nvlink2", 25.0), ("h800", "nvlink4-h800", 25.0), ("a100", "nvlink3", 25.0),
    ("a40", "nvlink3-bridge", 14.0625), ("rtx-a6000", "nvlink3-bridge", 14.0625),
    ("rtx-3090", "nvlink3-bridge", 14.0625), ("h", "nvlink4", 25.0), ("gh200", "nvlink4", 25.0),
    ("b", "nvlink5", 50.0), ("gb", "nvlink5", 50.0),
)  # fmt: skip
REACHED = 0.8  # of the sheet's rate, as `presets` takes it for NVLink2


@dataclass(frozen=True, slots=True)
class Inside:
    """Keys of a node, single links of every node, and what could not be told."""

    node: Mapping[str, Any]  # Any: YAML
    links: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


def inside(facts: NodeFacts, device: str) -> Inside:
    """What joins the devices of a node of this kind of device (a preset's name)."""
    size, pcie = facts.devices, host_link(device)
    if size == 1:
        return Inside({"devices": 1})
    preset, single = next(
        ((preset, rate) for start, preset, rate in GENERATIONS if device.startswith(start)), ("nvlink2", 25.0)
    )
    if facts.switched:
        return Inside({"devices": size, "link": preset})
    island = _islands(facts)
    if island is None:
        links = tuple(
            {"between": [f"n*.g{first}", f"n*.g{second}"], "link": _wire(preset, count, single)}
            for (first, second), count in sorted(facts.nvlinks.items())
        )
        return Inside({"devices": size} if _all_reached(facts) else {"devices": size, "link": pcie}, links)
    nvlink = _bundle(preset, max(facts.nvlinks.values(), default=0) * (island - 1) * single)
    if island == size:
        return Inside({"devices": size, "link": nvlink})
    parts: list[Mapping[str, Any]] = []
    around = size
    in_order = _in_order(facts.sockets)
    if in_order and 1 < len(facts.sockets[0]) < size and len(facts.sockets[0]) >= island:
        around = len(facts.sockets[0])
        parts.append({"name": "socket", "devices": around, "link": nvlink if island == around else pcie})
    if 1 < island < around:
        parts.append({"name": "pair" if island == 2 else "island", "devices": island, "link": nvlink})
    outer = {"preset": "socket", "ports": 1} if around < size else pcie
    node = {"devices": size, "link": outer} | ({"parts": parts} if parts else {})
    notes = () if in_order else ("sockets whose GPUs are not numbered one after the other are taken as one",)
    return Inside(node, notes=notes)


def _bundle(preset: str, gigabytes: float) -> Any:  # Any: YAML
    """A preset, if its rate is about that of these links; else what they reach."""
    rate = gigabytes * REACHED
    known = LINKS[preset].link.bandwidth_bytes_per_s / 1e9
    return preset if abs(rate / known - 1) < 0.25 else {"preset": preset, "bandwidth": f"{rate:.4g} GB/s"}


def _wire(preset: str, count: int, single: float) -> dict[str, str]:
    """`count` NVLinks between two devices."""
    latency = TIME.format(LINKS[preset].link.latency_s)
    return {"name": f"{preset}-x{count}", "bandwidth": f"{count * single * REACHED:.4g} GB/s", "latency": latency}


def _islands(facts: NodeFacts) -> int | None:
    """Size of equal groups, of neighbours by number, all joined by the same NVLinks (1: there are none); else None."""
    if not facts.nvlinks:
        return 1
    size = 1 + max((second for first, second in facts.nvlinks if first == 0), default=0)
    wanted: set[Pair] = {
        (start + first, start + second)
        for start in range(0, facts.devices, size)
        for first in range(size)
        for second in range(first + 1, size)
    }
    alike = len(set(facts.nvlinks.values())) == 1 and wanted == set(facts.nvlinks)
    return size if alike else None


def _in_order(sockets: tuple[tuple[int, ...], ...]) -> bool:
    """Equal sockets of neighbours by number."""
    size = len(sockets[0])
    return all(socket == tuple(range(place * size, (place + 1) * size)) for place, socket in enumerate(sockets))


def _all_reached(facts: NodeFacts) -> bool:
    """Whether NVLinks alone join all devices."""
    reached, todo = {0}, [0]
    while todo:
        here = todo.pop()
        for pair in facts.nvlinks:
            other = pair[1] if pair[0] == here else pair[0] if pair[1] == here else here
            if other not in reached:
                reached.add(other)
                todo.append(other)
    return len(reached) == facts.devices
