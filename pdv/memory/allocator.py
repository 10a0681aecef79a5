"""What a GPU's memory holds beside tensors: the caching allocator's rounding, CUDA's context, NCCL's buffers.

Sources of constants are beside them. On a CPU there is none of it: malloc returns what is freed.
"""

from __future__ import annotations

import math

from pdv.cluster import Device

BLOCK_BYTES = 512  # c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize: every allocation is a multiple of it
MIB = float(2**20)

# What the caching allocator has taken from the device beside what tensors need at the peak, as a share of that: blocks
# of sizes that nobody asks for just then. Fitted on nvidia-smi's readings of runs of Megatron-DeepSpeed
# (benchmarks/published/runs.py, set "bloom"), which leave room to spare; where none is left the allocator gives cached
# blocks back before it fails, all but split ones: runs that were seen to fit, and not to fit, put the rest between.
FRAGMENTATION = 0.23
STUCK = 0.1
# Of emitted programs: 12 steps of six models on an H100, PyTorch 2.11, 2026-11-23: 0.03 to 0.14.
EMITTED_FRAGMENTATION = 0.07

# CUDA's context, the kernels of PyTorch and cuBLAS, and cuBLAS's work space: what nvidia-smi shows of a process that
# holds no tensor, about half a gigabyte since CUDA 11 (0.8 on an H100 with CUDA 13).
CONTEXT_BYTES = 500.0 * MIB

# NCCL keeps for each channel of a communicator one buffer of each protocol and neighbour: LL 0.5 MiB, LL128 4.7 MiB,
# simple 4 MiB (src/init.cc, computeBuffSizes, and NCCL_BUFFSIZE's default); a ring has one neighbour to receive from.
CHANNEL_BYTES = 9.2 * MIB
CHANNELS = 16  # as NCCL chooses inside a node of NVLinks; networks have fewer


def round_up(num_bytes: float) -> float:
    """A tensor's bytes as the caching allocator counts them."""
    return math.ceil(num_bytes / BLOCK_BYTES) * BLOCK_BYTES


def reserved_bytes(peak_bytes: float, device: Device, flat_bytes: float = 0.0, *, eager: bool = False) -> float:
    """What the allocator has taken from the device by the end of a step, where there is room.

    ``flat_bytes``: buffers in one piece, made when the peak is over. A cached block is only used again for what fits
    into it, and activations leave blocks of their own sizes, so these are taken from the device on top. ``eager``: of
    an emitted program.
    """
    return _take(peak_bytes, device, flat_bytes, EMITTED_FRAGMENTATION if eager else FRAGMENTATION)


def least_reserved_bytes(peak_bytes: float, device: Device, flat_bytes: float = 0.0, *, eager: bool = False) -> float:
    """The least that the allocator can do with: cached blocks given back, but for split ones."""
    stuck = EMITTED_FRAGMENTATION if eager else STUCK
    return max(_take(peak_bytes, device, 0.0, stuck), _take(peak_bytes, device, flat_bytes, 0.0))


def room_within(limit: float, device: Device, *, eager: bool = False) -> float:
    """Bytes of tensors at a peak at most, where the least that is taken of a device is within a limit."""
    if device.kind == "cpu":
        return limit
    return max(0.0, limit - outside(device, 0)) / (1.0 + (EMITTED_FRAGMENTATION if eager else STUCK))


def _take(peak_bytes: float, device: Device, flat_bytes: float, share: float) -> float:
    if device.kind == "cpu":
        return peak_bytes
    return math.ceil((peak_bytes * (1.0 + share) + flat_bytes) / (2 * MIB)) * 2 * MIB  # segments of 2 MiB


def outside(device: Device, communicators: int) -> float:
    """What is taken outside the allocator."""
    return 0.0 if device.kind == "cpu" else CONTEXT_BYTES + communicators * CHANNELS * CHANNEL_BYTES
