"""α–β seconds of collectives: never under what bandwidth allows, nothing for a group of one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ir.ops.parallel import TRANSITIONS
from pdv.cluster import Link
from pdv.cost.comm import (
    AxisLink,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    calling_s,
    joint_link,
    move_seconds,
    reduce_scatter_seconds,
)
from tests.pdv.worlds import DEVICE

LINK = Link("wire", 1e9, 1e-6)
SIZES = (2, 3, 4, 6, 8, 64)
BYTES = (0.0, 8.0, 1e3, 1e9)


@pytest.mark.parametrize(("size", "num_bytes"), list(itertools.product(SIZES, BYTES)))
def test_no_collective_beats_its_bandwidth_or_its_latency(size: int, num_bytes: float) -> None:
    """Of b bytes, (n - 1) / n pass a device's port in each half of an all-reduce (Patarasuk and Yuan, JPDC 2009)."""
    axis = AxisLink(size, LINK)
    least = num_bytes * (size - 1) / size / LINK.bandwidth_bytes_per_s
    steps = (size - 1).bit_length()  # ceil(log2 n): nobody knows of all before that
    for seconds in (all_gather_seconds(axis, num_bytes), reduce_scatter_seconds(axis, num_bytes)):
        assert seconds >= least + steps * LINK.latency_s - 1e-18
    assert all_reduce_seconds(axis, num_bytes) >= 2 * least
    assert all_to_all_seconds(axis, num_bytes) >= least
    assert all_to_all_seconds(axis, num_bytes) >= LINK.latency_s


def test_more_bytes_never_take_less() -> None:
    for collective in (all_gather_seconds, reduce_scatter_seconds, all_reduce_seconds, all_to_all_seconds):
        for size in SIZES:
            seconds = [collective(AxisLink(size, LINK), num_bytes) for num_bytes in BYTES]
            assert seconds == sorted(seconds)


@pytest.mark.parametrize("name", TRANSITIONS)
def test_an_axis_of_one_is_free(name: str) -> None:
    assert move_seconds(name, AxisLink(1, Link("none", float("inf"), 0.0)), 1e9) == (0.0, 0.0)
    assert move_seconds(name, AxisLink(1, LINK), 1e9) == (0.0, 0.0)


def test_backward_is_the_dual() -> None:
    """What one operator does forward, its dual does backward, on the tensor as it is then cut."""
    axis, whole = AxisLink(4, LINK), 4096.0
    part = whole / 4
    assert move_seconds("partition", axis, whole)[::-1] == move_seconds("combine", axis, part)
    assert move_seconds("replicate", axis, whole)[::-1] == move_seconds("reduce", axis, whole)
    assert move_seconds("all_gather", axis, part)[::-1] == move_seconds("reduce_scatter", axis, whole)
    for own in ("all_to_all", "reduce_replicate"):
        assert move_seconds(own, axis, part)[0] == move_seconds(own, axis, part)[1]


def test_a_fusion_never_costs_more_than_its_parts() -> None:
    axis, whole = AxisLink(4, LINK), 4096.0
    part = whole / 4
    for fused, held, parts in (
        ("all_gather", part, (("combine", part), ("replicate", whole))),
        ("reduce_scatter", whole, (("reduce", whole), ("partition", whole))),
        ("all_to_all", part, (("combine", part), ("partition", whole))),
        ("reduce_replicate", whole, (("reduce", whole), ("replicate", whole))),
    ):
        alone = sum(sum(move_seconds(name, axis, num_bytes)) for name, num_bytes in parts)
        assert sum(move_seconds(fused, axis, held)) <= alone + 1e-18


@pytest.mark.parametrize("name", TRANSITIONS)
def test_each_collective_is_called_once(name: str) -> None:
    axis = AxisLink(4, LINK)
    transition = TRANSITIONS[name]
    pairs = zip(move_seconds(name, axis, 64.0), move_seconds(name, replace(axis, called_s=1e-3), 64.0), strict=True)
    for communication, (sent_s, called_s) in zip(transition.communications, pairs, strict=True):
        assert called_s - sent_s == pytest.approx(1e-3 if communication.collective else 0.0)


def test_several_axes_are_called_as_one() -> None:
    one, other = (AxisLink(size, LINK, called_s=called_s) for size, called_s in ((2, 1e-3), (4, 2e-3)))
    assert joint_link((one, other)).called_s == 2e-3


def test_hosts_of_gpus_call_ahead() -> None:
    cpu = replace(DEVICE, kind="cpu")
    assert calling_s((DEVICE,)) == 0.0
    assert 0.0 < calling_s((cpu,)) < calling_s((DEVICE, replace(cpu, share=0.5)))


def test_every_parallel_operator_has_a_price() -> None:
    for name in TRANSITIONS:
        forward_s, backward_s = move_seconds(name, AxisLink(2, LINK), 64.0)
        assert forward_s + backward_s > 0.0
    with pytest.raises(AssertionError):
        move_seconds("broadcast", AxisLink(2, LINK), 64.0)
