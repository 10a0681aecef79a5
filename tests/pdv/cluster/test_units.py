"""Quantities: what is read, and what is refused."""

from __future__ import annotations

import pytest

from pdv.cluster.units import COMPUTE, LINK_BANDWIDTH, MEMORY, MEMORY_BANDWIDTH, TIME, Quantity, ValueProblem


@pytest.mark.parametrize(
    ("quantity", "text", "value"),
    [
        (LINK_BANDWIDTH, "450 GB/s", 450e9),
        (LINK_BANDWIDTH, "400 Gb/s", 50e9),
        (LINK_BANDWIDTH, "400 Gbit/s", 50e9),
        (LINK_BANDWIDTH, "1.5e2MB/s", 150e6),
        (TIME, "3 us", 3e-6),
        (TIME, "3 µs", 3e-6),
        (TIME, "0.5 ms", 5e-4),
        (MEMORY, "80 GiB", 80 * 2**30),
        (MEMORY, "80 GB", 80e9),
        (MEMORY_BANDWIDTH, "4.8 TB/s", 4.8e12),
        (COMPUTE, "312 TFLOP/s", 312e12),
        (COMPUTE, "312 TFLOPS", 312e12),
    ],
)
def test_reads(quantity: Quantity, text: str, value: float) -> None:
    assert quantity.parse(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("quantity", "value"),
    [
        (LINK_BANDWIDTH, 450),
        (LINK_BANDWIDTH, "450"),
        (LINK_BANDWIDTH, "450 GB"),
        (LINK_BANDWIDTH, "450 gb/s"),
        (LINK_BANDWIDTH, "-450 GB/s"),
        (LINK_BANDWIDTH, "nan GB/s"),
        (LINK_BANDWIDTH, "inf GB/s"),
        (LINK_BANDWIDTH, "1e99 GB/s"),
        (LINK_BANDWIDTH, "0 GB/s"),
        (LINK_BANDWIDTH, "450 PB/s"),
        (LINK_BANDWIDTH, "9" * 5000 + " GB/s"),
        (LINK_BANDWIDTH, "٤٥٠ GB/s"),
        (LINK_BANDWIDTH, None),
        (LINK_BANDWIDTH, ["450 GB/s"]),
        (MEMORY, "80 Gb"),
        (MEMORY, "80 MB"[:1] + " B"),
        (TIME, "3 m"),
        (COMPUTE, "312 FLOP/s"),
    ],
)
def test_refuses(quantity: Quantity, value: object) -> None:
    with pytest.raises(ValueProblem) as caught:
        quantity.parse(value)
    assert len(str(caught.value.what)) < 200


def test_a_slip_of_case_is_suggested() -> None:
    with pytest.raises(ValueProblem) as caught:
        LINK_BANDWIDTH.parse("450 gb/s")
    assert caught.value.mend == "Did you mean GB/s or Gb/s?"


@pytest.mark.parametrize(
    ("value", "text"), [(450e9, "450 GB/s"), (1.25e9, "1.25 GB/s"), (4.3e5, "430 kB/s"), (1e5, "100 kB/s")]
)
def test_formats(value: float, text: str) -> None:
    assert LINK_BANDWIDTH.format(value) == text
