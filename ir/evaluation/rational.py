"""What a number written in a program means exactly: floats as rationals.

A literal such as 0.3333333333333333 stands for the simplest rational that rounds to it, one third; any other finite
float stands for itself, a dyadic rational. No two floats of one precision stand for the same rational, since a
rational rounds to one float only.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np

from ir.types import DType

LARGEST_DENOMINATOR = {True: 1 << 10, False: 1 << 20}
"""In single precision, and in double. Larger ones would take many a float for a fraction that nobody meant: of the
2^23 (2^52) floats from 1/2 to 1, some 2 % (0.003 %) are the nearest to a fraction of such a denominator."""


@lru_cache(maxsize=1 << 16)
def rational(value: float, *, single: bool = False) -> Fraction | None:
    """The rational that ``value``, written in float64 or (``single``) float32, stands for; None if it is not finite."""
    if not math.isfinite(value):
        return None
    simple = Fraction(value).limit_denominator(LARGEST_DENOMINATOR[single])
    rounded = float(np.float32(float(simple))) if single else float(simple)
    return simple if rounded == value else Fraction(value)


def exact_float(value: Fraction) -> float | None:
    """The float64 that stands for ``value``; None if there is none, as for a product that float64 would round."""
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if rational(found) == value else None


def short_float(value: float, dtype: DType = DType.F32) -> float:
    """The shortest decimal with the same float32; for a program that computes in float64, the number as it is.

    ONNX stores attributes as float32, torch as float64; both mean 1e-05.
    """
    if dtype is DType.F64:
        return float(value)
    single = np.float32(value)
    return float(str(single)) if np.isfinite(single) else float(value)
