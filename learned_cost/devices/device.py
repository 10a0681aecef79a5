"""Devices as records: what their makers publish, or ``pdv cluster detect`` measured, each number with its source.

A record is a YAML file in ``learned_cost/devices/``, or in a folder of the user's; adding a device is adding a file.
Decides what a record may say. Entry points: ``record`` for one device, ``load_records`` for all.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ir.errors import DeviceError, did_you_mean
from ir.files.plain_yaml import check_plain, dump_yaml, load_yaml
from ir.files.reading import FileKind, read_text

FOLDER = Path(__file__).parent
# A device's name, and what it is less by: a MIG part of it, as NVIDIA's drivers write it; a limit in watts or MHz.
PART = re.compile(r"(.+)[ -]mig[ -]([1-9]g\.[0-9]{1,3}gb)(?:[+-](?:me|gfx))?", re.ASCII | re.IGNORECASE)
LIMITED = re.compile(r"(.+)-([0-9]{2,4})(w|mhz)", re.ASCII)
SIZED = re.compile(r"(.+)-([0-9]{1,15})(gib|mib|b)", re.ASCII)  # whose memory is said to be of another size
UNITS_OF_SIZE = {"gib": 1 << 30, "mib": 1 << 20, "b": 1}
MEMORY_PARTS = (1 / 8, 1 / 4, 1 / 2, 1.0)  # of memory, its bandwidth and the L2 (NVIDIA, MIG user guide)
RECORD = FileKind(1 << 16, DeviceError, wanted="Give the record of one device")  # which takes 1 KiB

# Dense arithmetic; fp32_matrix where matrix units compute in float32 faster than vector units do.
Dtype = Literal["fp64", "fp32", "fp32_matrix", "tf32", "fp16", "bf16", "fp8", "fp4", "int8", "int4"]


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("is a truth value, not a number")  # pydantic reports ValueErrors by field
    return value


Positive = Annotated[float, BeforeValidator(_number), Field(gt=0.0, lt=1e20, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_number), Field(ge=1, lt=2**63)]
Name = Annotated[str, Field(min_length=1, max_length=80)]


class DeviceRecord(BaseModel):
    """One kind of device, in SI units. What is not known is None (or not in ``peak_flops``), never zero.

    Attributes:
        name: as profiles have it in their column ``gpu``.
        kind: what it is.
        aliases: other names: of presets of ``pdv.cluster``, of drivers (``torch.cuda.get_device_name``).
        vendor, arch, compute_capability, year: as its maker tells.
        sm_count: units that run blocks of threads: SMs, compute units, Xe cores, cores of a CPU.
        fp32_cores: float32 lanes of all of them.
        boost_hz: the clock that peaks are stated at.
        peak_flops: dense FLOP/s (OP/s) by dtype; the vector units' for fp32.
        memory_bytes: of its own memory.
        memory_bandwidth_bytes_per_s: of that memory, nominal.
        l2_bytes: the last cache before memory: a GPU's L2, a CPU's L3.
        shared_memory_bytes_per_sm: the memory next to each unit: a CPU core's own cache.
        tdp_w: power that it is specified for.
        mig: units of each part that it can be cut into, by NVIDIA's name of the part.
        link: what joins it to devices of its node.
        link_bytes_per_s: to devices of its node, per direction.
        host_link_bytes_per_s: to the host.
        internode_bytes_per_s: a device's share of its node's usual network.
        source: where the numbers are from.
        sources: by field, where it is another.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    kind: Literal["gpu", "cpu"]
    aliases: tuple[Name, ...] = ()
    vendor: Name
    arch: Name
    compute_capability: Name | None = None
    year: Annotated[int, Field(ge=1990, le=2100)] | None = None
    sm_count: Count
    fp32_cores: Count | None = None
    boost_hz: Positive | None = None
    peak_flops: dict[Dtype, Positive]
    memory_bytes: Count
    memory_bandwidth_bytes_per_s: Positive
    l2_bytes: Count | None = None
    shared_memory_bytes_per_sm: Count | None = None
    tdp_w: Positive | None = None
    mig: dict[Name, Count] = {}
    link: Name | None = None
    link_bytes_per_s: Positive | None = None
    host_link_bytes_per_s: Positive | None = None
    internode_bytes_per_s: Positive | None = None
    source: Annotated[str, Field(min_length=3)]
    sources: dict[str, str] = {}

    def peak(self, dtype: str) -> float | None:
        """FLOP/s in ``dtype`` (a key of ``peak_flops``), or None: not known, or the device lacks it."""
        return next((rate for name, rate in self.peak_flops.items() if name == dtype), None)

    def to_yaml(self) -> str:
        """As a file that ``read_record`` takes."""
        data = self.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        return dump_yaml(data, allow_unicode=True, width=120)


def record(name: str, folder: Path | None = None) -> DeviceRecord:
    """The record of a name or alias, from ``folder`` or the shipped ones.

    Raises:
        DeviceError: if none has it, or a file is no record.
    """
    if folder is None and (FOLDER / f"{name}.yaml").is_file():
        return _read_shipped(name)
    records = load_records(folder)
    found = find(name, records.values())
    if found is None:
        aliases = {alias for entry in records.values() for alias in entry.aliases}
        raise DeviceError(
            f"no device record is called {name[:80]!r}",
            f"Known: {', '.join(records)}",
            did_you_mean(name, {*records, *aliases}) or "Write one with `pdv cluster detect` and name its folder",
        )
    return found


def find(name: str, records: Iterable[DeviceRecord]) -> DeviceRecord | None:
    """The record that has this name or alias, letter case aside.

    A name may end in ``-500w`` or ``-1200mhz``: a device so limited; in ``-mig-3g.40gb``: that part of one; or in
    ``-70gib``: one of which tensors may fill so much, whose kernels are those of the record and take as long.
    """
    known = {label.casefold(): entry for entry in records for label in (entry.name, *entry.aliases)}
    return _changed(name.casefold(), known)


def _changed(name: str, known: Mapping[str, DeviceRecord]) -> DeviceRecord | None:
    if name in known:
        return known[name]
    if (sized := SIZED.fullmatch(name)) is not None:
        whole = _changed(sized[1], known)
        size = int(sized[2]) * UNITS_OF_SIZE[sized[3]]
        return None if whole is None else whole.model_copy(update={"memory_bytes": size})
    if (part := PART.fullmatch(name)) is not None:
        whole = _changed(part[1], known)
        return None if whole is None or part[2] not in whole.mig else cut_part(whole, part[2])
    if (limit := LIMITED.fullmatch(name)) is None or (whole := _changed(limit[1], known)) is None:
        return None
    if limit[3] == "w":
        return None if whole.tdp_w is None else limit_power(whole, float(limit[2]))
    return None if whole.boost_hz is None else limit_clock(whole, float(limit[2]) * 1e6)


def limit_power(whole: DeviceRecord, watts: float) -> DeviceRecord:
    """The device under a power limit: its clock as the cube root of the power.

    Dynamic power is C V² f, and voltage falls with the clock (Hennessy and Patterson, Computer Architecture, 6th ed.,
    1.5), so a clock f takes power as f³.
    """
    assert whole.tdp_w is not None, "a device whose power is known"
    share = min(1.0, (watts / whole.tdp_w) ** (1 / 3))
    return _slow_down(whole, share, {"name": f"{whole.name}-{watts:.0f}w", "tdp_w": watts})


def limit_clock(whole: DeviceRecord, hertz: float) -> DeviceRecord:
    """The device with its clock locked (``nvidia-smi --lock-gpu-clocks``) to at most what peaks are stated at."""
    assert whole.boost_hz is not None, "a device whose clock is known"
    return _slow_down(whole, min(1.0, hertz / whole.boost_hz), {"name": f"{whole.name}-{hertz / 1e6:.0f}mhz"})


def _slow_down(whole: DeviceRecord, share: float, changed: Mapping[str, object]) -> DeviceRecord:
    """The device at a share of its clock, and of all its peak rates. Memory keeps its own clock."""
    clock = None if whole.boost_hz is None else whole.boost_hz * share
    peaks = {dtype: rate * share for dtype, rate in whole.peak_flops.items()}
    return whole.model_copy(update={"aliases": (), "boost_hz": clock, "peak_flops": peaks, **changed})


def cut_part(whole: DeviceRecord, profile: str) -> DeviceRecord:
    """A MIG part: its units at their full clock, and its slices of memory, each with bandwidth and L2 of its own.

    What is joined to the host and the network is common; a part is taken to get as much of it as of memory. Parts
    reach each other through the host alone (NVIDIA, MIG user guide: no peer-to-peer, over PCIe or NVLink).
    """
    units, gigabytes = whole.mig[profile], int(profile.partition(".")[2].removesuffix("gb"))
    wanted = gigabytes * 2**30 / whole.memory_bytes
    memory = min(MEMORY_PARTS, key=lambda share: abs(math.log(share / wanted)))
    share = units / whole.sm_count

    def of(value: float | None, part: float) -> float | None:
        return None if value is None else value * part

    changed = {
        "name": f"{whole.name}-mig-{profile}", "aliases": (), "mig": {}, "sm_count": units,
        "fp32_cores": None if whole.fp32_cores is None else whole.fp32_cores * units // whole.sm_count,
        "peak_flops": {dtype: rate * share for dtype, rate in whole.peak_flops.items()},
        "memory_bytes": int(whole.memory_bytes * memory),
        "memory_bandwidth_bytes_per_s": whole.memory_bandwidth_bytes_per_s * memory,
        "l2_bytes": None if whole.l2_bytes is None else int(whole.l2_bytes * memory),
        "tdp_w": of(whole.tdp_w, share), "link": None, "link_bytes_per_s": None,
        "host_link_bytes_per_s": of(whole.host_link_bytes_per_s, memory),
        "internode_bytes_per_s": of(whole.internode_bytes_per_s, memory),
    }  # fmt: skip
    return whole.model_copy(update=changed)


def load_records(folder: Path | None = None) -> dict[str, DeviceRecord]:
    """All shipped records by name, in order of their names; those of ``folder`` replace and extend them.

    Raises:
        DeviceError: if ``folder`` is none, a file is no record, or two records of it share a name.
    """
    records = {path.stem: _read_shipped(path.stem) for path in sorted(FOLDER.glob("*.yaml"))}
    if folder is None:
        return records
    if not folder.is_dir():
        raise DeviceError(f"{folder} is no folder", "Allowed: a folder of device records, NAME.yaml")
    own: dict[str, Path] = {}
    for path in sorted(folder.glob("*.yaml")):
        entry = read_record(path)
        if entry.name in own:
            raise DeviceError(f"{path}: name {entry.name!r} is taken by {own[entry.name]}", mend="Rename one of them")
        own[entry.name] = path
        records[entry.name] = entry
    return records


def read_record(path: Path) -> DeviceRecord:
    """The record in a file.

    Raises:
        DeviceError: naming file, field and mend, if it cannot be read or says what no record may.
    """
    text = read_text(path, RECORD)
    try:
        if path.parent != FOLDER:
            check_plain(text, str(path), DeviceError, "Write plain values")
        data = load_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise DeviceError(f"{path} is not valid YAML ({reason})", mend="Mend the syntax") from error
    if not isinstance(data, dict):
        raise DeviceError(f"{path} holds no record", "Allowed: fields as in learned_cost/devices/*.yaml")
    try:
        return DeviceRecord.model_validate(data)
    except ValidationError as error:
        raise _explain(path, error) from error


@functools.cache
def _read_shipped(name: str) -> DeviceRecord:
    entry = read_record(FOLDER / f"{name}.yaml")
    assert entry.name == name, f"devices/{name}.yaml calls itself {entry.name}"
    return entry


def _explain(path: Path, error: ValidationError) -> DeviceError:
    """The first fault as file, field, what is allowed and the mend."""
    first = error.errors()[0]
    place = ".".join(str(step) for step in first["loc"]) or "the record"
    fields = sorted(DeviceRecord.model_fields)
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(place, fields) or "Remove it"
        return DeviceError(f"{path}: there is no field {place!r}", f"Fields: {', '.join(fields)}", hint)
    if first["type"] == "missing":
        return DeviceError(f"{path}: field {place!r} is missing", mend="Add it; learned_cost/devices has examples")
    given = repr(first["input"])[:60]
    reason = first["msg"].removeprefix("Value error, ")
    return DeviceError(f"{path}: field {place!r} is {given}: {reason}", mend="Write a plain value in SI units")
