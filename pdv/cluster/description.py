"""The cluster as plain data: what the planner reads, in SI units, without any file format.

A cluster is groups of equal nodes on a network of switches; in each node are devices, joined by links that may be
groups of groups; wires may join single devices besides. `levels` sums this up, outer to inner, as meshes need it.
Devices are numbered node by node. Which links a set of devices loads is found by `pdv.cluster.routing.route`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

Library = Literal["nccl", "gloo"]  # of collectives, by kind of device
HOST = ("host_link_bytes_per_s", "host_bandwidth_bytes_per_s", "host_memory_bytes")  # of a device, where it is said


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device.

    `efficiency` is the share of `peak_flops` that a large matrix product reaches; `launch_latency_s` is what starting
    one kernel costs when nothing hides it. `share` is the part of the device's time that a process gets while all
    processes of the cluster compute: 1/2 where two take turns on it. What one leaves, others take
    (`Cluster.shares_cores`), but with `quota`. `speed` is that of this very machine over what is known of its kind
    (`pdv.measure.speed`). `host_…` are of its part of the host, 0 where nobody says (`pdv.cluster.host`).
    """

    name: str
    memory_bytes: int
    peak_flops: Mapping[str, float]  # FLOP/s by dtype name: "float32", "bfloat16", ...
    memory_bandwidth_bytes_per_s: float
    launch_latency_s: float
    efficiency: float
    kind: Literal["gpu", "cpu"] = "gpu"
    share: float = 1.0
    quota: bool = False
    host_link_bytes_per_s: float = 0.0
    host_bandwidth_bytes_per_s: float = 0.0
    host_memory_bytes: int = 0
    speed: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops", MappingProxyType(dict(self.peak_flops)))

    def peak(self, dtype: str) -> float:
        """FLOP/s of `dtype`; one that the device does not list is computed in float32, as libraries do."""
        return self.peak_flops.get(dtype, self.peak_flops["float32"])

    @property
    def pace(self) -> float:
        """What a process gets of the speed that is known of this kind of device, while all compute."""
        return self.share * self.speed

    @property
    def host_limit_bytes(self) -> float:
        """What it has of its host's memory; no limit where nobody said."""
        return self.host_memory_bytes or math.inf

    def __reduce__(self) -> tuple[type[Device], tuple[object, ...]]:
        """Pickle by value: a mapping proxy cannot be pickled."""
        values = (self.name, self.memory_bytes, dict(self.peak_flops), self.memory_bandwidth_bytes_per_s)
        host = self.host_link_bytes_per_s, self.host_bandwidth_bytes_per_s, self.host_memory_bytes
        own = self.launch_latency_s, self.efficiency, self.kind, self.share, self.quota
        return Device, (*values, *own, *host, self.speed)

    def __hash__(self) -> int:
        """Equal devices hash alike; the peak rates by their sorted items."""
        return hash((self.name, self.memory_bytes, tuple(sorted(self.peak_flops.items()))))


@dataclass(frozen=True, slots=True)
class Link:
    """What joins the members of one level: the α–β model of one step of a collective.

    `bandwidth_bytes_per_s` counts per device and direction; `latency_s` is the α of each step.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        # cheapest routes are looked for by these: with a negative one there is none, and the search does not end
        possible = self.bandwidth_bytes_per_s > 0 and 0 <= self.latency_s < math.inf
        assert possible, f"no link: {self.name!r}, {self.bandwidth_bytes_per_s!r} bytes/s, {self.latency_s!r} s"


@dataclass(frozen=True, slots=True)
class Level:
    """`size` groups of devices joined by `link`."""

    name: str
    size: int
    link: Link

    def __post_init__(self) -> None:
        assert self.size >= 1, f"no level: {self.name!r} of size {self.size!r}"


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """`count` equal devices."""

    device: Device
    count: int

    def __post_init__(self) -> None:
        one = self.device
        rates = (*one.peak_flops.values(), one.memory_bandwidth_bytes_per_s, one.efficiency, one.share, one.speed)
        possible = self.count >= 1 and one.memory_bytes > 0 and "float32" in one.peak_flops
        possible = possible and all(0 < rate < math.inf for rate in rates)  # times are divided by them
        assert possible, f"no devices: {self.count!r} of {one.name!r}, {one.memory_bytes!r} bytes, rates {rates!r}"


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """`count` equal nodes of `devices` equal devices (of class number `device_class`).

    `inside` are the levels within one node, outer to inner; their sizes multiply to `devices`. `ports` network ports
    carry `uplink_bytes_per_s` together, in each direction (0 where there is no network).
    """

    count: int
    devices: int
    device_class: int
    inside: tuple[Level, ...]
    uplink_bytes_per_s: float = 0.0
    ports: int = 1

    def __post_init__(self) -> None:
        inside = math.prod(level.size for level in self.inside)
        joined = not self.inside or inside == self.devices  # wires alone may join them
        possible = self.count >= 1 and self.devices >= 1 and joined and self.ports >= 1
        assert possible, f"no nodes: {self.count!r} of {self.devices!r} devices, {inside} in levels, {self.ports} ports"


@dataclass(frozen=True, slots=True)
class Tier:
    """One kind of switch of the network: `nodes` nodes are below each.

    What leaves a part below this switch (a node for the lowest, a lower switch for others) has `share` of the network
    ports of the part's nodes: 1/4 where lower switches are oversubscribed 4 to 1. `link` gives name and latency; its
    bandwidth is that of one device of the first nodes while all of them send.
    """

    name: str
    nodes: int
    share: float
    link: Link


@dataclass(frozen=True, slots=True)
class Wire:
    """A link between two ends: a device (`n0.g3`) or a switch (any other name). Bandwidth is of one direction."""

    first: str
    second: str
    link: Link


@dataclass(frozen=True, slots=True)
class Hop:
    """One level that a group crosses: `size` parts of the group, joined by `link` (bandwidth of each device).

    `exchange_bytes_per_s` is what a device reaches when all send to all, where that is not the link's bandwidth.
    """

    size: int
    link: Link
    exchange_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """How a group communicates.

    Attributes:
        link: the α and β of its collectives, while all groups like it run too. Bandwidth is per device, the bus
            bandwidth of nccl-tests: a ring all-reduce of b bytes takes 2 (n - 1) / n · b / bandwidth. Latency is that
            of the slowest step.
        resources: names of the shared links that it loads; two transfers with a name in common contend.
        nodes: how many nodes it spans.
        stages: the levels that it crosses, outer to inner; the sizes multiply to the group's (to more, if the group is
            uneven). The ring's bandwidth is the least over stages of bandwidth times members below.
    """

    link: Link
    resources: tuple[str, ...]
    nodes: int
    stages: tuple[Hop, ...]


@dataclass(frozen=True)
class Cluster:
    """Nodes and network, their sum as levels, the devices by class, and the mesh the user pinned, if any.

    `network` is outer to inner; the last tier is the lowest switch. `rails`: port i of every node leads to switch i.
    `mesh` is (name, size), slow to fast. `places`: which device, by its number in the description, stands at each place
    of plans; empty: each at its own.
    """

    name: str
    levels: tuple[Level, ...]
    classes: tuple[DeviceClass, ...]
    nodes: tuple[NodeGroup, ...]
    network: tuple[Tier, ...] = ()
    rails: bool = False
    wires: tuple[Wire, ...] = ()
    mesh: tuple[tuple[str, int], ...] | None = None
    warnings: tuple[str, ...] = ()
    places: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        in_classes = sum(entry.count for entry in self.classes)
        assert in_classes == self.num_devices, f"{in_classes} devices in classes, {self.num_devices} in levels"
        in_nodes = sum(group.count * group.devices for group in self.nodes)
        assert in_nodes == self.num_devices, f"{in_nodes} devices in nodes, {self.num_devices} in levels"
        of_class = {group.device_class for group in self.nodes}
        assert of_class <= {*range(len(self.classes))}, f"classes {of_class!r} of {len(self.classes)}"
        assert not self.places or sorted(self.places) == list(range(self.num_devices)), f"places {self.places!r}"

    @property
    def num_devices(self) -> int:
        """Devices in the cluster."""
        return math.prod(level.size for level in self.levels)

    @property
    def num_nodes(self) -> int:
        """Nodes in the cluster."""
        return sum(group.count for group in self.nodes)

    @property
    def memory_bytes(self) -> int:
        """Memory of the smallest device: an even plan has to fit there."""
        return min(entry.device.memory_bytes for entry in self.classes)

    @property
    def has_gpus(self) -> bool:
        """Whether any device is a GPU, whose host runs ahead of it."""
        return any(entry.device.kind == "gpu" for entry in self.classes)

    @property
    def library(self) -> Library:
        """What carries out collectives: NCCL among GPUs, gloo where there is a CPU."""
        return "nccl" if all(entry.device.kind == "gpu" for entry in self.classes) else "gloo"

    @property
    def shares_cores(self) -> bool:
        """Whether processes take what others leave of their devices: all have one share of less than 1, and no quota.

        Where shares differ, what gives one process more than another (a quota, a host with fewer processes) keeps what
        it leaves from the others, too.
        """
        devices = [entry.device for entry in self.classes]
        return len({one.share for one in devices}) == 1 and all(one.share < 1.0 and not one.quota for one in devices)

    @property
    def has_quotas(self) -> bool:
        """Whether every process is paused once it has had its share for a while."""
        return all(entry.device.quota and entry.device.share < 1.0 for entry in self.classes)

    @property
    def is_uniform(self) -> bool:
        """Whether nodes are alike, and joined alike."""
        return len(self.nodes) == 1 and not self.wires

    def number_at(self, place: int) -> int:
        """The number, as described, of the device at a place."""
        assert 0 <= place < self.num_devices, f"place {place} of {self.num_devices} devices"
        return self.places[place] if self.places else place

    def class_of(self, place: int) -> int:
        """The class (its index in `classes`) of the device at a place."""
        return self.nodes[bisect.bisect_right(self._group_ends, self.number_at(place))].device_class

    def device_of(self, place: int) -> Device:
        """The device at a place."""
        return self.classes[self.class_of(place)].device

    @cached_property
    def _group_ends(self) -> list[int]:
        return list(itertools.accumulate(group.count * group.devices for group in self.nodes))

    def __getstate__(self) -> dict[str, object]:
        """Pickle the fields alone, without what was computed from them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def with_mesh(self, mesh: Mapping[str, int] | None) -> Cluster:
        """The same cluster with another pinned mesh (axis sizes, slow to fast), or with none."""
        return replace(self, mesh=None if mesh is None else tuple(mesh.items()))

    def keeps_order(self, stages: int) -> bool:
        """Whether each of so many stages has its devices in the order in which they were described.

        Process groups number their members so (`torch.distributed.new_group`).
        """
        size = self.num_devices // stages
        return all(at % size == 0 or one < self.places[at] for at, one in enumerate(self.places[:-1], 1))

    def as_dict(self) -> dict[str, object]:
        """As JSON-ready data: every field, with the totals. `from_dict` is its inverse."""
        return {
            "name": self.name,
            "num_devices": self.num_devices,
            "memory_bytes": self.memory_bytes,
            "levels": [asdict(level) for level in self.levels],
            "classes": [{"device": _device_as_dict(entry.device), "count": entry.count} for entry in self.classes],
            "nodes": [{**asdict(group), "inside": [asdict(level) for level in group.inside]} for group in self.nodes],
            "network": [asdict(tier) for tier in self.network],
            "rails": self.rails,
            "wires": [asdict(wire) for wire in self.wires],
            "mesh": None if self.mesh is None else dict(self.mesh),
            **({"places": list(self.places)} if self.places else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """The inverse of `as_dict` (warnings are left behind).

        Raises:
            LookupError, TypeError, ValueError, AssertionError: if a field is missing or wrong.
        """
        mesh, places = data["mesh"], tuple(int(number) for number in data.get("places", ()))
        nodes = tuple(NodeGroup(**{**entry, "inside": _levels(entry["inside"])}) for entry in data["nodes"])
        if data.get("backwards"):  # as plans said it before they had places: nodes stand from the last to the first
            nodes = nodes[::-1]
            groups = following([group.count * group.devices for group in nodes])
            places = tuple(itertools.chain.from_iterable(groups[::-1]))
        return cls(
            name=str(data["name"]),
            levels=_levels(data["levels"]),
            classes=tuple(DeviceClass(Device(**entry["device"]), int(entry["count"])) for entry in data["classes"]),
            nodes=nodes,
            network=tuple(Tier(**{**entry, "link": Link(**entry["link"])}) for entry in data["network"]),
            rails=bool(data["rails"]),
            wires=tuple(Wire(**{**entry, "link": Link(**entry["link"])}) for entry in data["wires"]),
            mesh=None if mesh is None else tuple(mesh.items()),
            places=places,
        )


def following(sizes: Iterable[int]) -> list[range]:
    """Numbers of devices in parts of these sizes, one behind the other."""
    ends = itertools.accumulate(sizes, initial=0)
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def _levels(entries: Sequence[Mapping[str, Any]]) -> tuple[Level, ...]:  # Any: JSON
    return tuple(Level(entry["name"], entry["size"], Link(**entry["link"])) for entry in entries)


def _device_as_dict(device: Device) -> dict[str, object]:
    return {
        "name": device.name,
        "kind": device.kind,
        "memory_bytes": device.memory_bytes,
        "peak_flops": dict(device.peak_flops),
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
        "launch_latency_s": device.launch_latency_s,
        "efficiency": device.efficiency,
        **({} if device.share == 1.0 else {"share": device.share}),
        **({"quota": True} if device.quota else {}),
        **({} if device.speed == 1.0 else {"speed": device.speed}),
        **{name: value for name in HOST if (value := getattr(device, name))},
    }
