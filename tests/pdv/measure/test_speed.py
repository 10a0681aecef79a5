"""A machine's speed: what was measured over what was predicted, and what it does to prices."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ir.builder import Builder
from ir.cost_model import Query
from ir.errors import UsageError
from ir.graph import Graph
from ir.types import DType, TensorType
from learned_cost.data.measured import SHIPPED
from learned_cost.profile import passes
from learned_cost.profile.passes import measure_passes
from pdv.cli.app import run
from pdv.cluster import Device, load_cluster
from pdv.cluster.presets import DEVICES
from pdv.cost.sources import told_speeds
from pdv.measure import speed
from pdv.measure.speed import present_speed
from pdv.prices import cost_model

CORE = DEVICES["cpu-core"]


def product() -> Graph:
    k = Builder()
    x, w = (TensorType(shape, DType.F32) for shape in ((512, 256), (256, 256)))
    return k.graph({"y": k.linear(k.input("x", x), k.param("w", w))})


@pytest.fixture
def twice_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured is twice what is predicted, a little more in the first process."""

    def measured(programs: Sequence[Callable[[], Graph]], processes: int, seconds: float) -> list[list[float]]:
        assert seconds > 0.0
        twice = [2.0 * speed._predict(make(), CORE) for make in programs]
        return [[found * (1.02 if process == 0 else 1.0) for process in range(processes)] for found in twice]

    monkeypatch.setattr(passes, "measure_passes", measured)


@pytest.mark.usefixtures("twice_as_slow")
def test_speed_is_predicted_over_measured_whatever_the_file_said_before() -> None:
    found = present_speed(replace(CORE, share=0.5, speed=3.0), 4)
    assert found.factor == pytest.approx(0.5, rel=0.02)
    assert 0.0 < found.spread < 0.02


@pytest.mark.usefixtures("twice_as_slow")
def test_detect_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "cluster.yaml"
    assert run(["cluster", "detect", "--device", "cpu-core", "--count", "64", "--json", "-o", str(output)]) == 0
    told = json.loads(capsys.readouterr().out)
    (entry,) = load_cluster(output).classes
    assert (entry.count, entry.device.name) == (64, "cpu-core")
    assert entry.device.speed == pytest.approx(told["speed"]["factor"], abs=1e-3) == pytest.approx(0.5, rel=0.02)
    assert entry.device.share < 1.0  # 64 processes have no core each


def test_passes_are_timed_on_every_process() -> None:
    (found,) = measure_passes([product], 2, 0.01)
    assert len(found) == 2
    assert all(0.0 < seconds < 1.0 for seconds in found)


def test_what_is_not_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="h100-80gb-sxm is not measured"):
        present_speed(DEVICES["h100-80gb-sxm"], 4)

    def dead(*_: object) -> None:
        raise RuntimeError("a process ended")

    monkeypatch.setattr(passes, "measure_passes", dead)
    with pytest.raises(UsageError, match="a process ended"):
        present_speed(CORE, 4)


@pytest.mark.parametrize("cost", ["auto", "analytic", "learned", "measured"])
def test_every_price_of_a_slow_machine_is_longer(cost: str) -> None:
    node = product().outputs[0][1]
    query = Query.of(node, node.loops, train=True)

    def seconds(device: Device) -> list[float]:
        model = cost_model(cost, [device])
        (found,) = model.nodes([query])
        return [found.forward.mean_s, found.backward.mean_s, model.optimizer(1e6).mean_s]

    for whole, slow in zip(seconds(CORE), seconds(replace(CORE, speed=0.5)), strict=True):
        assert slow == pytest.approx(2.0 * whole, rel=1e-3)


def test_files_of_ones_own_were_measured_here() -> None:
    node = product().outputs[0][1]
    query = Query.of(node, node.loops, train=True)
    own = [cost_model(SHIPPED / "cpu-core", [replace(CORE, speed=factor)]).nodes([query]) for factor in (1.0, 0.5)]
    assert own[0] == own[1]


def test_a_plan_says_at_what_speed_it_was_priced() -> None:
    assert told_speeds([CORE, replace(CORE, speed=0.857)]) == ", cpu-core at 0.86 of its speed"
