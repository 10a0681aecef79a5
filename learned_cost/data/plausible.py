"""Rows of a profile whose times no device takes: seconds or milliseconds in a column of microseconds, mostly.

Arithmetic and traffic of a row are known, and so are the rates of its device. A time may be far from the roofline for
good reasons (caches, Winograd's products, sparse work; launches, atomics, conversions), but not by these factors.
``implausible`` is the entry point.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from learned_cost.data.table import Table
from learned_cost.devices.device import DeviceRecord

FASTER = 10.0  # times the highest peak rate of a device, in any type; measured are at most 0.95 of the peak
CACHED = 100.0  # times the memory's rate; what lies in caches was measured at up to 4 times
SLOWER = 1000.0  # times the roofline at the lowest peak; measured are at most 90 times, of 0.1 ms and more
SHORT_S = 1e-4  # less than this, launches and clocks decide
DIRECTIONS = ("forward", "backward")
UNIT = "latency_us is in microseconds: check its unit"

Rates = NDArray[np.float64]
Complaint = tuple[str, str, str, NDArray[np.bool_]]


def implausible(table: Table, devices: Mapping[str, DeviceRecord]) -> Iterator[Complaint]:
    """What is wrong, what is allowed, how to mend it, and in which rows; of kernels on devices that have a record."""
    if "flops" not in table or "bytes" not in table:
        return
    highest, lowest, memory = _rates(table, devices)
    trusted = ~table["suspect"] if "suspect" in table else np.ones(len(table), dtype=bool)
    seconds, flops, moved = table["latency_us"] * 1e-6, table["flops"], table["bytes"]
    with np.errstate(divide="ignore", invalid="ignore"):
        fast = (flops / seconds > FASTER * highest) | (moved / seconds > CACHED * memory)
        roofline = np.fmax(flops / lowest, moved / memory)
        slow = (roofline > 0.0) & (seconds > SLOWER * np.maximum(roofline, SHORT_S))
    allowed = f"At most {FASTER:g} times the device's highest peak rate, {CACHED:g} times its memory's"
    yield "latency_us is less than the device can take", allowed, UNIT, fast & trusted
    allowed = f"At most {SLOWER:g} times what the device takes at its lowest peak rate"
    yield "latency_us is more than any kernel takes", allowed, UNIT, slow & trusted
    if "direction" in table:
        good = np.array([*(name in DIRECTIONS for name in table.vocab["direction"]), True])
        allowed = f"Allowed: {', '.join(DIRECTIONS)}, or nothing"
        yield "direction is none", allowed, "Name it", ~good[table["direction"]]


def _rates(table: Table, devices: Mapping[str, DeviceRecord]) -> tuple[Rates, Rates, Rates]:
    """FLOP/s at the highest and the lowest peak, and bytes/s of memory, of each row's device; NaN where unknown."""
    unknown = (np.nan, np.nan, np.nan)

    def of(name: str) -> tuple[float, float, float]:
        device = devices.get(name)
        if device is None or not device.peak_flops:
            return unknown
        peaks = device.peak_flops.values()
        return max(peaks), min(peaks), device.memory_bandwidth_bytes_per_s

    rates = np.array([*map(of, table.vocab["gpu"]), unknown])[table["gpu"]]
    return rates[:, 0], rates[:, 1], rates[:, 2]
