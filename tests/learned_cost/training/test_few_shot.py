"""`adapt`: a few kernels of a device become weights that know it; what cannot be is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ir.errors import DataError, WeightsError
from learned_cost.data.dataset import Dataset, read_folder
from learned_cost.data.kernel import Kernel, Subgraph
from learned_cost.devices.device import record
from learned_cost.kernels.correction import Correction
from learned_cost.kernels.predict import Predictor
from learned_cost.training.few_shot import adapt_file, choose_kernels
from learned_cost.weights import save_weights
from tests.learned_cost.measurements import kernel_columns, write

SLOWER = 4.0


def measured(folder: Path, rows: int = 60, stack: str = "cudagraph", **more: object) -> Dataset:
    """Kernels of an A40 that takes four times what the shipped weights say, as a profile of ours has them."""
    columns = kernel_columns(rows)
    columns |= {"gpu": ["A40"] * rows, "stack": [stack] * rows, "direction": ["forward"] * rows, **more}
    found = read_folder(write(folder, columns=columns))
    assert found.kernels is not None
    answer = Predictor.load(None).predict_table(found.kernels, found.devices)
    columns["latency_us"] = np.exp(answer.mean_log_s) * 1e6 * SLOWER
    return read_folder(write(folder, columns=columns))


def product(m: int, n: int, k: int) -> Kernel:
    work = 2.0 * m * n * k, 4.0 * (m * k + k * n + m * n)
    return Kernel("linear", "contraction", "fp32", {"b": 1, "m": m, "n": n, "k": k}, (m * n, k, 1, 1), *work)


def test_adapted_weights_know_the_device_and_leave_others(tmp_path: Path) -> None:
    data = measured(tmp_path / "few", stack="torch")
    shipped = Predictor.load(None)
    found = adapt_file(shipped, data, None, tmp_path / "mine")
    assert (found.device.name, found.used, found.given) == ("A40", 60, 60)
    assert found.errors(found.before)["median"] == pytest.approx(1 - 1 / SLOWER, abs=0.02)
    assert found.errors(found.after)["median"] < 0.2
    again = Predictor.load(tmp_path / "mine")
    asked = [Subgraph.of(product(512, 1024, 256)), Subgraph.of(product(96, 2048, 1024))]
    for name, factor in (("A40", SLOWER), ("T4", 1.0)):
        before, after = (p.predict(asked, record(name)).mean_log_s for p in (shipped, again))
        np.testing.assert_allclose(after - before, np.log(factor), atol=0.25 if factor > 1 else 0.0)
    assert (again.predict(asked, record("A40")).std_log < 0.4).all()


def test_replayed_kernels_correct_what_plans_ask_for(tmp_path: Path) -> None:
    found = adapt_file(Predictor.load(None), measured(tmp_path / "few"), "A40", tmp_path / "mine")
    table = measured(tmp_path / "few").kernels
    assert table is not None
    replayed = found.predictor.predict_table(table, measured(tmp_path / "few").devices)
    assert np.median(np.abs(np.expm1(replayed.mean_log_s - np.log(table.latency_s)))) < 0.2


def test_what_was_never_seen_is_in_range_once_measured(tmp_path: Path) -> None:
    odd = {"op": ["asinh"] * 60, "k": [None] * 60, "dims_json": ['{"extents": [4096, 1, 1, 1]}'] * 60}
    data = measured(tmp_path / "few", **odd)
    found = adapt_file(Predictor.load(None), data, None, tmp_path / "mine")
    assert data.kernels is not None
    known, before = (p.predict_table(data.kernels, data.devices).in_range for p in (found.predictor, Predictor.load()))
    assert known.all()
    assert not before.any()


def test_what_to_measure_next_is_not_what_was_measured(tmp_path: Path) -> None:
    found = adapt_file(Predictor.load(None), measured(tmp_path / "few", stack="torch"), None, tmp_path / "mine")
    near = [product(64, 64, 64), product(256, 128, 512)]
    far = Kernel("softmax", "row", "bf16", {"m": 65536, "n": 32000}, (65536, 1, 32000, 1), 1e10, 8e9, "backward")
    assert choose_kernels(found.predictor, [*near, far], found.device, 1) == [far]
    assert len(choose_kernels(found.predictor, near, found.device, 5)) == 2


def test_data_that_no_device_can_be_known_by(tmp_path: Path) -> None:
    shipped = Predictor.load(None)
    for rows, name, said in ((4, None, "4 usable kernels"), (60, "T5", "0 usable kernels of T5")):
        with pytest.raises(DataError, match=said):
            adapt_file(shipped, measured(tmp_path / f"few{rows}", rows), name, tmp_path / "mine")
    with pytest.raises(DataError, match="of 3 devices: A100-SXM4-80GB, L40S, T4"):
        adapt_file(shipped, read_folder(write(tmp_path / "three")), None, tmp_path / "mine")
    assert not (tmp_path / "mine.json").exists()


def test_a_damaged_correction_is_refused(tmp_path: Path) -> None:
    found = adapt_file(Predictor.load(None), measured(tmp_path / "few"), None, tmp_path / "mine")
    arrays, meaning = found.weights.arrays, found.weights.description["correction"]
    assert Correction.read(arrays, meaning) is not None
    for wrong in ({**meaning, "alike": {}}, {**meaning, "alike": {**meaning["alike"], "noise": "much"}}):
        with pytest.raises(WeightsError, match="a correction without"):
            Correction.read(arrays, wrong)
    cut = {**arrays, "correction.weights": arrays["correction.weights"][:-1]}
    save_weights(tmp_path / "cut", dataclasses.replace(found.weights, arrays=cut))
    with pytest.raises(WeightsError, match="a correction of sizes"):
        Predictor.load(tmp_path / "cut")
