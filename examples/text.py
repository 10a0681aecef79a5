"""Random text to train on, the same in every process."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def batches(steps: int, batch: int, sequence: int, vocabulary: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` pairs of token ids and the ids that follow them, each [batch, sequence]; four texts, over and over."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(1, vocabulary, (4, batch, sequence + 1), generator=generator)
    for step in range(steps):
        text = texts[step % len(texts)]
        yield text[:, :-1].contiguous(), text[:, 1:].contiguous()
