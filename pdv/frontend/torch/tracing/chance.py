"""Random numbers of Python and numpy, while a module is exported: to a program they are constants. Entry: ``Chance``.

What torch draws a program draws, too. Of ``random`` and ``numpy.random`` tracing knows nothing: masks of SpecAugment,
or whether a layer is skipped, would be the same in every step.
"""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import numpy as np

DRAWN = (
    "the module draws by Python's random or numpy.random, which a program does not: whatever it decides so is in every "
    "step as it was when it was read. Draw by torch, or see that nothing comes of it"
)
REMEDY = (
    "Draw by torch what is drawn by Python's random or numpy.random; models of speech of transformers draw masks so, "
    "unless mask_time_prob and mask_feature_prob of their configuration are 0"
)
"""Where what was read is not the module."""


class Chance:
    """While this lasts, it is seen whether anything is drawn; behind it, the next numbers are what they were."""

    def __init__(self) -> None:
        self.notes: tuple[str, ...] = ()
        """What is to be said of the program, if anything was drawn."""

    def __enter__(self) -> Chance:
        self._before = random.getstate(), np.random.get_state()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace
        ours, theirs = self._before
        if random.getstate() != ours or not _is_same(np.random.get_state(), theirs):
            self.notes = (DRAWN,)
        random.setstate(ours)
        np.random.set_state(theirs)


def _is_same(one: Any, other: Any) -> bool:  # Any: numpy says it as a tuple, or as a dict
    return all(np.array_equal(x, y) for x, y in zip(one, other, strict=True))
