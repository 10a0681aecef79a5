"""Peaks of a log, and storages that count who refers to them."""

from __future__ import annotations

from pdv.memory.allocator import round_up
from pdv.memory.log import Heap, Holder, Log

A, B = Holder("activations", "relu", 1), Holder("temporaries")


def test_the_peak_is_the_largest_sum_so_far() -> None:
    log = Log()
    for change in (10.0, -4.0, 7.0, -13.0, 2.0):
        log.add(change, A if change > 2 or change < -4 else B, "now")
    assert log.peak() == (13.0, 3)
    assert log.held(3) == {A: 17.0, B: -4.0}
    assert log.end == 2.0
    assert Log().peak() == (0.0, 0)


def test_a_storage_is_freed_by_its_last_reference() -> None:
    heap = Heap()
    storage = heap.allocate(100, A)
    heap.keep(storage)
    heap.drop(storage)
    assert heap.log.end == 100
    heap.hand_over(storage, B)
    assert heap.log.held() == {B: 100}
    heap.drop(storage)
    assert heap.log.end == 0


def test_a_gpu_rounds_sizes() -> None:
    heap = Heap(round_up)
    heap.allocate(1, A)
    heap.allocate(512, A)
    heap.allocate(513, A)
    assert heap.log.deltas == [512, 512, 1024]
