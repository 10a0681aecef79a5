"""What every builder of the model set shares: the two sizes, and example inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # torch takes seconds to import, so builders import it when called
    import torch

Size = Literal["small", "full"]
TensorTuple = tuple["torch.Tensor", ...]
Built = tuple["torch.nn.Module", TensorTuple]


def choose(size: Size, *, small: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a size."""
    return small if size == "small" else full


def token_ids(vocabulary: int, batch: int, sequence: int) -> TensorTuple:
    """Uniform random token ids: [batch, sequence] int64, without 0, whose embedding row torch may hold fixed
    (`padding_idx`).
    """
    import torch

    return (torch.randint(1, vocabulary, (batch, sequence)),)


def images(batch: int, side: int) -> TensorTuple:
    """Standard normal images: [batch, 3, side, side] float32."""
    import torch

    return (torch.randn(batch, 3, side, side),)


def rows_of(batch: int, *widths: int) -> TensorTuple:
    """Standard normal features, one [batch, width] float32 tensor per width."""
    import torch

    return tuple(torch.randn(batch, width) for width in widths)


def table_ids(tables: tuple[int, ...], batch: int, bag: int) -> TensorTuple:
    """Uniform random rows of each table: [batch, tables, bag] int64."""
    import torch

    return (torch.stack([torch.randint(0, rows, (batch, bag)) for rows in tables], 1),)
