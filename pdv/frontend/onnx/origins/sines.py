"""Stored tables of sines and cosines of positions, which modules have as parameters that are not trained.

A file does not say which of its parameters are frozen. Such a table is known by its values: in each row as much is sine
as is cosine of the same angles, so that its squares sum to half its length. Entry point: ``tables_of_sines``.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir

from pdv.frontend.onnx.origins.signature import is_float
from pdv.passes.fold_constants import Array

_ROWS = 64  # that are looked at
_LEAST = 8  # columns: sines of four angles, and their cosines
_CLOSE = 1e-2  # of the sum to half the length: some steps of bfloat16


def tables_of_sines(graph: onnx_ir.Graph, names: Iterable[str]) -> tuple[str, ...]:
    """Which of these stored tensors are such."""
    return tuple(
        name
        for name in sorted(names)
        if (value := graph.initializers.get(name)) is not None
        and is_float(value)
        and value.const_value is not None
        and _is_sines(value.const_value.numpy())
    )


def _is_sines(table: Array) -> bool:
    """Whether rows, but for those of zeros, are sines and cosines in equal number, and not all alike."""
    if table.ndim < 2 or table.shape[-1] < _LEAST:
        return False
    rows = table.reshape(-1, table.shape[-1])[:_ROWS].astype(np.float64)
    rows = rows[rows.any(1)]
    if len(rows) < 2 or (rows == rows[0]).all() or np.abs(rows).max() > 1 + _CLOSE:
        return False
    return bool(np.allclose((rows**2).sum(1), rows.shape[1] / 2, rtol=_CLOSE, atol=0))
