"""Curves of collectives: between, below and above their points; they go before α and β, and plans carry them."""

from __future__ import annotations

import json

import pytest

from pdv.cluster import Link
from pdv.cost.comm import (
    AxisLink,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    move_seconds,
    reduce_scatter_seconds,
)
from pdv.cost.curves import Curves

LINK = Link("slow", 1e8, 1e-4)
CURVES = Curves.of([("all_reduce", 1e6, 4e-3), ("all_reduce", 1e4, 1e-3), ("all_gather", 1e3, 5e-4)], "measured", 0.1)


@pytest.mark.parametrize(("num_bytes", "seconds"), [(1.0, 1e-3), (1e4, 1e-3), (1e5, 2e-3), (1e6, 4e-3), (2e6, 8e-3)])
def test_curves_go_through_their_points(num_bytes: float, seconds: float) -> None:
    assert CURVES.seconds("all_reduce", num_bytes) == pytest.approx(seconds)


def test_curves_never_fall() -> None:
    noisy = Curves.of(
        [("all_reduce", 1e3, 3e-3), ("all_reduce", 1e4, 2e-3), ("all_reduce", 1e5, 4e-3)], "measured", 0.1
    )
    found = [noisy.seconds("all_reduce", 2.0**power) or 0.0 for power in range(8, 20)]
    assert found == sorted(found)


def test_a_curve_goes_before_the_formula_and_others_keep_it() -> None:
    axis, plain = AxisLink(4, LINK, CURVES), AxisLink(4, LINK)
    assert all_reduce_seconds(axis, 1e6) == pytest.approx(4e-3)
    assert all_gather_seconds(axis, 1e3) == pytest.approx(5e-4)
    assert reduce_scatter_seconds(axis, 1e3) == pytest.approx(5e-4)  # the mirror of a gather
    assert all_to_all_seconds(axis, 1e3) == all_to_all_seconds(plain, 1e3)
    assert move_seconds("replicate", axis, 1e6) == (0.0, pytest.approx(4e-3))


def test_one_device_moves_nothing() -> None:
    assert all_reduce_seconds(AxisLink(1, LINK, CURVES), 1e6) == 0.0


def test_a_plan_carries_its_curves() -> None:
    assert Curves.from_dict(json.loads(json.dumps(CURVES.as_dict()))) == CURVES
