"""Curves of mesh axes: for the links that the weights know, and for no others."""

from __future__ import annotations

import itertools

import pytest

from learned_cost.collectives.curves import SIZES, axis_curve


def test_an_axis_of_known_devices_has_curves_that_grow() -> None:
    found = axis_curve("A100-SXM4-80GB", "nvlink3", 8)
    assert found is not None
    rows, deviation = found
    assert 0 < deviation < 1
    for _, group in itertools.groupby(rows, key=lambda row: row[0]):
        seconds = [row[2] for row in group]
        assert seconds == sorted(seconds)
        assert len(seconds) == len(SIZES)
    large = next(row for row in rows if row[0] == "all_reduce" and row[1] == SIZES[-1])
    assert 1.75 * SIZES[-1] / large[2] == pytest.approx(212e9, rel=0.15)  # what the preset of the link says of NCCL


@pytest.mark.parametrize(
    ("device", "link", "size"),
    [("A100-SXM4-80GB", "my-own", 8), ("unheard-of", "nvlink3", 8), ("A100-SXM4-80GB", "ib-hdr", 8),
     ("A100-SXM4-80GB", "loopback-gloo", 2), ("A100-SXM4-80GB", "nvlink3", 1), ("cpu-core", "loopback-gloo", 77)],
)  # fmt: skip
def test_of_what_it_does_not_know_it_says_nothing(device: str, link: str, size: int) -> None:
    assert axis_curve(device, link, size) is None


def test_processes_are_priced_by_what_was_measured_with_their_share_of_a_core() -> None:
    assert axis_curve("cpu-core", "loopback-gloo", 2) is not None
    assert axis_curve("cpu-core", "loopback-gloo", 4, 0.5) is not None
    assert axis_curve("cpu-core", "loopback-gloo", 4) is None
    assert axis_curve("cpu-core", "loopback-gloo", 2, 0.5) is None
