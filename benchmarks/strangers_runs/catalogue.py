"""The list that modules as people write them join. Entry points: ``stranger``, ``STRANGERS``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Any]  # Any: one tensor, a tuple of arguments, or a dict of them by name
STRANGERS: dict[str, Callable[[], Made]] = {}
"""Name -> makes the module, and example inputs."""


def stranger(make: Callable[[], Made]) -> Callable[[], Made]:
    """List a module under the name of the function that makes it."""
    assert make.__name__ not in STRANGERS, make.__name__
    STRANGERS[make.__name__] = make
    return make


def names() -> list[str]:
    """All of the list."""
    from benchmarks.strangers_runs import (  # noqa: F401  # join it
        attention,
        batches,
        crafts,
        generative,
        habits,
        mixers,
        mixtures,
        oddities,
        recurrences,
        sequences,
        unusual,
        vision,
    )  # fmt: skip

    return sorted(STRANGERS)


def made(name: str) -> Made:
    """A module of the list, always with the same values."""
    assert name in names(), name
    torch.manual_seed(sum(map(ord, name)))
    return STRANGERS[name]()


def ids(*shape: int, below: int = 32) -> Tensor:
    """Random token numbers."""
    return torch.randint(0, below, shape)
