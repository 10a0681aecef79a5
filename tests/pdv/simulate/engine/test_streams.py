"""Events in time, on tasks made by hand; and what is remembered against what is simulated."""

from __future__ import annotations

import numpy as np
import pytest

from pdv.simulate.engine.streams import Clocks, Engine, simulate_tasks
from pdv.simulate.engine.task import COMPUTE, Placed, Segment, Task

ONE = (0,)


def kernel(duration: int, *, issue: int = 0, after: tuple[int, ...] = (), classes: tuple[int, ...] = ONE) -> Task:
    return Task("kernel", COMPUTE, classes, duration, issue, after=after)


def collective(duration: int, makes: int, *, stream: int = 0, slows: int = 0, classes: tuple[int, ...] = ONE) -> Task:
    return Task("all_reduce", "dp", classes, duration, 0, (stream,), blocks=False, makes=makes, slows=slows)


def ran(*tasks: Task, classes: int = 1, streams: int = 2) -> Clocks:
    clocks = Clocks.quiet(classes, streams)
    Engine().run((Placed(Segment(tasks)),), clocks)
    return clocks


def test_kernels_run_one_after_the_other() -> None:
    clocks = ran(kernel(5), kernel(7))
    assert clocks.compute == [12]
    assert clocks.parts == [{COMPUTE: 12}]


def test_a_device_waits_for_its_host_where_kernels_are_short() -> None:
    clocks = ran(kernel(100, issue=10), kernel(1, issue=10), kernel(1, issue=150))
    assert clocks.compute == [171]
    assert clocks.parts == [{COMPUTE: 102, "host": 10 + 59}]
    assert clocks.host == [170]


def test_a_collective_beside_compute_is_waited_for_where_its_result_is_read() -> None:
    clocks = ran(kernel(5), collective(20, makes=1), kernel(8), kernel(4, after=(1,)))
    assert clocks.compute == [29]
    assert clocks.parts == [{COMPUTE: 17, "dp": 12}]


def test_what_a_collective_slows_compute_by_hides_in_waiting() -> None:
    beside = ran(collective(20, makes=1, slows=2), kernel(30))
    exposed = ran(collective(20, makes=1, slows=2), kernel(4, after=(1,)))
    assert beside.compute == [32]
    assert exposed.compute == [24]


def test_transfers_over_one_link_take_turns() -> None:
    shared = ran(collective(20, makes=1), collective(20, makes=2), kernel(1, after=(1, 2)))
    apart = ran(collective(20, makes=1), collective(20, makes=2, stream=1), kernel(1, after=(1, 2)))
    assert shared.compute == [41]
    assert apart.compute == [21]


def test_a_collective_starts_when_the_last_class_has_come() -> None:
    both = (0, 1)
    waited = Task("all_reduce", "tp", both, 10, 0, (0,))
    clocks = ran(kernel(5), kernel(25, classes=(1,)), waited, kernel(1), classes=2)
    assert clocks.compute == [36, 35]
    assert clocks.parts == [{COMPUTE: 6, "waiting": 20, "tp": 10}, {COMPUTE: 25, "tp": 10}]


def test_equal_segments_are_simulated_once_a_state() -> None:
    layer = Segment((kernel(50, issue=10), Task("all_reduce", "tp", ONE, 30, 10, (0,)), kernel(20, issue=10)))
    engine, clocks = Engine(), Clocks.quiet(1, 1)
    engine.run([Placed(layer)] * 100, clocks)
    assert clocks.compute == [100 * 100 + 10]  # the first kernel waits for its host
    assert engine.runs == 2  # the host is behind only once, then ever further ahead


def test_a_launch_bound_layer_comes_to_rest_too() -> None:
    layer = Segment((kernel(1, issue=10), kernel(2, issue=10)))
    engine, clocks = Engine(), Clocks.quiet(1, 0)
    engine.run([Placed(layer)] * 100, clocks)
    assert clocks.compute == [100 * 20 + 2]
    assert engine.runs <= 3


@pytest.mark.parametrize("seed", range(30))
def test_what_is_remembered_is_what_would_have_been_simulated(seed: int) -> None:
    """Random segments, some of them awaiting what others made, in random order on two classes."""
    rng = np.random.default_rng(seed)
    segments = [Segment(tuple(drawn(rng) for _ in range(int(rng.integers(1, 6))))) for _ in range(4)]
    program = [Placed(segments[int(rng.integers(4))], 3 * place) for place in range(60)]
    remembered, plain, engine = Clocks.quiet(2, 2), Clocks.quiet(2, 2), Engine()
    engine.run(program, remembered)
    for segment, offset in program:
        simulate_tasks(segment, offset, plain)
    assert remembered.compute == plain.compute
    assert remembered.host == plain.host
    assert remembered.parts == plain.parts
    floor = min(plain.compute)  # a stream that has been free for longer may stand anywhere in the past
    assert [max(at, floor) for at in remembered.streams] == [max(at, floor) for at in plain.streams]
    for parts, at in zip(plain.parts, plain.compute, strict=True):
        assert sum(parts.values()) == at


def drawn(rng: np.random.Generator) -> Task:
    classes = [(0,), (1,), (0, 1)][int(rng.integers(3))]
    duration, issue = int(rng.integers(1, 40)), int(rng.integers(0, 12))
    after = tuple(int(n) for n in rng.integers(-3, 3, size=int(rng.integers(0, 3))))
    if rng.random() < 0.4:
        stream = int(rng.integers(2))
        return Task(
            "move", f"axis {stream}", classes, duration, issue, (stream,), blocks=False, makes=int(rng.integers(0, 3)),
            after=after, slows=int(rng.integers(0, 3)),
        )  # fmt: skip
    return Task("kernel", COMPUTE, classes, duration, issue, after=after)
