"""Which element of a dim each of its resized is nearest to, counted in float32 as ONNX Runtime counts.

Entry point: ``nearest_lines``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pdv.frontend.onnx.call import Call
from pdv.frontend.onnx.reference import resized_to
from pdv.passes.fold_constants import Array

_ROUND: Mapping[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda at: np.ceil(at - np.float32(0.5)),
    "round_prefer_ceil": lambda at: np.floor(at + np.float32(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}


def nearest_lines(c: Call) -> list[Array]:
    """Of each dim of operand 0 the numbers of its elements in the result."""
    shape, earlier = c[0].type.shape, c.opset < 11
    how = "asymmetric" if earlier else c.attrs.get("coordinate_transformation_mode", "half_pixel")
    whole = _ROUND["floor" if earlier else c.attrs.get("nearest_mode", "round_prefer_floor")]
    lines = [np.arange(size) for size in shape]
    for dim, (size, scale) in _stretches(c, earlier).items():
        found = whole(_places(how, shape[dim], size, np.float32(scale)))
        lines[dim] = np.clip(found, 0, shape[dim] - 1).astype(np.int64)
    return lines


def _stretches(c: Call, earlier: bool) -> dict[int, tuple[int, float]]:
    """Dim -> (its size in the result, by what it is stretched)."""
    shape = c[0].type.shape
    axes = [c.dim(axis) for axis in c.attrs.get("axes", range(len(shape)))]
    at = 1 if earlier else 2
    scales = c.attrs["scales"] if "scales" in c.attrs else c.array(at) if c.get(at) is not None else np.zeros(0)
    if len(scales):
        return {dim: (resized_to(shape[dim], by), float(by)) for dim, by in zip(axes, scales, strict=True)}
    sizes = c.ints(3) or ()
    each = [np.float32(size) / np.float32(shape[dim]) for dim, size in zip(axes, sizes, strict=True)]
    policy = c.attrs.get("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return {dim: (size, float(by)) for dim, size, by in zip(axes, sizes, each, strict=True)}
    by = min(each) if policy == "not_larger" else max(each)
    return {dim: (int(np.floor(by * np.float32(shape[dim]) + np.float32(0.5))), float(by)) for dim in axes}


def _places(how: str, before: int, after: int, scale: np.float32) -> Array:
    """Where the elements of the result lie among those before."""
    half, number = np.float32(0.5), np.arange(after, dtype=np.float32)
    match how:
        case "asymmetric":
            return number / scale
        case "align_corners":
            return number * np.float32(before - 1) / np.float32(max(after - 1, 1))
        case "pytorch_half_pixel" if after == 1:
            return np.zeros(1, np.float32)
        case "half_pixel" | "pytorch_half_pixel":
            return (number + half) / scale - half
        case "half_pixel_symmetric":
            offset = np.float32(before) * half * (1 - np.float32(after) / (scale * np.float32(before)))
            return offset + (number + half) / scale - half
    raise ValueError(f"coordinate_transformation_mode {how}")
