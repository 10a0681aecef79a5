"""What a GPU's memory holds beside tensors: the caching allocator's rounding, CUDA's context, NCCL's buffers.

Sources of constants are beside them. On a CPU there is none of it: malloc returns what is freed.
"""

from __future__ import annotations

import math

from pdv.cluster import Device

BLOCK_BYTES = 512  # c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize: every allocation is a multiple of it
MIB = float(2**20)

# Cached and not in use, as a share of the peak, where tensors of a few sizes come and go in the same order each step:
# GMLake (Guo et al., ASPLOS'24, figure 3 and section 2.3) measures 2 to 10 % for plain training of language models,
# and more only with offloading and uneven sizes.
FRAGMENTATION = 0.05

# CUDA's context with PyTorch's and cuBLAS's kernels loaded, and cuBLAS's workspace: 0.4 to 0.6 GB as nvidia-smi shows
# it (Gao et al., "Estimating GPU memory consumption of deep learning models", ESEC/FSE'20, section 3).
CONTEXT_BYTES = 500.0 * MIB

# NCCL keeps for each channel of a communicator one buffer of each protocol and neighbour: LL 0.5 MiB, LL128 4.7 MiB,
# simple 4 MiB (src/init.cc, computeBuffSizes, and NCCL_BUFFSIZE's default); a ring has one neighbour to receive from.
CHANNEL_BYTES = 9.2 * MIB
CHANNELS = 16  # as NCCL chooses inside a node of NVLinks; networks have fewer


def rounded(num_bytes: float) -> float:
    """A tensor's bytes as the caching allocator counts them."""
    return math.ceil(num_bytes / BLOCK_BYTES) * BLOCK_BYTES


def reserved(peak_bytes: float, device: Device, flat_bytes: float = 0.0) -> float:
    """What the allocator has taken from the device by the end of a step.

    ``flat_bytes``: buffers in one piece, made when the peak is over. A cached block is only used again for what fits
    into it, and activations leave blocks of their own sizes, so these are taken from the device on top.
    """
    if device.kind == "cpu":
        return peak_bytes
    return math.ceil((peak_bytes * (1.0 + FRAGMENTATION) + flat_bytes) / (2 * MIB)) * 2 * MIB  # segments of 2 MiB


def outside(device: Device, communicators: int) -> float:
    """What is taken outside the allocator."""
    return 0.0 if device.kind == "cpu" else CONTEXT_BYTES + communicators * CHANNELS * CHANNEL_BYTES
