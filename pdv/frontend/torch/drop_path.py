"""Layers that drop whole rows (stochastic depth), said by torch's dropout, whose masks are planned and proved.

Entry point: ``say_drop_paths``.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

_ROWS = 64  # on which a layer is tried


def say_drop_paths(module: nn.Module) -> None:
    """Dropout that works in place, and layers that keep or drop rows, in a module of one's own, made plain dropout.

    A layer is known by its name and by what it does to ones: rows are zero, or 1 / (1 - drop_prob) throughout.
    """
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):  # noqa: SLF001  # whose forward may write over its operand
            part.inplace = False
        elif _drops_rows(part):
            part.forward = partial(_drop_rows, part)


def _drops_rows(part: nn.Module) -> bool:
    probability = getattr(part, "drop_prob", None)
    if not type(part).__name__.endswith("DropPath") or not isinstance(probability, float) or not 0 < probability < 1:
        return False
    if next(part.parameters(), None) is not None:
        return False
    was_training = part.training
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        found = part.train()(torch.ones(_ROWS, 2, 3))
        part.train(was_training)
    kept = torch.full_like(found, 1 / (1 - probability))
    return bool((torch.isclose(found, kept) | (found == 0)).all() and (found == found[:, :1, :1]).all())


def _drop_rows(part: nn.Module, x: Tensor) -> Tensor:
    """x: [rows, ...] with rows kept and scaled, or zero."""
    ones = x.new_ones((x.shape[0], *(1,) * (x.dim() - 1)))
    return x * F.dropout(ones, float(part.drop_prob), part.training)  # type: ignore[arg-type]
