"""Stages whose insides differ: those that hold most micro-batches at once take one that holds less. Entry: ``mix``.

Of 1F1B's p stages the s-th holds p - s micro-batches, so that what is short of memory on the first has room on the
last. A cut and the inside of each stage are chosen together, by one exact dynamic program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import numpy as np

from pdv.pipelines.cuts import cut_pieces
from pdv.pipelines.pipeline import Extra, Whole
from pdv.pipelines.profile import ByStage, Numbers, Profile
from pdv.pipelines.timing import Timing


@dataclass(frozen=True)
class Mixture:
    """Pieces of each chunk, by piece the number of its inside, and what all of that is as one."""

    sizes: tuple[int, ...]
    inside_of: tuple[int, ...]
    whole: Whole

    @property
    def step_s(self) -> float:
        """Seconds of a step by arithmetic."""
        return self.whole.step_s(self.sizes)

    @property
    def mixes(self) -> bool:
        """Whether any two chunks differ."""
        return len(set(self.inside_of)) > 1


def mix(wholes: Sequence[Whole], limit: float) -> Mixture | None:
    """The cut whose slowest chunk is fastest, each with the inside that is; None if nothing is within the limit.

    wholes: one candidate with insides of one program, which differ in what they take and hold.
    """
    costs = [whole.costs(limit) for whole in wholes]
    sizes = cut_pieces([np.minimum.reduce(of_chunk) for of_chunk in zip(*costs, strict=True)])
    if sizes is None:
        return None
    ends = [0, *accumulate(sizes)]
    picks = [
        int(np.argmin([one[ends[chunk], ends[chunk + 1]] for one in of_chunk]))
        for chunk, of_chunk in enumerate(zip(*costs, strict=True))
    ]
    inside_of = np.repeat(picks, sizes)
    return Mixture(sizes, tuple(map(int, inside_of)), _splice(wholes, inside_of))


def _splice(wholes: Sequence[Whole], inside_of: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Whole:
    """Each piece of its inside; what is of no piece is the most of all."""

    def pick(each: Sequence[Numbers]) -> Numbers:
        return np.asarray(np.choose(inside_of, each))

    kinds = [
        Profile(*(pick([getattr(one, entry.name) for one in profiles]) for entry in fields(Profile)))
        for profiles in zip(*(whole.profiles.kinds for whole in wholes), strict=True)
    ]
    timings = tuple(_splice_timings(each, pick) for each in zip(*(whole.timings for whole in wholes), strict=True))
    extras = [whole.extra for whole in wholes]
    extra = Extra(*(max(getattr(one, entry.name) for one in extras) for entry in fields(Extra)))
    first = wholes[0]
    return replace(first, profiles=ByStage(tuple(kinds), first.profiles.kind_of), timings=timings, extra=extra)


def _splice_timings(timings: Sequence[Timing], pick: Callable[[Sequence[Numbers]], Numbers]) -> Timing:
    return replace(
        timings[0],
        forward_s=pick([one.forward_s for one in timings]),
        backward_s=pick([one.backward_s for one in timings]),
        last_s=pick([one.last_s for one in timings]),
        behind_s=max(one.behind_s for one in timings),
    )
