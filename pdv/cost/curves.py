"""Seconds of collectives as curves over bytes, where they are known better than by α and β.

A curve is a few points, measured or predicted. Plans carry the points they were made with (plan.json), so that a
replay, which moves values by the cheapest chains of collectives, needs neither measurements nor weights.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ir.cost_model import Source

Points = tuple[tuple[float, float], ...]  # (bytes, seconds), by bytes


@dataclass(frozen=True, slots=True)
class Curves:
    """Of one mesh axis.

    Attributes:
        points: by collective ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"). Bytes count the larger side:
            the result of an all-gather, the input of the others.
        source: where they are from.
        relative_std: deviation over seconds.
    """

    points: tuple[tuple[str, Points], ...]
    source: Source
    relative_std: float

    @classmethod
    def of(cls, rows: Iterable[tuple[str, float, float]], source: Source, relative_std: float) -> Curves:
        """Of (collective, bytes, seconds) in any order; seconds are made to grow with bytes.

        What falls is the mean of its neighbourhood: the nearest that grows, in squares (Ayer et al., "An empirical
        distribution function for sampling with incomplete information", 1955).
        """
        curves: dict[str, dict[float, float]] = {}
        for collective, num_bytes, seconds in rows:
            curves.setdefault(collective, {})[float(num_bytes)] = float(seconds)
        return cls(tuple((name, _growing(curves[name])) for name in sorted(curves)), source, relative_std)

    def seconds(self, collective: str, num_bytes: float) -> float | None:
        """Between points by powers; below the first as the first, above the last in proportion. None: no such curve."""
        curve = next((points for name, points in self.points if name == collective), None)
        if curve is None:
            return None
        after = bisect.bisect_right(curve, num_bytes, key=_bytes)
        if after == 0:
            return curve[0][1]
        (low, low_s) = curve[after - 1]
        if after == len(curve):
            return low_s * num_bytes / low
        (high, high_s) = curve[after]
        share = math.log(num_bytes / low) / math.log(high / low)
        return float(low_s * (high_s / low_s) ** share)

    def as_dict(self) -> dict[str, Any]:  # Any: JSON
        """For plan.json; ``from_dict`` is its inverse."""
        points = {name: [list(point) for point in points] for name, points in self.points}
        return {"source": self.source, "relative_std": self.relative_std, "points": points}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Curves:
        """The inverse of ``as_dict``.

        Raises:
            KeyError, TypeError, ValueError: if a field is missing or no number.
        """
        rows = [(name, float(b), float(s)) for name, points in data["points"].items() for b, s in points]
        sources: dict[str, Source] = {"measured": "measured", "learned": "learned"}
        return cls.of(rows, sources[data["source"]], float(data["relative_std"]))


def _growing(curve: Mapping[float, float]) -> Points:
    sizes, pools = sorted(curve), list[list[float]]()
    for num_bytes in sizes:
        pools.append([curve[num_bytes]])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            pools[-2:] = [[*pools[-2], *pools[-1]]]
    return tuple(zip(sizes, (fmean(pool) for pool in pools for _ in pool), strict=True))


def _bytes(point: tuple[float, float]) -> float:
    return point[0]
