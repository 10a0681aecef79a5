"""Several inputs as one cluster file's content. Entry point: `combined`.

A node's inside is from `nvidia-smi` or NCCL, hosts from a hostfile or Slurm, switches from Slurm. What no input tells
(which device, which network) is asked for, not guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ir.errors import ClusterError, UsageError
from pdv.cluster.detect.facts import Facts, NodeFacts
from pdv.cluster.detect.joints import inside

Content = dict[str, Any]  # Any: YAML
# ports of these rates (Gb/s) and kinds, by name of an adapter
NETWORKS = {
    (200, True): "ib-hdr",
    (400, True): "ib-ndr",
    (100, True): "ib-edr",
    (56, True): "ib-fdr",
    (800, True): "ib-xdr",
}


def combine_facts(facts: Sequence[Facts], device: str | None, network: str | None) -> tuple[Content, tuple[str, ...]]:
    """A cluster file's content, and notes on what had to be left out.

    Args:
        facts: of each input.
        device: the preset of every device.
        network: the preset of the network, where there are several nodes.

    Raises:
        UsageError: the device or the network is told by nothing, or a thing is told twice.
        ClusterError: inputs that contradict each other.
    """
    nodes = [entry for entry in facts if entry.node is not None]
    for several in (nodes, [entry for entry in facts if entry.switches]):
        if len(several) > 1:
            raise UsageError(f"--from: {several[0].kind} and {several[1].kind} tell the same thing", mend="Give one")
    if device is None:
        raise UsageError("--from: which device this is, the inputs do not tell", mend="Add --device PRESET")
    node = nodes[0].node if nodes else None
    hosts, tiers = _hosts(facts)
    notes = [note for entry in facts for note in entry.notes]
    entries, links = _nodes(node, hosts, device, notes)
    content: Content = {"nodes": entries}
    if sum(entry.get("count", 1) for entry in entries) > 1:
        content["network"] = _network(node, network, tiers, notes)
    if links:
        content["links"] = [dict(link) for link in links]
    return content, tuple(notes)


def _hosts(facts: Sequence[Facts]) -> tuple[list[tuple[str, int]], list[list[list[str]]]]:
    """Hosts with their numbers of devices in the order of the switches, and the switches over these hosts."""
    slots = next((dict(entry.hosts) for entry in facts if entry.hosts and not entry.switches), None)
    tree = next((entry for entry in facts if entry.switches), None)
    if tree is None:
        return list((slots or {}).items()), []
    names = [host for host, _ in tree.hosts]
    if slots is not None:
        lost = sorted(set(slots) - set(names))
        if lost:
            raise ClusterError(
                f"the host {lost[0]} of the hostfile is below no switch", f"Hosts: {', '.join(names)}"[:300]
            )
        names = [name for name in names if name in slots]
    kept = set(names)
    tiers = [[[host for host in switch if host in kept] for switch in tier] for tier in tree.switches]
    return [(name, (slots or {}).get(name, 0)) for name in names], [[s for s in tier if s] for tier in tiers]


def _nodes(
    node: NodeFacts | None, hosts: list[tuple[str, int]], device: str, notes: list[str]
) -> tuple[list[Content], Sequence[Any]]:
    """Entries of `nodes`, neighbours of one size together, and the single links of a node."""
    sizes = [slots or (node.devices if node else 0) for _, slots in hosts] or [node.devices if node else 0]
    if 0 in sizes:
        raise UsageError(
            "--from: how many devices a node has, the inputs do not tell", mend="Add a hostfile with slots"
        )
    found: list[Content] = []
    links: Sequence[Any] = ()
    for size in sizes:
        if found and found[-1]["devices"] == size:
            found[-1]["count"] += 1
            continue
        entry: Content = {"count": 1, "devices": size, "device": device}
        if node is not None and node.devices == size:
            told = inside(node, device)
            entry |= dict(told.node)
            links = told.links
            notes.extend(note for note in told.notes if note not in notes)
        elif size > 1:
            entry["link"] = _usual_link(device)
            notes.append(f"what joins {size} devices in a node is not told; taken as {entry['link']}")
        found.append(entry)
    return found, links


def _usual_link(device: str) -> str:
    from pdv.cluster.nodes import NODES
    from pdv.cluster.presets import host_link

    usual = next((node.link for node in NODES.values() if node.device == device and isinstance(node.link, str)), None)
    return usual or host_link(device)


def _network(node: NodeFacts | None, network: str | None, tiers: list[list[list[str]]], notes: list[str]) -> Content:
    """The network: a preset by name or by its ports, and switches."""
    content: Content = {}
    gigabits = round(node.port_bytes_per_s * 8e-9) if node and node.port_bytes_per_s else 0
    known = NETWORKS.get((gigabits, bool(node and node.infiniband)))
    if network is not None:
        content["preset"] = network
    elif known is not None:
        content["preset"] = known
    elif gigabits:
        content |= {"name": f"network-{gigabits}g", "bandwidth": f"{gigabits} Gb/s", "latency": "25 us"}
    else:
        raise UsageError("--from: which network joins the nodes, the inputs do not tell", mend="Add --network PRESET")
    if node is not None and node.ports:
        content["ports_per_node"] = node.ports
    switches: list[dict[str, int]] = []
    for place, tier in enumerate(tiers):
        sizes = {len(switch) for switch in tier}
        if len(sizes) > 1 or (len(tier) == 1 and place == len(tiers) - 1):
            if len(sizes) > 1:
                notes.append(f"switches of unequal size ({', '.join(map(str, sorted(sizes)))} nodes) are left out")
            break
        size = sizes.pop()
        if size > (switches[-1]["nodes"] if switches else 1):
            switches.append({"nodes": size})
    if switches:
        content["switches"] = switches
        notes.append("oversubscription of switches is not told; taken as none")
    return content
