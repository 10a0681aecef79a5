"""Values to measure on. Zeros would draw less power, so that clocks rise; drawing many numbers would take the time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 1 << 16  # normal numbers that are drawn; larger tensors repeat them


def noise(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of normal numbers, those beyond the first block repeated."""
    count = math.prod(shape)
    block = torch.randn(min(max(count, 1), BLOCK), device=device).to(dtype)
    return block.repeat(-(-count // BLOCK))[:count].reshape(tuple(shape))
