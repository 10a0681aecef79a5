"""What a frontend returns: the graph of a model, and where the values of its parameters can be had when someone
needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from ir.dims import Shape
from ir.graph import Graph

Array = np.ndarray[Any, Any]  # Any: the element type is known only when the tensor is read


@dataclass(frozen=True, slots=True)
class Weights:
    """Stored tensors by name, read one at a time: planning reads none, emitting reads each once.

    bfloat16 tensors are arrays of `ml_dtypes.bfloat16`.
    """

    loaders: Mapping[str, Callable[[], Array]] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def names(self) -> tuple[str, ...]:
        """Every stored tensor, sorted."""
        return tuple(sorted(self.loaders))

    def load(self, name: str) -> Array:
        """The values of one stored tensor.

        Raises:
            ModelError: if the source has no values for it (a model on the meta device).
        """
        return self.loaders[name]()


@dataclass(frozen=True, slots=True)
class Program:
    """A model as the compiler sees it: `graph` names parameters, `weights` holds their values.

    ``again`` reads the model once more, its inputs (by name) of other shapes, where the source can say what it is then.
    """

    graph: Graph
    weights: Weights
    again: Callable[[Mapping[str, Shape]], Graph] | None = field(default=None, compare=False)
