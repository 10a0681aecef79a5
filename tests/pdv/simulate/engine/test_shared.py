"""Stages whose processes share cores: nothing is lost, nothing is won from nowhere."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdv.cluster import load_cluster
from pdv.schedule.order import Pipeline
from pdv.simulate.engine.pipeline import Durations, Sends, compose
from pdv.simulate.engine.shared import Busy, Cores, compose_shared

ALL, NONE = Busy(1.0, 1.0, 1.0), Busy(0.0, 0.0, 0.0)
SHAPES = st.builds(
    Pipeline, st.integers(2, 4), st.just(1), st.integers(1, 6), st.sampled_from(["gpipe", "1f1b"])
)  # fmt: skip
TIMES = st.integers(10**6, 10**9)


def end(shape: Pipeline, busy: Busy, shares: tuple[float, ...], send: int = 0) -> int:
    chunks = [Durations(10**9, 2 * 10**9, 2 * 10**9)] * shape.stages
    sends = Sends([send] * (shape.stages - 1), [send] * (shape.stages - 1))
    return int(max(compose_shared(shape, chunks, [busy] * shape.stages, sends, Cores(shares), blocking=False).ends))


def test_who_waits_leaves_its_core_to_others() -> None:
    """Two processes on one core never idle: a step takes all its work, bubbles nothing."""
    shape = Pipeline(2, 1, 4, "1f1b")
    work = Fraction(2 * 4 * 3 * 10**9, 2)  # each pass is half of its nominal time on a whole core
    assert end(shape, ALL, (0.5, 0.5)) == pytest.approx(float(work), rel=1e-6)


def test_what_is_no_work_for_a_core_takes_its_time() -> None:
    shape = Pipeline(3, 1, 5, "1f1b")
    chunks = [Durations(10**9, 2 * 10**9, 2 * 10**9)] * 3
    sends = Sends([10**7] * 2, [10**7] * 2)
    alone = compose(shape, chunks, sends, blocking=False)
    shared = compose_shared(shape, chunks, [NONE] * 3, sends, Cores((0.5,) * 3), blocking=False)
    assert shared.ends == alone.ends
    assert shared.passes == alone.passes


@settings(max_examples=60)
@given(SHAPES, st.lists(st.tuples(TIMES, TIMES), min_size=4, max_size=4), st.sampled_from([0.25, 0.5, 0.75]), TIMES)
def test_a_step_is_between_its_work_and_what_it_takes_on_quotas(
    shape: Pipeline, times: list[tuple[int, int]], share: float, send: int
) -> None:
    chunks = [Durations(forward, backward, backward) for forward, backward in times[: shape.stages]]
    sends = Sends([send] * (shape.stages - 1), [send] * (shape.stages - 1))
    cores = Cores((share,) * shape.stages)
    line = compose_shared(shape, chunks, [ALL] * shape.stages, sends, cores, blocking=False)
    quota = compose(shape, chunks, sends, blocking=False)
    work = share * shape.micro_batches * sum(one.forward + one.backward for one in chunks)
    assert max(line.ends) <= max(quota.ends) * (1 + 1e-3) + 100
    assert max(line.ends) >= work / min(share * shape.stages, shape.stages) * (1 - 1e-3) - 100
    for stage, passes in enumerate(line.passes):
        nominal = shape.micro_batches * (chunks[stage].forward + chunks[stage].backward)
        assert sum(finish - start for _, start, finish in passes) == nominal - line.gained[stage]
        assert nominal - line.gained[stage] + sum(line.waits[stage].values()) == line.ends[stage]


@settings(max_examples=60)
@given(
    SHAPES,
    st.lists(st.tuples(TIMES, TIMES), min_size=4, max_size=4),
    st.lists(st.sampled_from([0.25, 0.5, 0.75]), min_size=4, max_size=4),
    TIMES,
)
def test_nobody_has_more_than_its_quota_of_a_step(
    shape: Pipeline, times: list[tuple[int, int]], shares: list[float], send: int
) -> None:
    chunks = [Durations(forward, backward, backward) for forward, backward in times[: shape.stages]]
    sends = Sends([send] * (shape.stages - 1), [send] * (shape.stages - 1))
    cores = Cores(tuple(shares[: shape.stages]), quota=True)
    line = compose_shared(shape, chunks, [ALL] * shape.stages, sends, cores, blocking=False)
    steady = compose(shape, chunks, sends, blocking=False)
    assert max(line.ends) <= max(steady.ends) * (1 + 1e-3) + 1000
    for stage, own in enumerate(chunks):
        assert line.ends[stage] >= shape.micro_batches * (own.forward + own.backward) * (1 - 1e-3) - 1000


def test_who_has_waited_runs_its_next_pass_on_what_it_left() -> None:
    """A quarter of a core: of a pass of 80 ms nominally, 20 on a core, behind 120 that it waited, of which 30 count."""
    shape, ms = Pipeline(2, 1, 1, "1f1b"), 10**9
    chunks = [Durations(120 * ms, 10 * ms, 10 * ms), Durations(80 * ms, 40 * ms, 40 * ms)]
    cores = Cores((0.75, 0.25), quota=True)
    line = compose_shared(shape, chunks, [ALL] * 2, Sends([0], [0]), cores, blocking=False)
    (_, start, forward), (_, again, backward) = line.passes[1]
    assert (start, forward - start) == pytest.approx((120 * ms, 20 * ms), rel=1e-3)
    left = 0.25 * 100 - 0.75 * 20  # at most what 100 ms give; beside the pass, as it runs, there is more
    own = left / 0.75  # ms on a core of its own until nothing is left, and at a quarter then
    assert again == forward
    assert backward - again == pytest.approx((own + (10 - own) * 4 if own < 10 else 10) * ms, rel=1e-3)


def test_devices_of_ones_own_are_not_shared() -> None:
    def of(*shares: float, quota: bool = False) -> Cores | None:
        devices = [{"preset": "cpu-core", "share": share, "quota": quota} for share in shares]
        nodes = [{"devices": 2, "device": device, "link": "loopback-gloo"} for device in devices]
        return Cores.of(load_cluster({"nodes": nodes, "network": "ethernet-10g"}), 2)

    assert of(0.5, 0.5) == Cores((0.5, 0.5))
    assert of(1.0, 1.0) is None
    assert of(0.5, 0.5, quota=True) == Cores((0.5, 0.5), quota=True)
    assert of(0.7, 0.3, quota=True) == Cores((0.7, 0.3), quota=True)
    assert of(0.7, 0.3) is None
