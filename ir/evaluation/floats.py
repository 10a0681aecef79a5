"""The field of floats, float64 unless another is asked for.

Functions known by name are the real ones, with their true derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ir.evaluation.einsum import Data
from ir.evaluation.polynomial import ONE, Size
from ir.tape import Known


def _nobody(call: Any, *operands: Any) -> Any:
    raise AssertionError(f"nobody was given to run {call}")


class FloatField:
    """One trial: see ``ir.evaluation.recording.Field``.

    dtype: what constants are and products are computed in; functions of elements may give float64.
    foreign: calls functions of other libraries.
    """

    trials = 1
    trial_axis = False

    def __init__(self, dtype: type[np.floating[Any]] = np.float64, *, foreign: Callable[..., Any] = _nobody) -> None:
        self.dtype = dtype
        self.foreign: Callable[..., Any] | None = foreign

    def lift(self, array: Data) -> Data:
        """As floats."""
        return np.asarray(array, dtype=self.dtype)

    def constant(self, array: Data | float) -> tuple[Data, Size]:
        """[1, *shape] as floats; no bounds are kept of them."""
        return np.asarray(array, dtype=self.dtype)[None], ONE

    def matmul(self, x: Data, y: Data) -> Data:
        """[b, m, k] · [b, k, n]."""
        return np.asarray(x, dtype=self.dtype) @ np.asarray(y, dtype=self.dtype)

    def sum(self, x: Data, axes: tuple[int, ...]) -> Data:
        """Sum over axes."""
        return np.asarray(x.sum(axis=axes))

    def reduce(self, x: Data) -> Data:
        """Nothing to do."""
        return x

    def unary(self, function: Known, x: Data) -> tuple[Data, Callable[..., Data]]:
        """f(x), and how to get f'(x); of rows the function of each, and its pullback."""
        return function.real(x)

    def relate(self, name: str, real: Callable[[Data, Data], Data], pair: tuple[Data, Data], gap: Data) -> Data:
        """A truth value of each pair; infinities are equal, and have no difference."""
        del name, gap
        return real(*pair)

    def whole(self, name: str, real: Callable[[Data], Data], x: Data) -> Data:
        """An integer of each element."""
        del name
        with np.errstate(all="ignore"):
            return real(x).astype(np.int64)

    row = row_reduce = unary
