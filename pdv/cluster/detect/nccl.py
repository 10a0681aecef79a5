"""NCCL's topology XML, as NCCL_TOPO_DUMP_FILE writes it. Entry point: `topology_xml`.

A tree: cpu (a socket) > pci (bridges, then the device) > gpu with its nvlinks, or nic with its nets (src/graph/xml.cc
of NCCL writes it).
"""

from __future__ import annotations

import xml.etree.ElementTree as ET

from ir.errors import ClusterError
from pdv.cluster.detect.facts import Facts, NodeFacts, Pair

SWITCH_CLASS = "0x068000"  # PCI class of an NVSwitch, as the target of an nvlink
MAX_CHARACTERS = 2**22


def topology_xml(text: str, name: str) -> Facts:
    """The facts of a dump.

    Raises:
        ClusterError: not XML, entities in it, or no GPU.
    """
    if len(text) > MAX_CHARACTERS or "<!" in text.replace("<!--", ""):
        raise ClusterError(f"{name}: entities, document types and more than 4 MiB are not allowed in the XML")
    try:
        root = ET.fromstring(text)  # noqa: S314  # declarations, which could expand, are refused above
    except ET.ParseError as error:
        raise ClusterError(f"{name}: not valid XML ({error})", mend="Give what NCCL_TOPO_DUMP_FILE wrote") from error
    gpus: list[tuple[int, str, int, ET.Element]] = []  # number, bus, socket, element
    nets: list[ET.Element] = []
    for socket, cpu in enumerate(root.iter("cpu")):
        for pci in cpu.iter("pci"):
            gpus += [(int(gpu.get("dev", "0")), pci.get("busid", ""), socket, gpu) for gpu in pci.findall("gpu")]
        nets += [net for nic in cpu.iter("nic") for net in nic.findall("net")]
    gpus.sort(key=lambda entry: entry[0])
    if not gpus:
        raise ClusterError(f"{name}: no GPU in the XML", mend="Give what NCCL_TOPO_DUMP_FILE wrote")
    place_of = {bus.lower(): place for place, (_, bus, *_) in enumerate(gpus)}
    links: dict[Pair, int] = {}
    switched = []
    for place, (*_, gpu) in enumerate(gpus):
        through = 0
        for link in gpu.findall("nvlink"):
            other, count = place_of.get(link.get("target", "").lower()), int(link.get("count", "1"))
            if link.get("tclass", "") == SWITCH_CLASS:
                through += count
            elif other is not None and other != place:
                links[min(place, other), max(place, other)] = count
        switched.append(through)
    sockets = [tuple(place for place, entry in enumerate(gpus) if entry[2] == number) for number in range(64)]
    speeds = {int(net.get("speed", "0")) for net in nets}
    rate = min(speeds) * 1e6 / 8 if speeds and min(speeds) > 0 else None
    infiniband = all(net.get("name", "").startswith("mlx") for net in nets) if nets else None
    node = NodeFacts(
        len(gpus), links, min(switched), tuple(socket for socket in sockets if socket), len(nets), rate, infiniband
    )
    return Facts("NCCL topology", node=node)
