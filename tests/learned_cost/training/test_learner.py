"""What is learned of worlds of known law, by the prior, the specialist, adapters and fusion; NumPy agrees."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from ir.errors import WeightsError
from learned_cost.data.dataset import Dataset
from learned_cost.data.kernel import Subgraph
from learned_cost.data.table import Table
from learned_cost.devices.device import load_records, record
from learned_cost.kernels.features import chip, features_of, stand_ins
from learned_cost.kernels.gnn import Rows
from learned_cost.kernels.nodes import of_subgraphs
from learned_cost.kernels.predict import Predictor
from learned_cost.training.few_shot import adapt, choose
from learned_cost.training.fit import FitConfig
from learned_cost.training.learner import GraphLearner, LearnedKernels
from learned_cost.training.train import TrainOptions, train
from learned_cost.weights import Weights
from tests.learned_cost.worlds import DEVICES, chain, kernel, seconds, world

RECORDS = load_records()
LEARNER = GraphLearner(width=48, depth=1, prior_steps=80)


@lru_cache(maxsize=1)
def begun() -> tuple[Table, Rows, LearnedKernels]:
    """A world and a module whose prior was trained on it."""
    torch.set_num_threads(1)
    rows = world(400)
    features = LEARNER.features(rows, RECORDS)
    return rows, features, LEARNER.build(features, np.arange(len(rows)), seed=0)


def predictor_of(module: LearnedKernels) -> Predictor:
    arrays, meaning = LEARNER.export(module)
    return Predictor(Weights("kernels", arrays, meaning))


def error(mean_log_s: np.ndarray, rows: Table) -> float:
    return float(np.abs(np.expm1(mean_log_s - np.log(rows.latency_s))).mean())


def test_the_prior_holds_on_a_device_that_it_never_saw() -> None:
    _, _, module = begun()
    other = world(200, seed=1, fused=False, devices=["A40"])
    assert error(predictor_of(module).predict_table(other, RECORDS).mean_log_s, other) < 0.35
    roofline = np.log(np.maximum(other["flops"] / 37.4e12, other["bytes"] / 696e9))
    assert error(roofline, other) > 0.4


def test_numpy_says_what_torch_says() -> None:
    rows, features, module = begun()
    torch.manual_seed(1)
    noisy = LEARNER.restore(Weights("kernels", *LEARNER.export(module)))
    LEARNER.thaw(noisy, features, np.arange(300))
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    wanted = LEARNER.predict(noisy, features, np.arange(len(rows)))
    found = predictor_of(noisy).predict_table(rows, RECORDS)
    np.testing.assert_allclose(found.mean_log_s, wanted.mean_log_s, atol=2e-4)
    np.testing.assert_allclose(found.std_log, wanted.std_log, rtol=1e-3)
    assert found.in_range.tolist() == wanted.in_range.tolist()


def test_no_prediction_beats_the_bound() -> None:
    rows, features, module = begun()
    faster = LEARNER.restore(Weights("kernels", *LEARNER.export(module)))
    with torch.no_grad():
        faster.net.specialist.leave.bias.fill_(-30.0)
    single = np.flatnonzero(np.diff(features.start) == 1)
    mean = LEARNER.predict(faster, features, single).mean_log_s
    assert (mean >= features.features.bound[features.start[single]] - 1e-5).all()
    assert (mean < np.log(rows.latency_s)[single]).mean() > 0.9, "the bound is what held it"


def test_training_makes_it_exact_and_fused_chains_cheaper_than_their_parts(tmp_path: Path) -> None:
    rows, _, _ = begun()
    data = Dataset(rows, None, None, RECORDS, {})
    options = TrainOptions(FitConfig(epochs=40, batch_rows=128, learning_rate=4e-3, ema=0.97), holdout_fold=0)
    result = train(data, tmp_path / "small", options, learner=LEARNER)
    assert result.report["all"]["mape"] < 0.12
    assert 0.8 < result.report["all"]["coverage_90"] < 0.97
    predictor = Predictor.load(tmp_path / "small")
    whole = chain(kernel(512, 512, 256), kernel(512, 512, op="gelu"), kernel(512, 512, op="add"))
    device = record(DEVICES[0])
    alone = predictor.predict([Subgraph.of(part) for part in whole.kernels], device)
    fused = predictor.predict([whole], device)
    truth = seconds(whole, device)
    assert abs(np.exp(fused.mean_log_s[0]) / truth - 1) < 0.25
    assert np.exp(alone.mean_log_s).sum() > 1.3 * truth


def test_fine_tuning_changes_one_device_alone(tmp_path: Path) -> None:
    rows, _, module = begun()
    slow = world(300, seed=3, fused=False, devices=["P4"])
    slow.columns["latency_us"][:] *= 7.0
    start = Weights("kernels", *LEARNER.export(module))
    options = TrainOptions(FitConfig(epochs=60, batch_rows=64, learning_rate=3e-3), start=start)
    train(Dataset(slow, None, None, RECORDS, {}), tmp_path / "tuned", options, learner=LEARNER)
    before, after = predictor_of(module), Predictor.load(tmp_path / "tuned")
    assert error(before.predict_table(slow, RECORDS).mean_log_s, slow) > 0.5
    assert error(after.predict_table(slow, RECORDS).mean_log_s, slow) < 0.25
    single = rows.take(np.flatnonzero(~rows.is_text("op", "subgraph"))[:100])
    same = [p.predict_table(single, RECORDS).mean_log_s for p in (before, after)]
    np.testing.assert_array_equal(*same)


def test_a_few_measurements_correct_and_narrow() -> None:
    _, _, module = begun()
    predictor = predictor_of(module)
    pool = world(400, seed=4, fused=False, devices=["M40"])
    pool.columns["latency_us"][:] *= np.where(pool.is_text("op", "linear"), 3.0, 0.8)
    measured, rest = choose(predictor, pool, RECORDS, 20), np.arange(200, 400)
    assert len(set(measured.tolist())) == 20
    few = adapt(predictor, pool.take(measured), RECORDS, "M40")
    cold, warm = (p.predict_table(pool.take(rest), RECORDS) for p in (predictor, few))
    assert error(warm.mean_log_s, pool.take(rest)) < 0.5 * error(cold.mean_log_s, pool.take(rest))
    held = np.abs(warm.mean_log_s - np.log(pool.latency_s[rest])) <= 1.645 * warm.std_log
    assert held.mean() > 0.8
    fewer = adapt(predictor, pool.take(measured[:5]), RECORDS, "M40").predict_table(pool.take(rest), RECORDS)
    assert np.median(warm.std_log / fewer.std_log) < 0.95
    other = world(40, seed=5, fused=False, devices=[DEVICES[0]])
    same = [p.predict_table(other, RECORDS).mean_log_s for p in (predictor, few)]
    np.testing.assert_array_equal(*same)
    again = choose(few, pool, RECORDS, 20)
    assert len(set(again.tolist()) & set(measured.tolist())) < 5, "what was measured says nothing more"


def test_an_unknown_operator_is_out_of_range_and_so_is_a_size_far_from_all() -> None:
    _, _, module = begun()
    device = record(DEVICES[0])
    asked = [kernel(64, 64, 64), kernel(64, 64, op="never_seen"), kernel(2**20, 2**20, 2**20)]
    answer = predictor_of(module).predict([Subgraph.of(k) for k in asked], device)
    assert answer.in_range.tolist() == [True, False, False]
    assert np.isfinite(answer.mean_log_s).all()


def test_intervals_of_devices_never_seen_are_wider() -> None:
    _, _, module = begun()
    predictor = predictor_of(module)
    asked = [Subgraph.of(kernel(256, 256, 256))]
    seen, unseen = (predictor.predict(asked, record(name)).std_log[0] for name in (DEVICES[0], "A40"))
    assert unseen > 0
    assert seen > 0
    assert predictor.regime("A40", chip(record("A40"))) == "unseen"


def test_a_device_of_the_same_chip_stands_in_for_one_never_seen() -> None:
    rows, trained, module = begun()
    LEARNER.calibrate(module, trained, np.arange(len(rows)))
    predictor = predictor_of(module)
    other = record(DEVICES[0]).model_copy(update={"name": "A100-of-another-memory", "memory_bytes": 2**37})
    assert predictor.regime(other.name, chip(other)) == "sibling"
    asked = [Subgraph.of(kernel(256, 256, 256))]
    seen, sibling = (predictor.predict(asked, device) for device in (record(DEVICES[0]), other))
    np.testing.assert_allclose(seen.mean_log_s, sibling.mean_log_s, atol=1e-5)
    assert sibling.std_log[0] > 2 * seen.std_log[0]
    half = replace(kernel(256, 256, 256), dtype="bf16")
    features = features_of(of_subgraphs([*asked, Subgraph.of(half)], other))
    answers = stand_ins(features, predictor.model["devices"], predictor.model["known"])
    codes, _ = features.texts["dtype"]
    assert (answers[0, codes] > 0).tolist() == [True, False], "nothing in bf16 was trained on"


def test_numbers_that_do_not_fit_their_description_are_refused() -> None:
    _, _, module = begun()
    arrays, meaning = LEARNER.export(module)
    broken = {**arrays, "device.weight": arrays["device.weight"][:-1]}
    with pytest.raises(WeightsError, match="not what its description says"):
        LEARNER.restore(replace(Weights("kernels", broken, meaning), name="broken"))
