"""Numbers as they are written in attributes."""

from __future__ import annotations

import numpy as np


def short_float(value: float) -> float:
    """The shortest decimal with the same float32.

    ONNX stores attributes as float32, torch as float64; both mean 1e-05.
    """
    single = np.float32(value)
    return float(str(single)) if np.isfinite(single) else float(value)
