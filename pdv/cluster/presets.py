"""Devices and links that need no describing, each number with its source.

A device's rates and sizes are those of its record (learned_cost/devices/*.yaml, by name or alias). "sheet" is the
vendor's datasheet of that product. "kernels" and "collectives" are medians over public measurements (NeuSight, Vidur,
AIConfigurator, DeepBench, LLMServingSim, PipeWeave; collected 2026-11): matrix products of more than 1e11 FLOP against
the sheet's peak, and NCCL all-reduce of at least 128 MiB (nccl-tests bus bandwidth) and of at most 16 KiB (latency,
divided by the 2 log2 n steps that `pdv.cost.comm` counts).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ir.errors import did_you_mean
from pdv.cluster.description import Device, Link
from pdv.cluster.units import ValueProblem, shorten

UNDER_LIMIT = "Write `peak` as it is under the limit"

# Host time to queue one eager PyTorch kernel. An assumption: a kernel that the host waits for takes at least 24-31 us
# (kernels, NeuSight, A100 to V100), one behind others in the queue a part of it. Describe a device to set your own.
LAUNCH_S = 5e-6


def _device(name: str, efficiency: float, launch_s: float = LAUNCH_S) -> Device:
    """A preset: the published numbers of its record, and what only the planner's arithmetic needs."""
    return _as_recorded(Device(name, 0, {}, 0.0, launch_s, efficiency))


def _as_recorded(device: Device) -> Device:
    """A device with the rates and sizes of the record of its name."""
    from learned_cost.devices.device import record

    known = record(device.name)
    peaks = {dtype: rate for key, dtype in DTYPES.items() if (rate := known.peak(key)) is not None}
    return replace(
        device, kind=known.kind, memory_bytes=known.memory_bytes, peak_flops=peaks,
        memory_bandwidth_bytes_per_s=known.memory_bandwidth_bytes_per_s,
    )  # fmt: skip


# dtype of a record -> dtype of a plan
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        # efficiency: kernels, DeepBench fp32, median of 50 (the chip has no matrix units; its fp16 reaches 0.46)
        _device("p100-pcie-16gb", 0.94),
        # efficiency: kernels, DeepBench fp16, median of 50
        _device("v100-16gb-sxm", 0.81),
        _device("v100-32gb-sxm", 0.81),
        _device("v100-32gb-pcie", 0.81),
        # efficiency: kernels, DeepBench fp16, median of 50 (a 70 W card: its clock falls under load)
        _device("t4", 0.60),
        # TF32 off as in PyTorch's default; efficiency: kernels, AIConfigurator bf16 linear, median of 2,280
        _device("a100-40gb-sxm", 0.775),
        _device("a100-80gb-sxm", 0.775),
        _device("a100-40gb-pcie", 0.775),
        _device("a100-80gb-pcie", 0.775),
        # efficiency: kernels, Vidur fp16 linear, median of 8,349
        _device("a40", 0.75),
        # efficiency: taken as the A40's (same chip, higher clock; no measurements at hand)
        _device("a10g", 0.75),
        # efficiency: kernels, LLMServingSim bf16 linear, median of 841
        _device("rtx-a6000", 0.73),
        # fp32 accumulation; efficiency: kernels, LLMServingSim bf16 linear, median of 841
        _device("rtx-3090", 0.95),
        # efficiency: no L4 kernels above 1e11 FLOP, taken as the L40S's (same chip family, lower power)
        _device("l4", 0.55),
        # efficiency: kernels, AIConfigurator bf16 linear, median of 5,404
        _device("l40s", 0.55),
        # efficiency: taken as the L40S's (same chip)
        _device("l20", 0.55),
        _device("l40", 0.55),
        _device("rtx-6000-ada", 0.55),
        # fp32 accumulation; efficiency: kernels, LLMServingSim bf16 linear, median of 183
        _device("rtx-4090", 0.97),
        # efficiency: kernels, AIConfigurator bf16 linear, median of 5,423
        _device("rtx-pro-6000-se", 0.81),
        # efficiency: taken as the H200's (same chip)
        _device("h100-80gb-sxm", 0.755),
        _device("h100-94gb-sxm", 0.755),
        _device("h100-96gb-sxm", 0.755),
        _device("h100-94gb-nvl", 0.755),
        _device("h800-sxm-80gb", 0.755),
        _device("gh200-96gb", 0.755),
        # efficiency: kernels, AIConfigurator bf16 linear, median of 5,423
        _device("h200-141gb-sxm", 0.755),
        # efficiency: kernels, PipeWeave fp8 linear, median of 1,852 (a seventh of the H200's peak is easier to reach)
        _device("h20-sxm-96gb", 0.91),
        # efficiency: taken as the H200's (no measurements of Blackwell's large chips at hand)
        _device("b200-sxm-180gb", 0.755),
        _device("b300-sxm-270gb", 0.755),
        _device("gb200", 0.755),
        _device("gb300", 0.755),
        # efficiency: kernels, NeuSight fp32 linear on MI100, median of 637
        _device("mi100", 0.65),
        # efficiency: kernels, LLMCompass fp16 on MI210, median of 11; the others taken as it
        _device("mi210", 0.66),
        _device("mi250-1gcd", 0.66),
        _device("mi250", 0.66),
        _device("mi300x", 0.66),
        # One process on one core (AMD EPYC, PyTorch 2.13, one thread), measured 2026-11-21: 3 us a small operation. The
        # record's peaks are the best of several runs, so efficiency is near one.
        _device("cpu-core", 0.95, 3e-6),
    )
}


def record_labels() -> list[tuple[str, ...]]:
    """What each device with a record is called: its name, and the names of presets, drivers and makers."""
    from learned_cost.devices.device import load_records

    return [(entry.name, *entry.aliases) for entry in load_records().values()]


def record_peaks(name: str) -> Mapping[str, float] | None:
    """Peak rates of a device by its record's dtypes; None where there is no record of that name."""
    from learned_cost.devices.device import find, load_records

    found = find(name, load_records().values())
    return None if found is None else {str(dtype): rate for dtype, rate in found.peak_flops.items()}


def split_part(name: str) -> tuple[str, str] | None:
    """The device and the part that a MIG part's name says (``NVIDIA H100 80GB HBM3 MIG 3g.40gb``), if it is one."""
    from learned_cost.devices.device import PART

    part = PART.fullmatch(name.strip())
    return None if part is None else (part[1], part[2].lower())


def change_preset(device: Device, watts: float | None, hertz: float | None, part: str | None) -> Device:
    """A preset under limits of power and clock, or a MIG part of it, by whose name its record is found.

    Raises:
        ValueProblem: nothing is known of what is changed.
    """
    from learned_cost.devices.device import record

    whole, name = record(device.name), device.name
    if watts is not None:
        if whole.tdp_w is None:
            raise ValueProblem("`power` limits a preset whose full power is known", mend=UNDER_LIMIT)
        name += f"-{watts:.0f}w"
    if hertz is not None:
        if whole.boost_hz is None:
            raise ValueProblem("`clock` limits a preset whose full clock is known", mend=UNDER_LIMIT)
        name += f"-{hertz / 1e6:.0f}mhz"
    if part is not None:
        if part not in whole.mig:
            allowed = f"Allowed: {', '.join(whole.mig)}" if whole.mig else "It has none"
            raise ValueProblem(f"{device.name} has no MIG part {shorten(part)}", allowed, did_you_mean(part, whole.mig))
        name += f"-mig-{part}"
    return _as_recorded(replace(device, name=name))


def name_size(name: str, memory_bytes: int) -> str:
    """The name of a preset with another size of memory, by which its record is found: kernels take as long."""
    for unit, size in (("gib", 1 << 30), ("mib", 1 << 20)):
        if memory_bytes % size == 0:
            return f"{name}-{memory_bytes // size}{unit}"
    return f"{name}-{memory_bytes}b"


@dataclass(frozen=True, slots=True)
class PresetLink:
    """A link with who owns a port of it: each device, or a node whose devices share it."""

    link: Link
    port_of: Literal["device", "node"] = "device"


LINKS: dict[str, PresetLink] = {
    preset.link.name: preset
    for preset in (
        # Inside a node. Bandwidth is what NCCL reaches, not the sheet's.
        # sheet 150 GB/s a direction, times 0.8: on nvlink3 and nvlink4 the share measured is 0.71 and 0.86. Latency as
        # nvlink3, which is also that of other links that nobody measured
        PresetLink(Link("nvlink2", 120e9, 3.6e-6)),
        # collectives, A100 SXM, 8 devices: 212 GB/s of 300; 21.4 us over 6 steps (4 devices: 14.2 us over 4)
        PresetLink(Link("nvlink3", 212e9, 3.6e-6)),
        # collectives, H200 SXM, 8 devices: 385 GB/s of 450; 15.7 us over 6 steps (4 devices: 9.4 us over 4)
        PresetLink(Link("nvlink4", 385e9, 2.6e-6)),
        # sheet 900 GB/s a direction, times the share that nvlink4 reaches; latency as nvlink4
        PresetLink(Link("nvlink5", 770e9, 2.6e-6)),
        # sheet 80 GB/s a direction (P100 SXM2), times 0.8 as for nvlink2; latency as nvlink2
        PresetLink(Link("nvlink1", 64e9, 3.6e-6)),
        # sheet 200 GB/s a direction (H800, A800), times the share that nvlink4 reaches
        PresetLink(Link("nvlink4-h800", 171e9, 2.6e-6)),
        # Two cards by a bridge, A40, A6000, 3090: sheet 56.25 GB/s a direction, times 0.8 as for nvlink2
        PresetLink(Link("nvlink3-bridge", 45e9, 3.6e-6)),
        # Two A100 PCIe by three bridges: collectives, Vidur a100_pairwise, 2 devices: 182 GB/s of 300
        PresetLink(Link("nvlink3-bridge-a100", 182e9, 3.6e-6)),
        # MI250 sheet: 50 GB/s a direction and link, to the next card over one to four of them, times 0.8 as for nvlink2
        PresetLink(Link("xgmi2", 40e9, 3.6e-6)),
        # MI300X sheet: 448 GB/s a direction, times 0.8 as for nvlink2
        PresetLink(Link("xgmi3", 358e9, 3.6e-6)),
        # collectives, TITAN X Pascal, 2 devices, DeepBench; latency as pcie4
        PresetLink(Link("pcie3", 12.2e9, 4e-6)),
        # collectives, L40S, 2 devices: 20 GB/s, 7.7 us over 2 steps (4: 15.3 over 4; 8: 27.7 over 6); 8 devices on two
        # sockets fall to 1.4 GB/s
        PresetLink(Link("pcie4", 20e9, 4e-6)),
        # Between the two sockets of a node, all devices of one together: collectives, Vidur a100_pairwise, 4 devices in
        # two pairs: 23.5 GB/s. What 8 devices reach across sockets may be less (L40S: 1.4 GB/s a device)
        PresetLink(Link("socket", 23.5e9, 4e-6)),
        # collectives, RTX PRO 6000, 8 devices: 22 GB/s (38 with 2); 26.5 us over 6 steps
        PresetLink(Link("pcie5", 22e9, 4.4e-6)),
        # Between nodes. Line rates: what is reached depends on the fabric; measure and describe it where you can.
        # 200 Gb/s; latency: collectives, Vidur send_recv on A100, between nodes less inside one, 8.5-15 us
        PresetLink(Link("ib-hdr", 25e9, 1e-5)),
        # 400 Gb/s; latency as ib-hdr
        PresetLink(Link("ib-ndr", 50e9, 1e-5)),
        # 100 and 56 Gb/s; latency as ib-hdr
        PresetLink(Link("ib-edr", 12.5e9, 1e-5)),
        PresetLink(Link("ib-fdr", 7e9, 1e-5)),
        # 800 Gb/s; latency as ib-hdr
        PresetLink(Link("ib-xdr", 100e9, 1e-5)),
        # HPE Cray Slingshot 11, 200 Gb/s; latency as ib-hdr
        PresetLink(Link("slingshot-11", 25e9, 1e-5)),
        # Intel Omni-Path 100, 100 Gb/s; latency as ib-hdr
        PresetLink(Link("omni-path-100", 12.5e9, 1e-5)),
        # AWS Elastic Fabric Adapter, 100 and 200 Gb/s a port; latency: an assumption, half more than
        # ib-hdr's: its protocol resends in software
        PresetLink(Link("efa-100", 12.5e9, 1.6e-5), port_of="node"),
        PresetLink(Link("efa-200", 25e9, 1.6e-5), port_of="node"),
        # 400 and 200 Gb/s, RoCE; latency as ib-hdr
        PresetLink(Link("roce-400", 50e9, 1e-5)),
        PresetLink(Link("roce-200", 25e9, 1e-5)),
        # 100 Gb/s; latency: collectives, Vidur send_recv on A40, between nodes less inside one, 25 us
        PresetLink(Link("ethernet-100g", 12.5e9, 2.5e-5), port_of="node"),
        # 25 and 10 Gb/s; latency as ethernet-100g
        PresetLink(Link("ethernet-25g", 3.125e9, 2.5e-5), port_of="node"),
        PresetLink(Link("ethernet-10g", 1.25e9, 2.5e-5), port_of="node"),
        # gloo between processes of one machine, 4 ranks on 2 cores, PyTorch 2.13, measured 2026-11-20: an all-reduce
        # of 64 MiB takes 232 ms (1.5 x 67e6 B / 0.232 s), one of 4 KiB 4.5 ms over 6 steps
        PresetLink(Link("loopback-gloo", 430e6, 7.5e-4)),
    )
}  # fmt: skip


PCIE_4 = 32e9  # nominal, of sixteen lanes in one direction
C2C = "NVLink-C2C"  # as records call the link of a superchip, which joins it with its host


def host_link_rate(device: str) -> float:
    """Nominal bytes a second between a device and its host, by its record; of a device without record PCIe 4.0's."""
    from learned_cost.devices.device import find, load_records

    found = find(device, load_records().values())
    if found is None:
        return PCIE_4
    return (found.link_bytes_per_s if found.link == C2C else found.host_link_bytes_per_s) or PCIE_4


def host_link(device: str) -> str:
    """The PCIe preset of a device's slot, by its record; of a device without record pcie4."""
    rate = host_link_rate(device)
    return "pcie3" if rate < 20e9 else "pcie4" if rate < 40e9 else "pcie5"
