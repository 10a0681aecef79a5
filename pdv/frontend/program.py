"""What a frontend returns: the graph of a model, and where the values of its parameters can be had when someone
needs them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ir.dims import Shape
from ir.graph import Graph, View
from pdv.frontend.lowering import Drawn

BATCH = "b"
"""What a program calls the number of rows of its inputs: dim 0 of the first."""

Dims = Mapping[str, "bool | float | Sequence[float]"]
"""What is said of a model before it is read: open sizes by name; inputs of a file that have one value for the plan."""

Array = np.ndarray[Any, Any]  # Any: the element type is known only when the tensor is read


@dataclass(frozen=True, slots=True)
class Weights:
    """Stored tensors by name, read one at a time: planning reads none, emitting reads each once.

    bfloat16 tensors are arrays of `ml_dtypes.bfloat16`. ``unread``: what the source's state has and no program reads;
    ``files``: the safetensors files that have tensors, by name, as they are loaded.
    """

    loaders: Mapping[str, Callable[[], Array]] = field(default_factory=lambda: MappingProxyType({}))
    unread: Mapping[str, Callable[[], Array]] = field(default_factory=lambda: MappingProxyType({}))
    files: Mapping[str, Path] = field(default_factory=lambda: MappingProxyType({}))

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
class OpenSize:
    """A size of the inputs that the source leaves open, planned at one number.

    places: the dims (input, dim) that have it; most: the largest that it may be, where somebody said so.
    """

    places: tuple[tuple[str, int], ...]
    most: int | None = None


def size_name(text: str, taken: Collection[str]) -> str:
    """A name for a size in a program, from what the model calls it: letters, digits and underscores, none taken."""
    plain = re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_")[:32] or "size"
    name = f"s{plain}" if plain[0].isdigit() else plain
    names = (name if number == 1 else f"{name}_{number}" for number in count(1))
    return next(one for one in names if one not in taken and one != BATCH)


@dataclass(frozen=True, slots=True)
class FewRows:
    """A source over fewer rows of its batch than it has fixed.

    Attributes:
        graph: what is read of it.
        source: the source itself, to be run; its stored tensors lie where the whole source has them.
        constants: what was left out of it, since it is the same in each row: values of all rows, by name.
    """

    graph: Graph
    source: object
    constants: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Program:
    """A model as the compiler sees it: `graph` names parameters, `weights` holds their values.

    ``sizes``: what the source leaves open besides the batch, by name. ``again`` reads the model once more, its inputs
    (by name) of other shapes, where the source can say what it is then. ``known``: inputs of the source whose values
    were said, and that are no inputs of the graph. ``notes``: what the reader changed, in words; ``doubts``: what
    would not be trained, though it might be meant to; ``folded``: norms that are part of other weights;
    ``quantized``: weights that are integers; ``opaque``:
    operators that are run as they are, each ``op at where``; ``names``: what the source's state has besides the stored
    tensors, as views of these; ``joint``: stored tensors that it has only in views; ``left_out``: tensors of
    zeros that the source has not, or of one number that it reads as a constant, too; ``absent``:
    parameters that others were computed of in the source; ``untold``: stored tensors that may be more or less than
    parameters of it, and what is not known of them; ``held``: all
    parameters that it lacks, if its constants hold what was computed of them; ``sines``: trained tables of sines of
    positions, which may be meant to stay. ``as_stored``: the source's own tensors, of the program's.
    ``drawn``: what of the source is drawn at random, by the source's names, and what it is without: true, a number
    throughout, or noise. ``over_rows``: the source over as few rows of its batch as may be. ``own_backward``: functions
    of the source whose backward the graph has not, but what follows from their forward. ``lines``: of the source, by
    names of the graph's values. ``frozen``: parameters that are not trained, by the source's names.
    """

    graph: Graph
    weights: Weights
    again: Callable[[Mapping[str, Shape]], Graph] | None = field(default=None, compare=False)
    sizes: Mapping[str, OpenSize] = field(default_factory=dict)
    known: Mapping[str, Array] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    doubts: tuple[str, ...] = field(default=(), compare=False)
    folded: tuple[str, ...] = field(default=(), compare=False)
    quantized: tuple[str, ...] = field(default=(), compare=False)
    opaque: tuple[str, ...] = field(default=(), compare=False)
    names: Mapping[str, tuple[str, View]] = field(default_factory=dict, compare=False)
    joint: frozenset[str] = field(default=frozenset(), compare=False)
    left_out: frozenset[str] = field(default=frozenset(), compare=False)
    absent: tuple[str, ...] = field(default=(), compare=False)
    untold: Mapping[str, str] = field(default_factory=dict, compare=False)
    held: tuple[str, ...] = field(default=(), compare=False)
    sines: tuple[str, ...] = field(default=(), compare=False)
    drawn: Mapping[str, float | bool | Drawn] = field(default_factory=dict, compare=False)
    as_stored: Callable[[Mapping[str, Array]], dict[str, Array]] = field(default=dict, compare=False)
    over_rows: Callable[[int], FewRows | None] | None = field(default=None, compare=False)
    own_backward: tuple[str, ...] = field(default=(), compare=False)
    lines: Mapping[str, str] = field(default_factory=dict, compare=False)
    frozen: frozenset[str] = field(default=frozenset(), compare=False)

    def map(self, change: Callable[[Graph], Graph]) -> Program:
        """The program with its graph changed, also where it is read again."""
        again = self.again
        found = None if again is None else lambda shapes: change(again(shapes))
        over = self.over_rows

        def changed(rows: int) -> FewRows | None:
            read = None if over is None else over(rows)
            return None if read is None else replace(read, graph=change(read.graph))

        return replace(self, graph=change(self.graph), again=found, over_rows=None if over is None else changed)
