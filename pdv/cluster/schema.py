"""What a cluster file may say, as pydantic models, and how each part becomes plain data of `description`.

    nodes:
      - {count: 2, devices: 8, device: a100-80gb-sxm, link: nvlink3}
    network: ib-hdr
    mesh: {node: 2, gpu: 8}      # optional: pin the mesh, slow axis first

A preset's name stands for a mapping; a mapping may start from a preset and change some of it.
"""

from __future__ import annotations

import keyword
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr, model_validator

from pdv.cluster.description import Device, Link
from pdv.cluster.presets import DEVICES, LINKS
from pdv.cluster.suggest import did_you_mean
from pdv.cluster.units import (
    COMPUTE,
    LINK_BANDWIDTH,
    MEMORY,
    MEMORY_BANDWIDTH,
    TIME,
    Problem,
    Quantity,
    shorten,
)

MAX_COUNT = 2**16  # nodes of a kind, devices of a node
DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.+-]{0,63}", re.ASCII)
AXIS_NAME = re.compile(r"[a-z][a-z0-9_]{0,15}", re.ASCII)


def _name(value: object) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise Problem(f"{shorten(value)} is no name", "Allowed: up to 64 letters, digits, spaces and any of _ . + -")
    return value


def _axis_name(value: object) -> str:
    if not isinstance(value, str) or not AXIS_NAME.fullmatch(value) or keyword.iskeyword(value):
        raise Problem(
            f"{shorten(value)} is no axis name",
            "Allowed: up to 16 lower-case letters, digits and _, no Python keyword, as the emitted program uses it",
        )
    return value


def _dtype(value: object) -> str:
    if value not in DTYPES:
        raise Problem(
            f"{shorten(value)} is no dtype", f"Allowed: {', '.join(DTYPES)}", did_you_mean(str(value), DTYPES)
        )
    return str(value)


def _quantity(quantity: Quantity) -> BeforeValidator:
    return BeforeValidator(quantity.parse)


Name = Annotated[str, BeforeValidator(_name)]
Count = Annotated[StrictInt, Field(ge=1, le=MAX_COUNT)]


class _Spec(BaseModel):
    """Every mapping of the file: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _from_preset(value: object, presets: dict[str, Any], kind: str) -> object:
    """A preset's bare name as a mapping; unknown preset names are refused in both forms."""
    named = {"preset": value} if isinstance(value, str) else value
    if not isinstance(named, dict):
        raise Problem(
            f"{shorten(value)} is no {kind}", f"Allowed: a preset's name or a mapping that describes the {kind}"
        )
    preset = named.get("preset")
    if preset is not None and (not isinstance(preset, str) or preset not in presets):
        names = sorted(presets)
        hint = did_you_mean(str(preset), names) or "Describe it by a mapping instead"
        raise Problem(f"there is no {kind} preset {shorten(preset)}", f"Presets: {', '.join(names)}", hint)
    return named


def _require(spec: BaseModel, fields: tuple[str, ...], kind: str) -> None:
    missing = [field for field in fields if getattr(spec, field) is None]
    if missing:
        raise Problem(f"the {kind} lacks {', '.join(missing)}", mend="Add it, or start from a preset by `preset: NAME`")


class DeviceSpec(_Spec):
    """A device: a preset, or a description, or a preset with changes."""

    preset: StrictStr | None = None
    name: Name | None = None
    kind: Literal["gpu", "cpu"] | None = None
    memory: Annotated[float, _quantity(MEMORY)] | None = None
    peak: dict[Annotated[str, BeforeValidator(_dtype)], Annotated[float, _quantity(COMPUTE)]] | None = None
    memory_bandwidth: Annotated[float, _quantity(MEMORY_BANDWIDTH)] | None = None
    launch_latency: Annotated[float, _quantity(TIME)] | None = None
    efficiency: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False, strict=True)] | None = None
    share: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False, strict=True)] = 1.0

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, value: object) -> object:
        return _from_preset(value, DEVICES, "device")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.preset is None:
            _require(self, ("name", "memory", "peak", "memory_bandwidth", "launch_latency", "efficiency"), "device")
            if "float32" not in (self.peak or {}):
                raise Problem(
                    "the device's peak lacks float32", mend="Add `float32: ... TFLOP/s`; other dtypes fall back to it"
                )
        return self

    def build(self) -> Device:
        """As plain data, the preset's values where the file gives none."""
        base = DEVICES.get(self.preset or "")
        changed = bool(self.model_fields_set - {"preset", "name", "share"})
        name = self.name or (f"{self.preset}-changed" if changed else self.preset)

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
        )


class LinkSpec(_Spec):
    """A link inside a node: bandwidth per device and direction."""

    preset: StrictStr | None = None
    name: Name | None = None
    bandwidth: Annotated[float, _quantity(LINK_BANDWIDTH)] | None = None
    latency: Annotated[float, _quantity(TIME)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, value: object) -> object:
        return _from_preset(value, LINKS, "link")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.preset is None:
            _require(self, ("name", "bandwidth", "latency"), "link")
        return self

    def build(self) -> Link:
        """As plain data."""
        base = LINKS[self.preset].link if self.preset else None
        changed = self.bandwidth is not None or self.latency is not None
        return Link(
            name=str(self.name or (f"{self.preset}-changed" if changed else self.preset)),
            bandwidth_bytes_per_s=_first(self.bandwidth, base.bandwidth_bytes_per_s if base else None),
            latency_s=_first(self.latency, base.latency_s if base else None),
        )


class NetworkSpec(LinkSpec):
    """The link between nodes: bandwidth per port and direction, and how many ports a node has.

    Without `ports_per_node`, an InfiniBand preset has a port for each device, anything else one for the node.
    """

    ports_per_node: Count | None = None

    def ports_of(self, devices_per_node: int) -> int:
        """Ports of a node with so many devices."""
        per_device = self.preset is not None and LINKS[self.preset].port_of == "device"
        return self.ports_per_node or (devices_per_node if per_device else 1)


class NodeSpec(_Spec):
    """`count` equal nodes."""

    count: Count = 1
    devices: Count
    device: DeviceSpec
    link: LinkSpec | None = None

    @model_validator(mode="after")
    def _linked(self) -> Self:
        if self.devices > 1 and self.link is None:
            raise Problem(
                f"{self.devices} devices in a node, but no link between them",
                mend="Add `link: PRESET`, for instance nvlink3 or pcie4",
            )
        return self


class ClusterSpec(_Spec):
    """The whole file."""

    name: Name | None = None
    nodes: Annotated[list[NodeSpec], Field(min_length=1)]
    network: NetworkSpec | None = None
    mesh: dict[Annotated[str, BeforeValidator(_axis_name)], Count] | None = None


def _first(own: float | None, base: float | None) -> float:
    value = own if own is not None else base
    assert value is not None, "a spec without preset is complete"
    return value
