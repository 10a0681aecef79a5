"""The field of float64 numbers: functions known by name are the real ones, with their true derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ir.evaluation.einsum import Data
from ir.evaluation.polynomial import ONE, Size

_erf = np.frompyfunc(math.erf, 1, 1)
_TIE = 1e-9  # of a row's largest element: what differs by less is equal but for rounding


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

    def unary(self, name: str, x: Data) -> tuple[Data, Callable[[], Data]]:
        """f(x), and how to get f'(x).

        Raises:
            KeyError: if no function has that name.
        """
        function, *parameters = name.split(":")
        y, derivative = UNARY[function](x, *parameters)
        return y, derivative

    def row(self, name: str, x: Data) -> tuple[Data, Callable[[Data], Data]]:
        """softmax, log_softmax, top_k:k, layer_norm:eps or rms_norm:eps of each row.

        Raises:
            KeyError: if no function has that name.
        """
        function, *parameters = name.split(":")
        return ROW[function](x, *(float(p) for p in parameters))

    def row_reduce(self, name: str, x: Data) -> tuple[Data, Callable[[Data], Data]]:
        """The largest element of each row; equal ones share the gradient's first place, as torch does."""
        assert name == "max", name
        y = x.max(axis=-1, keepdims=True)
        first = np.arange(x.shape[-1]) == x.argmax(axis=-1)[..., None]
        return y, lambda g: g * first


Unary = Callable[..., tuple[Data, Callable[[], Data]]]


def _gelu(x: Data, approximate: str) -> tuple[Data, Callable[[], Data]]:
    if approximate == "tanh":
        c, k = math.sqrt(2 / math.pi), 0.044715
        t = np.tanh(c * (x + k * x**3))
        return 0.5 * x * (1 + t), lambda: 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * k * x * x)
    cdf = 0.5 * (1 + np.asarray(_erf(x / math.sqrt(2)), dtype=np.float64))
    return x * cdf, lambda: cdf + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _sigmoid(x: Data) -> tuple[Data, Callable[[], Data]]:
    y = 1 / (1 + np.exp(-x))
    return y, lambda: y * (1 - y)


def _silu(x: Data) -> tuple[Data, Callable[[], Data]]:
    s = 1 / (1 + np.exp(-x))
    return x * s, lambda: s * (1 + x * (1 - s))


def _tanh(x: Data) -> tuple[Data, Callable[[], Data]]:
    y = np.tanh(x)
    return y, lambda: 1 - y * y


def _exp(x: Data) -> tuple[Data, Callable[[], Data]]:
    y = np.exp(x)
    return y, lambda: y


def _pow(x: Data, exponent: str) -> tuple[Data, Callable[[], Data]]:
    e = float(exponent)
    return x**e, lambda: e * x ** (e - 1)


def _of(function: Callable[[Data], Any], derivative: Callable[[Data], Any]) -> Unary:
    return lambda x: (np.asarray(function(x), dtype=np.float64), lambda: derivative(x))


UNARY: Mapping[str, Unary] = MappingProxyType(
    {
        "gelu": _gelu,
        "sigmoid": _sigmoid,
        "silu": _silu,
        "tanh": _tanh,
        "exp": _exp,
        "pow": _pow,
        "relu": _of(lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(np.float64)),
        "log": _of(np.log, lambda x: 1 / x),
        "erf": _of(_erf, lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x)),
        "sqrt": _of(np.sqrt, lambda x: 0.5 / np.sqrt(x)),
        "rsqrt": _of(lambda x: 1 / np.sqrt(x), lambda x: -0.5 * x**-1.5),
        "reciprocal": _of(lambda x: 1 / x, lambda x: -1 / (x * x)),
        "sin": _of(np.sin, np.cos),
        "cos": _of(np.cos, lambda x: -np.sin(x)),
        "abs": _of(np.abs, np.sign),
    }
)
"""Functions of an element by name: x and the name's parameters -> f(x) and a thunk of f'(x)."""


Row = Callable[..., tuple[Data, Callable[[Data], Data]]]


def _softmax(x: Data) -> tuple[Data, Callable[[Data], Data]]:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    y = e / e.sum(axis=-1, keepdims=True)
    return y, lambda g: y * (g - (g * y).sum(axis=-1, keepdims=True))


def _log_softmax(x: Data) -> tuple[Data, Callable[[Data], Data]]:
    z = x - x.max(axis=-1, keepdims=True)
    y = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    return y, lambda g: g - np.exp(y) * g.sum(axis=-1, keepdims=True)


def _top_k(x: Data, k: float) -> tuple[Data, Callable[[Data], Data]]:
    """Not a number in rows whose choice rounding decides."""
    ordered = -np.sort(-x, axis=-1)
    least, next_ = ordered[..., int(k) - 1, None], ordered[..., int(k) : int(k) + 1]
    kept = (x >= least).astype(x.dtype)
    tied = (least - next_ <= _TIE * np.abs(ordered).max(axis=-1, keepdims=True)).any(axis=-1, keepdims=True)
    kept[np.broadcast_to(tied, kept.shape)] = np.nan
    return x * kept, lambda g: g * kept


def _layer_norm(x: Data, eps: float) -> tuple[Data, Callable[[Data], Data]]:
    centred = x - x.mean(axis=-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    y = centred * inverse

    def pullback(g: Data) -> Data:
        along = y * (g * y).mean(axis=-1, keepdims=True)
        return np.asarray(inverse * (g - g.mean(axis=-1, keepdims=True) - along))

    return y, pullback


def _rms_norm(x: Data, eps: float) -> tuple[Data, Callable[[Data], Data]]:
    inverse = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    y = x * inverse
    return y, lambda g: inverse * (g - y * (g * y).mean(axis=-1, keepdims=True))


ROW: Mapping[str, Row] = MappingProxyType(
    {
        "softmax": _softmax,
        "log_softmax": _log_softmax,
        "top_k": _top_k,
        "layer_norm": _layer_norm,
        "rms_norm": _rms_norm,
    }
)
"""Functions of a row by name: x and the name's parameters -> f(x) and its pullback."""
