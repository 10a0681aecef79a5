"""Numbers as they are written in attributes."""

from __future__ import annotations

import numpy as np

from ir.types import DType


def short_float(value: float, dtype: DType = DType.F32) -> float:
    """The shortest decimal with the same float32; for a program that computes in float64, the number as it is.

    ONNX stores attributes as float32, torch as float64; both mean 1e-05.
    """
    if dtype is DType.F64:
        return float(value)
    single = np.float32(value)
    return float(str(single)) if np.isfinite(single) else float(value)
