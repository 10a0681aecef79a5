"""Devices and links that need no describing, each number with its source.

A device's rates and sizes are those of its record (learned_cost/devices/*.yaml, by name or alias). "sheet" is the
vendor's datasheet of that product. "kernels" and "collectives" are medians over public measurements (NeuSight, Vidur,
AIConfigurator, DeepBench, LLMServingSim; collected 2026-11): matrix products of more than 1e11 FLOP against the sheet's
peak, and NCCL all-reduce of at least 128 MiB (nccl-tests bus bandwidth) and of at most 16 KiB (latency, divided by the
steps of a ring).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdv.cluster.description import Device, Link

# Host time to queue one eager PyTorch kernel. An assumption: a kernel that the host waits for takes at least 24-31 us
# (kernels, NeuSight, A100 to V100), one behind others in the queue a part of it. Describe a device to set your own.
LAUNCH_S = 5e-6


def _device(name: str, efficiency: float, launch_s: float = LAUNCH_S) -> Device:
    """A preset: the published numbers of its record, and what only the planner's arithmetic needs."""
    from learned_cost.device import record

    known = record(name)
    peaks = {dtype: rate for key, dtype in DTYPES.items() if (rate := known.peak(key)) is not None}
    bandwidth = known.memory_bandwidth_bytes_per_s
    return Device(name, known.memory_bytes, peaks, bandwidth, launch_s, efficiency, kind=known.kind)


# dtype of a record -> dtype of a plan
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
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
        # efficiency: no L4 kernels above 1e11 FLOP, taken as the L40S's (same chip family, lower power)
        _device("l4", 0.55),
        # efficiency: kernels, AIConfigurator bf16 linear, median of 5,404
        _device("l40s", 0.55),
        # fp32 accumulation; efficiency: kernels, LLMServingSim bf16 linear, median of 183
        _device("rtx-4090", 0.97),
        # efficiency: taken as the H200's (same chip)
        _device("h100-80gb-sxm", 0.755),
        # efficiency: kernels, AIConfigurator bf16 linear, median of 5,423
        _device("h200-141gb-sxm", 0.755),
        # efficiency: kernels, LLMCompass fp16 on MI210, median of 11 (none of MI300X at hand)
        _device("mi300x", 0.66),
        # One process on one core (AMD EPYC, PyTorch 2.13, one thread), measured 2026-11-21: 3 us a small operation. The
        # record's peaks are the best of several runs, so efficiency is near one.
        _device("cpu-core", 0.95, 3e-6),
    )
}


@dataclass(frozen=True, slots=True)
class PresetLink:
    """A link with who owns a port of it: each device, or a node whose devices share it."""

    link: Link
    port_of: Literal["device", "node"] = "device"


LINKS: dict[str, PresetLink] = {
    preset.link.name: preset
    for preset in (
        # Inside a node. Bandwidth is what NCCL reaches, not the sheet's.
        # sheet 150 GB/s a direction, times 0.8: on nvlink3 and nvlink4 the share measured is 0.71 and 0.86
        PresetLink(Link("nvlink2", 120e9, 2e-6)),
        # collectives, A100 SXM, 8 devices: 212 GB/s of 300; 21.7 us over 14 steps
        PresetLink(Link("nvlink3", 212e9, 1.6e-6)),
        # collectives, H200 SXM, 8 devices: 385 GB/s of 450; 17.2 us over 14 steps
        PresetLink(Link("nvlink4", 385e9, 1.2e-6)),
        # MI300X sheet: 448 GB/s a direction, times 0.8 as for nvlink2
        PresetLink(Link("xgmi3", 358e9, 2e-6)),
        # collectives, TITAN X Pascal, 2 devices, DeepBench; latency as pcie4
        PresetLink(Link("pcie3", 12.2e9, 4e-6)),
        # collectives, L40S, 2 devices: 20 GB/s, 7.7 us over 2 steps; 8 devices on two sockets fall to 1.4 GB/s
        PresetLink(Link("pcie4", 20e9, 4e-6)),
        # collectives, RTX PRO 6000, 8 devices: 22 GB/s (38 with 2); 25.6 us over 14 steps
        PresetLink(Link("pcie5", 22e9, 2e-6)),
        # Between nodes. Line rates: what is reached depends on the fabric; measure and describe it where you can.
        # 200 Gb/s; latency: collectives, Vidur send_recv on A100, between nodes less inside one, 8.5-15 us
        PresetLink(Link("ib-hdr", 25e9, 1e-5)),
        # 400 Gb/s; latency as ib-hdr
        PresetLink(Link("ib-ndr", 50e9, 1e-5)),
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
