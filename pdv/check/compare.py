"""A rank's results against the reference: outputs, gradients, buffers, and what the state says. See ``Comparison``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ir.errors import VerificationError
from ir.views import places, sources_of
from pdv.check.reference import Expected, Given, largest, whole_bases
from pdv.check.small import Pair

TOLERANCE = 1e-9  # of a tensor's largest element, in float64
AMPLIFIED = 1e-5  # what rounding may come to in programs whose values grow, if it is less where they do not
_FLOOR = 1e-3  # of the largest value: what is smaller is compared with that, for it may be zero but for rounding

Array = np.ndarray[Any, Any]  # Any: floats, integers and booleans


@dataclass(frozen=True)
class Observed:
    """What one rank made of the values; ``batch_axes``: (size, its place), slow to fast; ``loss``: if there was one."""

    outputs: list[Array]
    batch_axes: tuple[tuple[int, int], ...]
    gradients: dict[str, Array]
    state: dict[str, Array]
    loss: float | None = None


class Item(NamedTuple):
    """A tensor to compare: what it is, as it is, as it should be, and the largest value on the way to it."""

    what: str
    found: Array
    wanted: Array
    reached: float


@dataclass(frozen=True)
class Comparison:
    """What all ranks are held to; ``call``: which it is, in words."""

    pair: Pair
    given: Given
    expected: Expected
    tolerance: float = TOLERANCE
    call: str = ""

    def worst(self, ranks: Sequence[Observed]) -> float:
        """The largest relative difference.

        Raises:
            VerificationError: naming the first tensor that differs by more than rounding.
        """
        found = 0.0
        for rank, observed in enumerate(ranks):
            where = f"{self.call}on simulated rank {rank} of {self.pair.mesh}"
            for item in self.items(observed, where):
                found = max(found, self._difference(item, where))
        return found

    # ---- What there is to compare ----

    def items(self, observed: Observed, where: str) -> Iterator[Item]:
        """Of one rank.

        Raises:
            VerificationError: if there are others than the source has.
        """
        names = [name for name, _ in self.pair.source.outputs]
        if len(observed.outputs) != len(names):
            found = len(observed.outputs)
            raise _differs(f"the emitted text returns {found} tensors, the source {len(names)}", where)
        for name, value in zip(names, observed.outputs, strict=True):
            wanted = own_rows(self.expected.outputs[name], observed.batch_axes)
            yield Item(f"output {name}", value, wanted, self.expected.largest)
        if observed.loss is not None:
            elements = sum(x.size for x in self.expected.outputs.values())
            reached = self.expected.largest * elements  # terms cancel
            yield Item("the loss", np.asarray(observed.loss), np.asarray(self.expected.loss), reached)
        yield from self._gradients(observed, where)
        if observed.state:
            yield from self._state(observed, where)

    def _gradients(self, observed: Observed, where: str) -> Iterator[Item]:
        wanted = self.expected.gradients
        reached = max((1.0, *map(largest, wanted.values())))  # cotangents are about one
        for name in sorted({*wanted, *observed.gradients}) if wanted else ():
            if name not in wanted:
                raise _differs(f"the emitted text trains {name}, which the source does not", where)
            value = observed.gradients.get(name)  # none is one of zero
            found = np.zeros_like(wanted[name]) if value is None else value
            yield Item(f"the gradient of {name}", found, wanted[name], reached)

    def _state(self, observed: Observed, where: str) -> Iterator[Item]:
        """Buffers are updated as the source's; what is not updated is still what was stored."""
        for name, wanted in self.expected.updates.items():
            yield Item(f"the new value of {name}", _hold(observed, name, where), wanted, self.expected.largest)
        for name, mask in self._read.items():
            if name not in self.expected.updates:
                value = _hold(observed, name, where)
                wanted = self.given.stored[name]
                if value.shape == wanted.shape:
                    value, wanted = value.reshape(-1)[mask], wanted.reshape(-1)[mask]
                yield Item(f"{name} in the state", value, wanted, 0.0)

    @cached_property
    def _read(self) -> dict[str, Array]:
        """Stored tensor -> for each of its elements, whether the program reads it."""
        bases = whole_bases(self.pair.emitted, self.pair)
        sizes = [math.prod(base.shape) for base in bases.values()]
        row = np.zeros(sum(sizes), dtype=bool)
        for node in self.pair.emitted.params:
            if bases.keys() >= set(sources_of(node)):
                row[places(node, bases)] = True
        return dict(zip(bases, np.split(row, np.cumsum(sizes)[:-1]), strict=True))

    def _difference(self, item: Item, where: str) -> float:
        what, found, wanted, _ = item
        if found.shape != wanted.shape:
            raise _differs(f"{what} is of shape {list(found.shape)}, the source's of {list(wanted.shape)}", where)
        kinds = {"i" if x.dtype.kind == "u" else x.dtype.kind for x in (found, wanted)}  # evaluated in int64
        if len(kinds) > 1:
            raise _differs(f"{what} is of type {found.dtype}, the source's of {wanted.dtype}", where)
        error = relative_error(*item[1:])
        if not error <= self.tolerance:
            raise _differs(f"{what} differs from the source's by {error:.1e} of its largest element", where)
        return error


def errors_of(comparison: Comparison, ranks: Sequence[Observed]) -> dict[str, float]:
    """The largest relative difference of each tensor, however large.

    Raises:
        VerificationError: if one is missing, or too many.
    """
    found: dict[str, float] = {}
    for rank, observed in enumerate(ranks):
        for item in comparison.items(observed, f"on simulated rank {rank}"):
            same = item.found.shape == item.wanted.shape
            found[item.what] = max(found.get(item.what, 0.0), relative_error(*item[1:]) if same else math.inf)
    return found


def own_rows(whole: Array, axes: Sequence[tuple[int, int]]) -> Array:
    """The rows of the rank at these places."""
    for size, place in axes:  # outer axis first
        rows = whole.shape[0] // size
        whole = whole[place * rows : (place + 1) * rows]
    return whole


def _hold(observed: Observed, name: str, where: str) -> Array:
    if name not in observed.state:
        raise _differs(f"the emitted text's state has no {name}", where)
    return observed.state[name]


def relative_error(found: Array, wanted: Array, reached: float) -> float:
    """The largest difference over the largest element, or over a part of what is ``reached`` on the way."""
    if wanted.dtype.kind != "f":
        return float((found != wanted).any())
    with np.errstate(all="ignore"):
        gaps = np.where(found == wanted, 0.0, np.abs(found - wanted))
    return float(gaps.max(initial=0.0)) / (max(largest(wanted), _FLOOR * reached) or 1.0)


def _differs(what: str, where: str) -> VerificationError:
    return VerificationError(f"{what}, {where}", "The emitted text computes what the source does", check="text")
