"""Random text to train on, of rows of different length; the same in every process."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Dataset

PADDING = -100  # what torch's losses ignore


def batches(steps: int, batch: int, sequence: int, vocabulary: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` pairs of token ids and the ids that follow them, each [batch, sequence]; four texts, over and over.

    Behind the end of a row, ids are 0 and what follows them is ``PADDING``.
    """
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(1, vocabulary, (4, batch, sequence + 1), generator=generator)
    lengths = torch.randint(2, sequence + 2, (4, batch, 1), generator=generator)
    behind = torch.arange(sequence + 1) >= lengths
    for step in range(steps):
        text, end = texts[step % len(texts)], behind[step % len(texts)]
        yield text.masked_fill(end, 0)[:, :-1].contiguous(), text.masked_fill(end, PADDING)[:, 1:].contiguous()


class Texts(Dataset[dict[str, Tensor]]):
    """Random ids; labels are the same ids, those behind the end of a text count for nothing."""

    def __init__(self, rows: int, sequence: int, vocabulary: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, vocabulary, (rows, sequence), generator=generator)
        behind = torch.arange(sequence) >= torch.randint(2, sequence, (rows, 1), generator=generator)
        self.labels = self.ids.masked_fill(behind, PADDING)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}
