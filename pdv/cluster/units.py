"""Quantities with units: `"450 GB/s"` is 4.5e11 bytes per second. A bare number is refused: its unit would be a guess.

Prefixes are case-sensitive, and so are b (bit) and B (byte): a slip between them is a factor of eight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

NUMBER_AND_UNIT = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?(?:e[+-]?[0-9]{1,2})?)\s*([^\s0-9.]\S*)?\s*", re.ASCII)


class ValueProblem(ValueError):
    """What is wrong with one value of a description; the loader adds file and line to it."""

    def __init__(self, what: str, allowed: str = "", mend: str = "") -> None:
        super().__init__(what, allowed, mend)
        self.what = what
        self.allowed = allowed
        self.mend = mend


@dataclass(frozen=True, slots=True)
class Quantity:
    """A kind of quantity: its units as factors to SI, those it is shown in (`also` read), and its range."""

    name: str
    units: Mapping[str, float]
    shown: tuple[str, ...]
    low: float
    high: float
    example: str
    also: tuple[str, ...] = ()

    def parse(self, value: object) -> float:
        """`value`, a text such as `"450 GB/s"`, in SI units.

        Raises:
            Problem: no text, no number, no unit or another one, or a value that no hardware has.
        """
        match = NUMBER_AND_UNIT.fullmatch(value) if isinstance(value, str) else None
        if match is None or not match[2]:
            raise ValueProblem(
                f"{shorten(value)} is not a {self.name} with its unit",
                f"Allowed units: {', '.join(self.shown + self.also)}",
                f"Write it like {self.example!r}",
            )
        if match[2] not in self.units:
            near = sorted(unit for unit in self.units if unit.lower() == match[2].lower())
            raise ValueProblem(
                f"{shorten(value)} has the unit {shorten(match[2])}, which is none of {self.name}",
                f"Allowed units: {', '.join(self.shown + self.also)} (b is bit, B is byte)",
                f"Did you mean {' or '.join(near)}?" if near else f"Write it like {self.example!r}",
            )
        result = float(match[1]) * self.units[match[2]]
        if not self.low <= result <= self.high:
            raise ValueProblem(
                f"{shorten(value)} is no plausible {self.name}",
                f"Plausible are {self.format(self.low)} to {self.format(self.high)}",
                "Check the unit",
            )
        return result

    def format(self, value: float) -> str:
        """`value` (SI) in the largest shown unit that keeps it at least one."""
        by_size = sorted(self.shown, key=lambda unit: self.units[unit])
        unit = next((unit for unit in reversed(by_size) if self.units[unit] <= value), by_size[0])
        return f"{value / self.units[unit]:.4g} {unit}"


def shorten(value: object) -> str:
    """`value` as it may stand in a message: quoted, escaped, at most 60 characters."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _scale(base: str, prefixes: Mapping[str, float], factor: float = 1.0) -> dict[str, float]:
    return {prefix + base: size * factor for prefix, size in prefixes.items()}


DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

# The ranges are there to catch slips of a factor of 8 or 1000; they leave room for some years of hardware.
MEMORY = Quantity(
    "memory size", _scale("B", DECIMAL) | _scale("B", BINARY), ("MiB", "GiB", "TiB"), 2.0**26, 2.0**41, "80 GiB"
)
MEMORY_BANDWIDTH = Quantity(
    "memory bandwidth", _scale("B/s", DECIMAL) | _scale("B/s", BINARY), ("GB/s", "TB/s"), 1e9, 1e14, "2039 GB/s"
)
LINK_BANDWIDTH = Quantity(
    "link bandwidth",
    _scale("B/s", DECIMAL) | _scale("b/s", DECIMAL, 1 / 8) | _scale("bit/s", DECIMAL, 1 / 8),
    ("kB/s", "MB/s", "GB/s"),
    1e5,
    5e12,
    "400 Gb/s",
    also=("Mb/s", "Gb/s"),
)
COMPUTE = Quantity(
    "peak rate",
    _scale("FLOP/s", DECIMAL | {"P": 1e15}) | _scale("FLOPS", DECIMAL | {"P": 1e15}),
    ("GFLOP/s", "TFLOP/s", "PFLOP/s"),
    1e8,
    1e17,
    "312 TFLOP/s",
)
TIME = Quantity(
    "latency",
    {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0},  # two code points look like µ
    ("ns", "us", "ms"),
    1e-8,
    1.0,
    "3 us",
)
POWER = Quantity("power", {"W": 1.0, "kW": 1e3}, ("W", "kW"), 10.0, 5e3, "500 W")
CLOCK = Quantity("clock", _scale("Hz", DECIMAL), ("MHz", "GHz"), 1e8, 5e9, "1.2 GHz")
