"""More functions of each element, defined everywhere: trigonometry, rounding, signs; known by name."""

from __future__ import annotations

import numpy as np

from ir.evaluation.einsum import Data
from ir.ops.elementwise import _of, _unary


def _flat(x: Data) -> Data:
    """The derivative of what is constant between jumps."""
    return np.zeros_like(x)


OPS = (
    _unary("tan", "torch.tan({0})", _of(np.tan, lambda x: 1 / np.cos(x) ** 2), flops=4, fold=np.tan),
    _unary("atan", "torch.atan({0})", _of(np.arctan, lambda x: 1 / (1 + x * x)), flops=8),
    _unary("sinh", "torch.sinh({0})", _of(np.sinh, np.cosh), flops=8),
    _unary("cosh", "torch.cosh({0})", _of(np.cosh, np.sinh), flops=8),
    _unary("asinh", "torch.asinh({0})", _of(np.arcsinh, lambda x: 1 / np.sqrt(1 + x * x)), flops=8),
    _unary("floor", "torch.floor({0})", _of(np.floor, _flat), fold=np.floor),
    _unary("ceil", "torch.ceil({0})", _of(np.ceil, _flat), fold=np.ceil),
    _unary("round", "torch.round({0})", _of(np.rint, _flat), fold=np.rint),
    _unary("sign", "torch.sign({0})", _of(np.sign, _flat), fold=np.sign),
)
