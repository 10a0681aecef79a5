"""A run measures rows that the reader of folders takes; run again, it goes on."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ir.errors import UsageError, WriteError
from ir.types import DType, TensorType
from learned_cost.data.dataset import read_folder
from learned_cost.data.kernel import Subgraph
from learned_cost.devices.device import record
from learned_cost.profile import session, timing
from learned_cost.profile.command import Options as CommandOptions
from learned_cost.profile.command import choose_groups, cluster_of, here, keep, torch_device
from learned_cost.profile.programs.groups import Limits, OperatorGroup, RowTask, SubgraphGroup, tasks_of
from learned_cost.profile.programs.pieces import Piece
from learned_cost.profile.rows import Setting, fold, kernel_of, kernel_row, measured_key
from learned_cost.profile.session import learn_from, run
from learned_cost.profile.store import Store
from learned_cost.profile.timing import Caches, Stopwatch, Timing
from pdv.cluster import load_cluster
from tests.learned_cost.clocks import Clocks

CPU = torch.device("cpu")
RECORD = record("cpu-core")
SETTING = Setting.here(CPU, RECORD)
LIMITS = Limits(SETTING, 1e-5, (DType.F32,))


def some_pieces(count: int) -> list[Piece]:
    return [Piece("relu", (TensorType((4, 8 * (i + 1)), DType.F32),), (), (True,), "test") for i in range(count)]


class Few(OperatorGroup):
    """Given shapes alone, none sampled."""

    def turn(self) -> Any:
        piece = self._pool.take()
        return None if piece is None else list(tasks_of(piece))


@pytest.fixture
def watch() -> Stopwatch:
    torch.set_num_threads(1)
    return Stopwatch(CPU, 1 << 16, limit_s=1e-3)


def measure(folder: Path, watch: Stopwatch, count: int) -> Counter[str]:
    with Store(folder) as store:
        return run(store, [Few("relu", LIMITS, planned=some_pieces(count))], SETTING, watch, budget_s=5.0).measured


def test_rows_are_what_the_reader_takes(tmp_path: Path, watch: Stopwatch) -> None:
    assert measure(tmp_path, watch, 3) == {"relu": 6}
    table = read_folder(tmp_path).kernels
    assert table is not None
    assert len(table) == 6
    assert set(table.text("direction")) == {"forward", "backward"}
    assert set(table.text("gpu")) == {"cpu-core"}
    assert set(table.text("stack")) == {"torch"}
    assert set(table.text("plan")) == {"test"}
    with Store(tmp_path) as store:
        rows = store.read()
    first = min(rows, key=lambda row: row["n"])
    assert kernel_of(first).dims == {"m": 4, "n": 8}
    assert all(row["fold"] == fold(kernel_of(row)) for row in rows)
    by_shape: dict[int, set[int]] = {}
    for row in rows:
        by_shape.setdefault(row["n"], set()).add(row["fold"])
    assert all(len(folds) == 1 for folds in by_shape.values())


def test_run_again_it_goes_on(tmp_path: Path, watch: Stopwatch) -> None:
    measure(tmp_path, watch, 2)
    assert measure(tmp_path, watch, 3) == {"relu": 2}
    assert measure(tmp_path, watch, 3) == {}


def test_subgraphs_of_an_earlier_run_are_no_hindrance(tmp_path: Path, watch: Stopwatch) -> None:
    what = Subgraph((some_pieces(1)[0].forward,), (), fused=True, bytes=256.0)
    with Store(tmp_path) as store:
        store.append(kernel_row(SETTING, what, Timing(1e-5, 1e-7, 3)))
        groups = [SubgraphGroup(LIMITS), Few("relu", LIMITS, planned=some_pieces(1))]
        assert run(store, groups[1:], SETTING, watch, budget_s=5.0).before == 1
        learn_from(store.read(), groups)
    table = read_folder(tmp_path).kernels
    assert table is not None
    assert table.is_text("op", "subgraph").sum() == 1


def test_what_cannot_be_run_is_counted(tmp_path: Path, watch: Stopwatch) -> None:
    def broken(device: torch.device) -> Any:
        raise NotImplementedError('"relu" not implemented for this')

    class Broken(Few):
        def turn(self) -> Any:
            piece = self._pool.take()
            return None if piece is None else [RowTask(piece.forward, broken)]

    with Store(tmp_path) as store:
        outcome = run(store, [Broken("relu", LIMITS, planned=some_pieces(2))], SETTING, watch, budget_s=5.0)
    assert list(outcome.failed.values()) == [2]
    assert "not implemented" in next(iter(outcome.failed))
    assert outcome.measured == {}


def test_the_budget_ends_it(tmp_path: Path, watch: Stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks()
    monkeypatch.setattr(session, "time", clocks)

    class Slow(Few):
        def turn(self) -> Any:
            clocks.work(0.4)
            return super().turn()

    with Store(tmp_path) as store:
        outcome = run(store, [Slow("relu", LIMITS, planned=some_pieces(9))], SETTING, watch, budget_s=1.0)
    assert clocks.monotonic() == pytest.approx(1.2)
    assert outcome.measured["relu"] == 4  # forward and backward of what began within the budget


def test_what_is_too_large_is_not_measured() -> None:
    large = Piece("relu", (TensorType((1 << 15, 1 << 15), DType.F32),))
    assert not LIMITS.allow(large)
    assert not LIMITS.allow(Piece("relu", (TensorType((4, 4), DType.BF16),)))
    assert LIMITS.allow(some_pieces(1)[0])


def test_keys_tell_measurements_apart() -> None:
    row = {"gpu": "T4", "op": "relu", "m": 3, "stack": "torch", "l2": "warm"}
    assert measured_key(row) == measured_key(row | {"latency_us": 3.0, "stack": "cudagraph"})
    assert measured_key(row) != measured_key(row | {"l2": "cold"})
    assert measured_key(row) != measured_key(row | {"stack": "inductor"})


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(timing, "time", clocks)
    return clocks


@pytest.mark.parametrize("caches", ["warm", "cold"])
def test_a_time_is_a_median(watch: Stopwatch, clocks: Clocks, caches: Caches) -> None:
    lasts = itertools.chain([0.5, 0.25, 0.25] if caches == "warm" else [0.5, 0.25], [0.004, 0.002, 0.003])
    measured = watch.measure(lambda: clocks.work(next(lasts)), caches)
    assert (measured.best_s, measured.median_s, measured.repeats) == pytest.approx((0.002, 0.003, 3))


def test_short_calls_are_repeated(watch: Stopwatch, clocks: Clocks) -> None:
    calls = itertools.count()
    assert watch.measure(lambda: clocks.work(1e-5 + 0 * next(calls))).median_s == pytest.approx(1e-5)
    assert next(calls) == 3 + 3 * 100  # a thousandth of a second each


def test_disturbed_samples_are_taken_again(watch: Stopwatch, clocks: Clocks) -> None:
    waits = itertools.chain([0.0] * 3, [0.005, 0.0] * 3)
    assert watch.measure(lambda: (clocks.work(0.002), clocks.wait(next(waits)))).median_s == pytest.approx(0.002)
    assert next(waits, None) is None


def test_time_of_other_processes_does_not_count(watch: Stopwatch, clocks: Clocks) -> None:
    measured = watch.measure(lambda: (clocks.work(0.001), clocks.wait(0.005)))
    assert measured.median_s == pytest.approx(0.001)


def test_names_of_operators() -> None:
    assert choose_groups(("bmm", "layernorm", "subgraph")) == {"matmul", "layer_norm", "subgraph"}
    assert {"linear", "triton", "subgraph"} <= choose_groups(())
    with pytest.raises(UsageError, match="Did you mean 'linear'"):
        choose_groups(("liner",))


def test_there_is_no_gpu_here() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UsageError, match="--device cpu"):
        torch_device("cuda", 1)


def test_records_that_do_not_ship_are_kept_beside_the_rows(tmp_path: Path) -> None:
    own = RECORD.model_copy(update={"name": "my-cpu"})
    keep(own, tmp_path / "mine" / "my-cpu.yaml")
    options = CommandOptions("cpu", tmp_path / "rows", 1.0, known="my-cpu", devices=tmp_path / "mine")
    assert here(options, CPU) == own
    assert here(CommandOptions("cpu", tmp_path / "rows", 1.0), CPU) == own  # found again, not measured again
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError):
        keep(own, tmp_path / "file" / "x.yaml")


@pytest.mark.parametrize(("name", "count"), [("cpu-core", 2), ("H100-SXM-80GB", 8), ("T4", 1)])
def test_a_detected_cluster_is_one_that_loads(name: str, count: int) -> None:
    cluster = load_cluster(cluster_of(record(name), count))
    assert cluster.num_devices == count
    device = cluster.classes[0].device
    assert device.name == name
    assert device.peak("float32") == pytest.approx(record(name).peak("fp32"), rel=1e-4)
