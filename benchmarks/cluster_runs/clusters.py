"""The clusters: hosts, what joins them, and what a device gets of a core; and how each is described to pdv.

Links are described by what they carry: the line rate less what Ethernet, IP and TCP add (3.6 % of 1,500 bytes), with
the latency of one step of gloo's collectives, as the preset ``loopback-gloo`` has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PAYLOAD = 1448 / 1514 * 0.99  # TCP payload of a full Ethernet frame; 1 % for acknowledgements of what flows back
LATENCY = "750 us"  # pdv.cluster.presets, loopback-gloo
CORES = 2
Described = dict[str, Any]  # Any: YAML


@dataclass(frozen=True)
class Cluster:
    """Hosts with so many processes each.

    Attributes:
        rates: Mbit/s of each host's port, None: not shaped.
        pairs: Mbit/s between two hosts where the pairs have links of their own, by the smaller and the larger index.
        shares: of each host: what a process may take of a core, where that is limited.
    """

    name: str
    processes: tuple[int, ...]
    rates: tuple[float | None, ...]
    pairs: dict[tuple[int, int], float] = field(default_factory=dict)
    shares: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """Processes."""
        return sum(self.processes)

    def host_of(self, rank: int) -> int:
        """The host on which a rank runs."""
        return [host for host, count in enumerate(self.processes) for _ in range(count)][rank]

    def share_of(self, host: int) -> float:
        """Of a core, what one process of a host gets while all compute."""
        return self.shares[host] if self.shares else min(1.0, CORES / self.size)

    def describe(self, speed: float = 1.0) -> Described:
        """The content of the cluster file, on a machine of this speed (`pdv.measure.speed`)."""
        if self.pairs:
            return self._pairs_described(speed)
        hosts = len(self.processes)
        nodes = [self._node(host, speed) for host in range(hosts)]
        if hosts == 1:
            return {"name": self.name, "nodes": nodes}
        if len(set(self.rates)) == 1:
            return {"name": self.name, "nodes": _merge(nodes), "network": _link("port", self.rates[0])}
        ports = [
            {"between": [f"n{host}.g0", "switch"], "link": _link(f"port-{rate:g}", rate, "375 us")}
            for host, rate in enumerate(self.rates)
        ]
        return {"name": self.name, "nodes": _merge(nodes), "links": ports}

    def _node(self, host: int, speed: float) -> Described:
        device = self._device(host, speed) | ({"quota": True} if self.shares else {})
        node = {"devices": self.processes[host], "device": device}
        return node | ({"link": "loopback-gloo"} if self.processes[host] > 1 else {})

    def _device(self, host: int, speed: float) -> Described:
        return {"preset": "cpu-core", "share": self.share_of(host), "speed": speed}

    def _pairs_described(self, speed: float) -> Described:
        """Two nodes of two devices, and each pair of devices joined by a link of its own."""
        node = {"count": 2, "devices": 2, "device": self._device(0, speed)}
        place = [f"n{host // 2}.g{host % 2}" for host in range(len(self.processes))]
        links = [
            {"between": [place[a], place[b]], "link": _link(f"pair-{rate:g}", rate)}
            for (a, b), rate in self.pairs.items()
        ]  # fmt: skip
        return {"name": self.name, "nodes": [node], "links": links}


def _link(name: str, mbit: float | None, latency: str = LATENCY) -> Described:
    assert mbit is not None, f"{name} has no rate"
    return {"name": name, "bandwidth": f"{mbit * PAYLOAD:.6g} Mb/s", "latency": latency}


def _merge(nodes: list[Described]) -> list[Described]:
    """Equal nodes as one entry with a count."""
    kinds = [node for i, node in enumerate(nodes) if node not in nodes[:i]]
    return [{"count": nodes.count(kind), **kind} for kind in kinds]


def _two_hosts(name: str, mbit: float, shares: tuple[float, ...] = ()) -> Cluster:
    return Cluster(name, (2, 2), (mbit, mbit), shares=shares)


FAST_PAIRS = {(0, 1): 100.0, (0, 2): 1000.0, (0, 3): 100.0, (1, 2): 100.0, (1, 3): 1000.0, (2, 3): 100.0}
CLUSTERS: dict[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        Cluster("loopback", (4,), (None,)),
        _two_hosts("1gbit", 1000),
        _two_hosts("100mbit", 100),
        Cluster("star", (1, 1, 1, 1), (200, 200, 200, 200)),
        Cluster("slow-member", (1, 1, 1, 1), (50, 400, 400, 400)),
        Cluster("fast-pairs", (1, 1, 1, 1), (None, None, None, None), FAST_PAIRS),
        _two_hosts("unequal", 1000, (0.7, 0.3)),
    )
}
