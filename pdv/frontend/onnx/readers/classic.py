"""What operators of ai.onnx.ml become that stand around the networks of scikit-learn: scaled columns, chosen classes.

Entry point: ``CLASSIC``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ir.graph import Node
from ir.types import DType
from pdv.frontend import layers
from pdv.frontend.onnx.call import Call, Handler


def scaler(c: Call) -> Node:
    """(x - offset) scale, of each column or of all alike, in float32."""
    k, x = c.k, c.k.cast(c[0], DType.F32)
    offset, scale = (np.asarray(c.attrs.get(*given), np.float32) for given in (("offset", [0]), ("scale", [1])))
    for array in (offset, scale):
        if array.size not in (1, x.type.shape[-1]):
            raise ValueError(f"{array.size} numbers for {x.type.shape[-1]} columns")
    return k.mul(k.sub(x, k.const(offset)), k.const(scale))


def extract(c: Call) -> Node:
    """Columns by their numbers, [..., n] -> [..., as many]; of one dim as a row."""
    k, x, numbers = c.k, c[0], c.k.reshape(c[1], (-1,))
    x = k.reshape(x, (1, -1)) if x.type.rank == 1 else x
    return layers.index_select(k, x, x.type.rank - 1, numbers)


CLASSIC: Mapping[str, Handler] = {"ai.onnx.ml::Scaler": scaler, "ai.onnx.ml::ArrayFeatureExtractor": extract}
