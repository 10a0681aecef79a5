"""The field of float64 numbers: functions known by name are the real ones, with their true derivatives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ir.evaluation.einsum import Data
from ir.evaluation.polynomial import ONE, Size
from ir.tape import Known


class FloatField:
    """Float64, one trial: see ``ir.evaluation.recording.Field``."""

    trials = 1
    trial_axis = False

    def lift(self, array: Data) -> Data:
        """As float64."""
        return np.asarray(array, dtype=np.float64)

    def constant(self, array: Data | float) -> tuple[Data, Size]:
        """[1, *shape] as float64; no bounds are kept of floats."""
        return np.asarray(array, dtype=np.float64)[None], ONE

    def matmul(self, x: Data, y: Data) -> Data:
        """[b, m, k] · [b, k, n]."""
        return np.asarray(x @ y)

    def sum(self, x: Data, axes: tuple[int, ...]) -> Data:
        """Sum over axes."""
        return np.asarray(x.sum(axis=axes))

    def reduce(self, x: Data) -> Data:
        """Nothing to do."""
        return x

    def unary(self, function: Known, x: Data) -> tuple[Data, Callable[..., Data]]:
        """f(x), and how to get f'(x); of rows the function of each, and its pullback."""
        return function.real(x)

    def decide(self, name: str, real: Callable[[Data], Data], x: Data) -> Data:
        """A truth value of each element."""
        del name  # all of it is known
        return real(x)

    row = row_reduce = unary
