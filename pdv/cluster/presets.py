"""Devices and links that need no describing, each number with its source.

"sheet" is the vendor's datasheet of that product (dense rates). "kernels" and "collectives" are medians over public
measurements (NeuSight, Vidur, AIConfigurator, DeepBench, LLMServingSim; collected 2026-11): matrix products of more
than 1e11 FLOP against the sheet's peak, and NCCL all-reduce of at least 128 MiB (nccl-tests bus bandwidth) and of at
most 16 KiB (latency, divided by the steps of a ring).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdv.cluster.description import Device, Link

GIB = 2**30

# Host time to queue one eager PyTorch kernel. An assumption: a kernel that the host waits for takes at least 24-31 us
# (kernels, NeuSight, A100 to V100), one behind others in the queue a part of it. Describe a device to set your own.
LAUNCH_S = 5e-6


def _gpu(name: str, memory_gib: int, bandwidth_gb_s: float, efficiency: float, **peak_tflops: float) -> Device:
    peaks = {dtype: rate * 1e12 for dtype, rate in peak_tflops.items()}
    return Device(name, memory_gib * GIB, peaks, bandwidth_gb_s * 1e9, LAUNCH_S, efficiency)


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        # sheet; efficiency: kernels, DeepBench fp16, median of 50
        _gpu("v100-16gb-sxm", 16, 900, 0.81, float32=15.7, float16=125),
        _gpu("v100-32gb-sxm", 32, 900, 0.81, float32=15.7, float16=125),
        _gpu("v100-32gb-pcie", 32, 900, 0.81, float32=14.0, float16=112),
        # sheet; efficiency: kernels, DeepBench fp16, median of 50 (a 70 W card: its clock falls under load)
        _gpu("t4", 16, 320, 0.60, float32=8.1, float16=65),
        # sheet, TF32 off as in PyTorch's default; efficiency: kernels, AIConfigurator bf16 linear, median of 2,280
        _gpu("a100-40gb-sxm", 40, 1555, 0.775, float32=19.5, float16=312, bfloat16=312),
        _gpu("a100-80gb-sxm", 80, 2039, 0.775, float32=19.5, float16=312, bfloat16=312),
        _gpu("a100-40gb-pcie", 40, 1555, 0.775, float32=19.5, float16=312, bfloat16=312),
        _gpu("a100-80gb-pcie", 80, 1935, 0.775, float32=19.5, float16=312, bfloat16=312),
        # sheet; efficiency: no L4 kernels above 1e11 FLOP, taken as the L40S's (same chip family, lower power)
        _gpu("l4", 24, 300, 0.55, float32=30.3, float16=121, bfloat16=121),
        # sheet; efficiency: kernels, AIConfigurator bf16 linear, median of 5,404
        _gpu("l40s", 48, 864, 0.55, float32=91.6, float16=362, bfloat16=362),
        # sheet, fp32 accumulation; efficiency: kernels, LLMServingSim bf16 linear, median of 183
        _gpu("rtx-4090", 24, 1008, 0.97, float32=82.6, float16=165.2, bfloat16=165.2),
        # sheet; efficiency: taken as the H200's (same chip)
        _gpu("h100-80gb-sxm", 80, 3350, 0.755, float32=66.9, float16=989, bfloat16=989),
        # sheet; efficiency: kernels, AIConfigurator bf16 linear, median of 5,423
        _gpu("h200-141gb-sxm", 141, 4800, 0.755, float32=66.9, float16=989, bfloat16=989),
        # sheet, matrix rates; efficiency: kernels, LLMCompass fp16 on MI210, median of 11 (none of MI300X at hand)
        _gpu("mi300x", 192, 5300, 0.66, float32=163.4, float16=1307, bfloat16=1307),
        # One process on one core of a server (AMD EPYC, PyTorch 2.13, one thread), measured 2026-11-21: 2048^3 products
        # at 100 GFLOP/s in float32 and 206 in bfloat16, torch.add at 29 GB/s, 3 us a small operation. The peaks are the
        # best of these runs, so efficiency is near one. Memory: a quarter of a 16 GiB laptop.
        Device("cpu-core", 4 * GIB, {"float32": 105e9, "bfloat16": 215e9}, 29e9, 3e-6, efficiency=0.95, kind="cpu"),
    )
}  # fmt: skip


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
