"""What a cluster file may say, as pydantic models, and how devices and links become plain data of `description`.

    nodes:
      - {count: 2, devices: 8, device: a100-80gb-sxm, link: nvlink3}
    network: ib-hdr
    mesh: {node: 2, gpu: 8}      # optional: pin the mesh, slow axis first

A preset's name stands for a mapping; a mapping may start from a preset and change some of it. How the parts fit
together is `build`'s; docs/clusters.md shows every key.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StrictBool, StrictStr, model_validator

from pdv.cluster.description import Device, Link
from pdv.cluster.fields import (
    MAX_COUNT,
    AxisName,
    Count,
    Name,
    Spec,
    dtype,
    first,
    from_preset,
    quantity_of,
    require,
)
from pdv.cluster.names import preset_of
from pdv.cluster.nodes import NODES
from pdv.cluster.presets import DEVICES, LINKS, change_preset, name_size, split_part
from pdv.cluster.units import (
    CLOCK,
    COMPUTE,
    LINK_BANDWIDTH,
    MEMORY,
    MEMORY_BANDWIDTH,
    POWER,
    TIME,
    ValueProblem,
    shorten,
)

__all__ = ["MAX_COUNT", "ClusterSpec", "DeviceSpec", "LinkSpec", "NetworkSpec", "NodeSpec", "PartSpec", "WireSpec"]

LIMITS = frozenset({"power", "clock", "mig"})  # by which the name of a device says how it is less than a whole one
END = re.compile(r"n(\*|[0-9]{1,6})\.g([0-9]{1,6})|[a-z][a-z0-9_-]{0,31}", re.ASCII)


class DeviceSpec(Spec):
    """A device: a preset, or a description, or a preset with changes.

    Attributes:
        preset: the name of a device that ships; what else is given changes it.
        name: of one that is described.
        kind: what it is; a preset knows.
        memory: what tensors may fill.
        memory_bandwidth: of its own memory, nominal.
        peak: dense rates by dtype; float32 at least.
        launch_latency: from issuing a kernel to its start.
        efficiency: the share of the peak that large products reach.
        power: limits a preset: its clock falls with the cube root.
        clock: limits a preset: its peak rates fall with it.
        mig: cuts a preset: NVIDIA's name of the part, which is then a device of its own.
        share: the part of its time that one process gets while all compute.
        quota: whether that share is enforced by pausing it.
        speed: of this machine, over what is known of such devices (`pdv cluster detect` measures it).
        host_link: to its host's memory, in one direction, as it is reached (default: 0.8 of its record's).
        host_bandwidth: of the host's memory, its part.
        host_memory: of the host, its part: a limit of what is offloaded (default: none).
    """

    preset: StrictStr | None = None
    name: Name | None = None
    kind: Literal["gpu", "cpu"] | None = None
    memory: Annotated[float, quantity_of(MEMORY)] | None = None
    peak: dict[Annotated[str, BeforeValidator(dtype)], Annotated[float, quantity_of(COMPUTE)]] | None = None
    memory_bandwidth: Annotated[float, quantity_of(MEMORY_BANDWIDTH)] | None = None
    launch_latency: Annotated[float, quantity_of(TIME)] | None = None
    efficiency: Annotated[float, Field(ge=0.001, le=1.0, allow_inf_nan=False, strict=True)] | None = None
    power: Annotated[float, quantity_of(POWER)] | None = None
    clock: Annotated[float, quantity_of(CLOCK)] | None = None
    mig: StrictStr | None = None
    share: Annotated[float, Field(ge=0.001, le=1.0, allow_inf_nan=False, strict=True)] = 1.0
    quota: Annotated[bool, Field(strict=True)] = False
    speed: Annotated[float, Field(ge=0.001, le=100.0, allow_inf_nan=False, strict=True)] = 1.0
    host_link: Annotated[float, quantity_of(LINK_BANDWIDTH)] | None = None
    host_bandwidth: Annotated[float, quantity_of(MEMORY_BANDWIDTH)] | None = None
    host_memory: Annotated[float, quantity_of(MEMORY)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, value: object) -> object:
        return from_preset(_name_part(value), DEVICES, "device")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        self._base()
        if self.preset is None:
            require(self, ("name", "memory", "peak", "memory_bandwidth", "launch_latency", "efficiency"), "device")
            if "float32" not in (self.peak or {}):
                raise ValueProblem(
                    "the device's peak lacks float32", mend="Add `float32: ... TFLOP/s`; other dtypes fall back to it"
                )
        return self

    def _base(self) -> Device | None:
        """The preset, limited and cut as the file says.

        Raises:
            ValueProblem: nothing is known of what is limited or cut.
        """
        limits = {name: getattr(self, name) for name in sorted(LIMITS) if getattr(self, name) is not None}
        base = DEVICES.get(self.preset or "")
        if base is None and limits:
            raise ValueProblem(f"`{next(iter(limits))}` limits a preset", mend="Describe the device as it is then")
        return base if base is None or not limits else change_preset(base, self.power, self.clock, self.mig)

    def build(self) -> Device:
        """As plain data, the preset's values where the file gives none.

        The name says by which record kernels are priced: of another size of memory that of the preset, of other rates
        none.
        """
        base = self._base()
        name = self.name or (base and self._name_of(base))

        def pick(own: Any, field: str) -> Any:  # a field's type differs from field to field
            return own if own is not None else getattr(base, field)

        return Device(
            name=str(name),
            memory_bytes=int(pick(self.memory, "memory_bytes")),
            peak_flops={**(base.peak_flops if base else {}), **(self.peak or {})},
            memory_bandwidth_bytes_per_s=pick(self.memory_bandwidth, "memory_bandwidth_bytes_per_s"),
            launch_latency_s=pick(self.launch_latency, "launch_latency_s"),
            efficiency=pick(self.efficiency, "efficiency"),
            kind=self.kind or (base.kind if base else "gpu"),
            share=self.share,
            quota=self.quota,
            speed=self.speed,
            host_link_bytes_per_s=self.host_link or 0.0,
            host_bandwidth_bytes_per_s=self.host_bandwidth or 0.0,
            host_memory_bytes=int(self.host_memory or 0),
        )

    def _name_of(self, base: Device) -> str:
        """That of a preset with what is said of it otherwise; what repeats its values changes nothing."""
        rates = (
            (self.memory_bandwidth, base.memory_bandwidth_bytes_per_s),
            (self.launch_latency, base.launch_latency_s),
            (self.efficiency, base.efficiency),
            (self.kind, base.kind),
            *((rate, base.peak_flops.get(name)) for name, rate in (self.peak or {}).items()),
        )
        if any(own is not None and own != known for own, known in rates):
            return f"{base.name}-changed"
        return base.name if self.memory in {None, base.memory_bytes} else name_size(base.name, int(self.memory))


def _name_part(value: object) -> object:
    """A MIG part as its driver calls it (``NVIDIA H100 80GB HBM3 MIG 3g.40gb``), as a preset and its part."""
    named = {"preset": value} if isinstance(value, str) else value
    if not isinstance(named, dict) or not isinstance(named.get("preset"), str):
        return value
    part = split_part(named["preset"])
    return value if part is None else {"mig": part[1]} | named | {"preset": part[0]}


class RateSpec(Spec):
    """What links and networks are both described by: a preset, or a rate and a latency of one's own.

    Attributes:
        preset: the name of a link that ships; what else is given changes it.
        name: of one that is described.
        bandwidth: in one direction.
        latency: of one message.
    """

    preset: StrictStr | None = None
    name: Name | None = None
    bandwidth: Annotated[float, quantity_of(LINK_BANDWIDTH)] | None = None
    latency: Annotated[float, quantity_of(TIME)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, value: object) -> object:
        return from_preset(value, LINKS, "link")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.preset is None:
            require(self, ("name", "bandwidth", "latency"), "link")
        return self


class LinkSpec(RateSpec):
    """A link inside a node: bandwidth per device and direction, or of `ports` that the devices of a part share.

    Attributes:
        ports: that many are shared by the devices of a part.
    """

    ports: Count | None = None

    def build(self, devices: int = 1) -> Link:
        """As plain data, as seen by one of the `devices` of a part while all of them send."""
        link = _link(self)
        if self.ports is None:
            return link
        return Link(link.name, link.bandwidth_bytes_per_s * self.ports / devices, link.latency_s)


class SwitchSpec(Spec):
    """A kind of switch: `nodes` nodes are below each; what leaves it has 1/`oversubscription` of what enters below.

    Attributes:
        name: of the mesh's level that it makes.
        nodes: below one such switch.
        oversubscription: bandwidth below over bandwidth above.
        latency: that it adds to a message which passes it.
    """

    name: AxisName | None = None
    nodes: Count
    oversubscription: Annotated[float, Field(ge=1.0, le=1024.0, allow_inf_nan=False)] = 1.0
    latency: Annotated[float, quantity_of(TIME)] | None = None


class NetworkSpec(RateSpec):
    """The link between nodes: bandwidth per port and direction, how many ports a node has, and switches from below.

    Without `ports_per_node`, an InfiniBand preset has a port for each device, anything else one for the node.

    Attributes:
        ports_per_node: shared by the devices of a node.
        rails: whether devices of equal number in their nodes have switches of their own.
        switches: from the nodes up.
    """

    ports_per_node: Count | None = None
    rails: StrictBool = False
    switches: Annotated[list[SwitchSpec], Field(min_length=1, max_length=4)] | None = None

    def build(self) -> Link:
        """One port, as plain data."""
        return _link(self)

    def ports_of(self, devices_per_node: int) -> int:
        """Ports of a node with so many devices."""
        per_device = self.preset is not None and LINKS[self.preset].port_of == "device"
        return self.ports_per_node or (devices_per_node if per_device else 1)


def _link(spec: RateSpec) -> Link:
    base = LINKS[spec.preset].link if spec.preset else None
    changed = spec.bandwidth is not None or spec.latency is not None
    return Link(
        name=str(spec.name or (f"{spec.preset}-changed" if changed else spec.preset)),
        bandwidth_bytes_per_s=first(spec.bandwidth, base.bandwidth_bytes_per_s if base else None),
        latency_s=first(spec.latency, base.latency_s if base else None),
    )


class PartSpec(Spec):
    """Equal parts of a node, of `devices` each, inside which `link` joins.

    Attributes:
        name: of the mesh's level that it makes.
        devices: of one part.
        link: among them.
    """

    name: AxisName | None = None
    devices: Count
    link: LinkSpec


class NodeSpec(Spec):
    """`count` equal nodes: `parts`, outer to inner, are closer groups of devices; `link` joins the outermost.

    Attributes:
        preset: the name of a node that ships, with its devices, link and network.
        count: of such nodes.
        devices: of one node.
        device: what each of them is.
        link: among the devices of a node, or among its parts.
        parts: closer groups, from the largest to the smallest.
    """

    preset: StrictStr | None = None
    count: Count = 1
    devices: Count
    device: DeviceSpec
    link: LinkSpec | None = None
    parts: Annotated[list[PartSpec], Field(min_length=1, max_length=3)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, value: object) -> object:
        named = from_preset(value, NODES, "node")
        assert isinstance(named, dict), "as from_preset returns it"
        preset = NODES.get(str(named.get("preset")))
        if preset is None:
            return named
        known = {"devices": preset.devices, "device": preset.device, "link": preset.link}
        if preset.parts and not {"devices", "link"} & set(named):
            known["parts"] = [dict(part) for part in preset.parts]
        return known | named

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        around = self.devices
        for part in self.parts or ():
            if part.devices >= around or around % part.devices or part.devices == 1:
                raise ValueProblem(
                    f"parts of {part.devices} devices in {around}",
                    "Allowed: each part's devices divide those around it, and are fewer",
                    "Write parts from the largest to the smallest",
                )
            around = part.devices
        return self


class WireSpec(Spec):
    """A link between two ends: devices as `n0.g3` (`n*.g3`: in every node) or switches by any name.

    Attributes:
        between: its two ends.
        link: what it is.
    """

    between: Annotated[list[StrictStr], Field(min_length=2, max_length=2)]
    link: LinkSpec

    @model_validator(mode="after")
    def _ends(self) -> Self:
        for end in self.between:
            if not END.fullmatch(end):
                raise ValueProblem(
                    f"{shorten(end)} is no end of a link",
                    "Allowed: a device such as n0.g3 or n*.g3, or a switch's name",
                )
        if self.between[0] == self.between[1]:
            raise ValueProblem(f"a link from {shorten(self.between[0])} to itself", mend="Name two ends")
        return self


class ClusterSpec(Spec):
    """The whole file.

    Attributes:
        name: of the cluster (default: the file's).
        nodes: all of them, in the order of ranks.
        network: among nodes, where there is more than one.
        links: further ones, or all, where the levels above do not say how devices are joined.
        mesh: the axes to plan on, slow to fast (default: what the search finds).
    """

    name: Name | None = None
    nodes: Annotated[list[NodeSpec], Field(min_length=1)]
    network: NetworkSpec | None = None
    links: Annotated[list[WireSpec], Field(min_length=1)] | None = None
    mesh: dict[AxisName, Count] | None = None

    @model_validator(mode="before")
    @classmethod
    def _network(cls, value: Any) -> Any:  # Any: pydantic's "before"
        """The network that a node's preset comes with, where the file names none."""
        nodes = value.get("nodes") if isinstance(value, dict) else None
        if not isinstance(nodes, list) or "network" in value:
            return value
        names = [node.get("preset") if isinstance(node, dict) else node for node in nodes]
        presets = [preset_of(name, NODES) for name in names if isinstance(name, str)]
        known = [NODES[name].network for name in presets if name is not None]
        return value | {"network": known[0]} if known and known[0] is not None else value
