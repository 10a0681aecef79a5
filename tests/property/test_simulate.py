"""Physics of the simulator, for any plan: what makes devices, links or work better never costs time.

Random programs under their best plan and small GPTs under random configurations; a change of the world keeps the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ir.mesh import Mesh
from ir.ops.parallel import transition_of
from ir.transition import COLLECTIVES, Collective
from pdv.cluster import Cluster, Device, Link, load_cluster
from pdv.cluster.description import DeviceClass
from pdv.cluster.routing.route import find_route
from pdv.cost.comm import AxisLink, axis_link, choice, least_seconds
from pdv.problem.workload import Execution, Overlap, Workload
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.engine.task import PICO
from pdv.simulate.lowering.links import Links
from pdv.simulate.stage import Lowered
from pdv.simulate.step import run, simulate
from tests.pdv.simulate.workloads import PLAIN, best, flat, gpt
from tests.pdv.worlds import DEVICE, problem, random_graph

MESHES = (Mesh.of(a=2), Mesh.of(a=2, b=3), Mesh.of(a=3, b=2))
SPECS = (
    "tp=2,dp=4,micro_batch=2,batch=16,activations=1,gradients=1",
    "tp=2,pp=2,dp=2,micro_batch=1,batch=16,zero=1,recompute=full",
    "pp=2,dp=4,micro_batch=1,batch=32,vp=2,schedule=interleaved,gradients=1",
    "dp=8,zero=3,micro_batch=2,batch=32,gathers=2",
    "tp=4,pp=2,micro_batch=1,batch=8,sp=1,fused=1,flash=0,recompute=selective",
)
quick = settings(max_examples=10)


def executions() -> st.SearchStrategy[Execution]:
    overlaps = st.builds(
        Overlap,
        gradients=st.booleans(),
        bucket_bytes=st.sampled_from([64.0, 1024.0, 2.0**20]),
        gathers=st.integers(0, 2),
        activations=st.booleans(),
        transfers=st.booleans(),
    )
    return st.builds(
        Execution,
        micro_batches=st.integers(1, 3),
        recompute=st.sampled_from(["none", "selective", "full"]),
        zero=st.sampled_from([0, 1]),
        data_axes=st.sampled_from([(), ("a",), ("a", "b")]),
        overlap=overlaps,
        fused=st.booleans(),
        flash=st.booleans(),
    )


@dataclass(frozen=True)
class Case:
    """A random program under its best plan, run in any way, on GPUs or CPUs."""

    seed: int
    mesh: Mesh
    kind: Literal["gpu", "cpu"]
    execution: Execution

    @cached_property
    def workload(self) -> Workload:
        found = planned(self.seed, self.mesh, self.kind)
        names = [axis.name for axis in self.mesh.axes]
        axes = tuple(name for name in self.execution.data_axes if name in names)
        return replace(found, execution=replace(self.execution, data_axes=axes))


@cache
def planned(seed: int, mesh: Mesh, kind: Literal["gpu", "cpu"]) -> Workload:
    device = replace(DEVICE, kind=kind)
    of = problem(random_graph(seed, 8), mesh, device=device)
    return best(of, devices=[device] * mesh.num_devices)


cases = st.builds(Case, st.integers(0, 15), st.sampled_from(MESHES), st.sampled_from(["gpu", "cpu"]), executions())


def changed(workload: Workload, device: Callable[[Device], Device], share: float = 1.0) -> Workload:
    """The same plan on other devices, and on links of so many times the bandwidth."""
    cluster = workload.cluster
    classes = tuple(replace(entry, device=device(entry.device)) for entry in cluster.classes)
    axes = tuple(tuple(_wider(axis, share) for axis in stage) for stage in workload.axes)
    return replace(workload, cluster=_linked(replace(cluster, classes=classes), share), axes=axes)


def _wider(axis: AxisLink, share: float) -> AxisLink:
    stages = tuple(replace(stage, link=_faster(stage.link, share)) for stage in axis.stages)
    return replace(axis, link=_faster(axis.link, share), stages=stages)


def _faster(link: Link, share: float) -> Link:
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * share)


def _linked(cluster: Cluster, share: float) -> Cluster:
    """Links inside nodes and ports of nodes alike."""
    nodes = tuple(
        replace(
            group, uplink_bytes_per_s=group.uplink_bytes_per_s * share,
            inside=tuple(replace(level, link=_faster(level.link, share)) for level in group.inside),
        )
        for group in cluster.nodes
    )  # fmt: skip
    return replace(cluster, nodes=nodes)


def times(device: Device, share: float) -> Device:
    """So many times as fast."""
    rates = {name: rate * share for name, rate in device.peak_flops.items()}
    return replace(
        device, peak_flops=rates, memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * share
    )  # fmt: skip


def step_ps(workload: Workload) -> int:
    return simulate(workload, draws=4).step_ps


def never_slower(workload: Workload, share: float) -> None:
    before = step_ps(workload)
    assert step_ps(changed(workload, lambda device: device, share)) <= before
    assert step_ps(changed(workload, lambda device: times(device, share))) <= before


@quick
@given(cases, st.floats(1.0, 8.0))
def test_bandwidth_and_faster_devices_never_cost_time(case: Case, share: float) -> None:
    never_slower(case.workload, share)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("share", [1.1, 4.0])
def test_nor_do_they_in_pipelines(spec: str, share: float) -> None:
    never_slower(gpt(spec), share)


@pytest.mark.parametrize("spec", SPECS)
def test_less_work_never_costs_time(spec: str) -> None:
    """Shorter sequences, narrower layers, a smaller vocabulary."""
    model = "gpt:layers=4,hidden={hidden},heads=8,seq={seq},vocab={vocab}"
    full = step_ps(gpt(spec, model=model.format(hidden=256, seq=128, vocab=2048)))
    for less in ({"hidden": 128}, {"seq": 64}, {"vocab": 1024}):
        assert step_ps(gpt(spec, model=model.format(**{"hidden": 256, "seq": 128, "vocab": 2048, **less}))) <= full


@quick
@given(cases, st.floats(0.0, 0.9))
def test_quicker_hosts_never_cost_time(case: Case, share: float) -> None:
    workload = case.workload
    quicker = replace(
        CALIBRATION,
        host_forward_s=CALIBRATION.host_forward_s * share,
        host_backward_s=CALIBRATION.host_backward_s * share,
        host_add_s=CALIBRATION.host_add_s * share,
        overlap_slowdown=1.0 + (CALIBRATION.overlap_slowdown - 1.0) * share,
        straggler_std=CALIBRATION.straggler_std * share,
    )
    assert simulate(workload, calibration=quicker, draws=4).step_ps <= step_ps(workload)


@settings(max_examples=100)
@given(
    st.sampled_from(sorted(COLLECTIVES)),
    st.integers(1, 8), st.integers(1, 8), st.floats(1.0, 1e10),
)  # fmt: skip
def test_a_collective_is_never_under_its_bandwidth_bound(
    collective: Collective, nodes: int, devices: int, num_bytes: float
) -> None:
    assume(nodes * devices > 1)
    link, port = Link("inside", 2e11, 2e-6), Link("port", 2.5e10, 5e-6)
    cluster = flat([DEVICE] * devices, link) if nodes == 1 else _two_levels(nodes, devices, link, port)
    axis = axis_link(nodes * devices, find_route(cluster, range(nodes * devices)))
    assert choice(collective, axis, num_bytes).seconds >= least_seconds(collective, axis, num_bytes) * (1 - 1e-12)


def _two_levels(nodes: int, devices: int, link: Link, port: Link) -> Cluster:
    node = {"count": nodes, "devices": devices, "device": "a100-80gb-sxm"}
    inside = {"name": link.name, "bandwidth": f"{link.bandwidth_bytes_per_s / 1e9} GB/s", "latency": "2 us"}
    outside = {"name": port.name, "bandwidth": f"{port.bandwidth_bytes_per_s / 1e9} GB/s", "latency": "5 us"}
    return load_cluster({"nodes": [{**node, **({"link": inside} if devices > 1 else {})}], "network": outside})


@quick
@given(cases)
def test_a_step_is_no_shorter_than_its_busiest_stream_or_its_critical_path(case: Case) -> None:
    workload = case.workload
    lowered = Lowered(workload, CALIBRATION)
    ran = run(lowered)
    (stage,) = lowered.stages
    (program,), micro_batches = stage.programs, workload.execution.micro_batches
    compute, streams = 0, [0] * max(stage.kind.links.num_streams, 1)
    passes = [program.forward, program.backward] * (micro_batches - 1) + [program.forward, program.last]
    tasks = [task for one in passes for placed in one for task in placed.segment.tasks] + list(stage.tail.tasks)
    for task in tasks:
        compute += task.duration if task.blocks else task.slows
        for stream in task.streams[:1]:
            streams[stream] += task.duration
    assert ran.end >= compute
    assert ran.end >= max(streams)
    assert ran.end >= sum(task.issue for task in tasks)


@quick
@given(cases)
def test_equal_devices_named_apart_are_one_class(case: Case) -> None:
    workload = case.workload
    count = workload.problem.mesh.num_devices
    device = workload.cluster.device_of(0)
    apart = flat([device] * (count // 2) + [replace(device, name="twin")] * (count - count // 2))
    nodes = tuple(replace(group, device_class=0) for group in apart.nodes)
    alike = replace(apart, nodes=nodes, classes=(DeviceClass(device, count),))
    one, two = (simulate(replace(workload, cluster=cluster), draws=4) for cluster in (alike, apart))
    assert len(two.breakdown) == 2 * len(one.breakdown)
    assert two.step_ps == one.step_ps
    for share in two.breakdown:
        assert share.parts == one.breakdown[0].parts


@pytest.mark.parametrize("spec", SPECS)
def test_units_commute(spec: str) -> None:
    """The same cluster in bits and in bytes, in thousands and in millions."""
    inside, outside = (
        {"name": "in", "bandwidth": "300 GB/s", "latency": "2 us"},
        {"name": "out", "bandwidth": "25 GB/s", "latency": "5 us"},
    )
    plain = gpt(spec, link=inside, network=outside)
    inside, outside = (
        {"name": "in", "bandwidth": "2400 Gb/s", "latency": "2000 ns"},
        {"name": "out", "bandwidth": "200000 Mb/s", "latency": "0.005 ms"},
    )
    assert step_ps(plain) == step_ps(gpt(spec, link=inside, network=outside))


@quick
@given(cases)
def test_moves_take_what_links_and_efficiency_allow(case: Case) -> None:
    workload = case.workload
    lowered = Lowered(workload, PLAIN)
    links = Links.of(workload, 0, PLAIN)
    for entry in lowered.nodes.entries.all:
        if entry.axis >= 0:
            for way, collective in enumerate(c.collective for c in transition_of(entry.name).communications):
                if collective is not None:
                    size = max(entry.held, entry.bytes)
                    least = least_seconds(collective, links.axes[entry.axis], size)
                    assert links.move(entry)[way] >= least * PICO * (1 - 1e-9) - 1


@quick
@given(cases)
def test_fusion_and_less_recomputation_never_cost_time(case: Case) -> None:
    workload = case.workload

    def step(**changes: Any) -> int:
        return step_ps(replace(workload, execution=replace(workload.execution, **changes)))

    assert step(fused=True) <= step(fused=False)
    assert step(recompute="none") <= step(recompute="selective") <= step(recompute="full")
    assert step(zero=1) <= step(zero=0) or workload.execution.data_axes


@quick
@given(cases, st.integers(1, 3))
def test_each_micro_batch_costs_time(case: Case, more: int) -> None:
    workload = case.workload
    execution = workload.execution
    longer = replace(execution, micro_batches=execution.micro_batches + more)
    assert step_ps(replace(workload, execution=longer)) > step_ps(workload)
