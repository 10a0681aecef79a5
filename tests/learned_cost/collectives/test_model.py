"""The collective model: monotone, never under the bound, right on what it knows, and quick to learn a system."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from ir.errors import WeightsError
from learned_cost.collectives.fit import fit_collectives, knots_of
from learned_cost.collectives.model import CollectiveModel, from_weights, load_collective_model
from learned_cost.collectives.physics import facts_of, physics, start
from learned_cost.collectives.rows import cases_of
from learned_cost.collectives.score import chosen_points, evaluate_collectives
from learned_cost.weights import save_weights
from tests.learned_cost.collectives.worlds import ODD, SYSTEMS, errors, rows_table, table_of


@functools.cache
def fitted() -> CollectiveModel:
    """Of the made-up systems."""
    table = table_of(SYSTEMS)
    return fit_collectives(cases_of(table), np.log(table.latency_s))


ASKED = [
    ("NVLink3+NVSwitch", "A100-SXM4-80GB", "all_reduce", "nccl", 8, 1),
    ("NVLink5+NVL72", "GB200", "all_gather", "nccl", 72, 18),
    ("PCIe5", "unheard-of", "all_to_all", "a new library", 4, 1),
    ("", "H100-SXM-80GB", "alltoallv", "", 16, 2),
    ("NVLink4+NVSwitch; IB between nodes", "H200-SXM-141GB", "ep_dispatch", "deepep_normal_sms12", 32, 4),
]


@pytest.mark.parametrize(("link", "gpu", "collective", "library", "devices", "nodes"), ASKED)
def test_predictions_grow_with_bytes_and_stay_above_the_bound(
    link: str, gpu: str, collective: str, library: str, devices: int, nodes: int
) -> None:
    shared = {
        "interconnect": link, "gpu": gpu, "collective": collective, "algo_lib": library, "n_devices": devices,
        "n_nodes": nodes, "devices_per_node": devices // nodes, "latency_us": 1.0,
    }  # fmt: skip
    table = rows_table([{**shared, "bytes": int(2 ** (power / 3))} for power in range(24, 105)])
    mean, std = load_collective_model().predict(table)
    assert np.isfinite(mean).all()
    assert (np.diff(mean) >= -1e-12).all()  # tolerance: rounding
    assert (mean >= facts_of(cases_of(table)).bound).all()
    assert (std > 0).all()


def test_physics_alone_grows_with_bytes_and_halves_with_twice_the_rate() -> None:
    cases = cases_of(table_of(SYSTEMS))
    few = cases.take(np.zeros(40, dtype=np.int64)).with_bytes(np.exp2(np.arange(8.0, 48.0)))
    seconds = np.exp(physics(start(), facts_of(few))[0])
    assert (np.diff(seconds) > 0).all()
    assert seconds[-1] / seconds[-2] == pytest.approx(2.0, rel=1e-2)


def test_systems_it_was_fitted_to_are_known_within_their_noise() -> None:
    table = table_of(SYSTEMS, seed=1)
    mean, std = fitted().predict(table)
    assert errors(mean, table).mean() < 0.04
    assert (std < 0.2).all()


def test_a_new_system_is_less_sure_and_three_points_mend_it() -> None:
    table = table_of({"odd": ODD})
    mean, std = fitted().predict(table)
    cases = cases_of(table)
    points = chosen_points(fitted(), cases)
    rest = np.setdiff1d(np.arange(len(table)), points)
    after, after_std = fitted().adapt(table.take(points)).predict(table.take(rest))
    assert len(points) == 3
    assert errors(mean[rest], table.take(rest)).mean() > 0.3
    assert errors(after, table.take(rest)).mean() < 0.7 * errors(mean[rest], table.take(rest)).mean()
    assert std.mean() > 2 * fitted().predict(table_of(SYSTEMS))[1].mean()
    assert after_std.mean() < std[rest].mean()


def test_three_points_of_each_library_and_collective_are_better_still() -> None:
    table = table_of({"odd": ODD})
    scores = evaluate_collectives(table, fitted())["systems"][f"odd | {ODD[0]}"]
    errors_in_order = [scores[label]["mape"] for label in ("as_it_is", "after_3_points", "after_3_points_each")]
    assert errors_in_order == sorted(errors_in_order, reverse=True)
    assert scores["after_10_points"]["mape"] < scores["after_3_points"]["mape"]
    assert scores["after_10_points"]["rows"] == len(table) - 10
    assert not scores["known"]


def test_what_it_is_given_of_one_system_leaves_others_alone() -> None:
    table, others = table_of({"odd": ODD}), table_of({"slow": SYSTEMS["slow"]})
    before, _ = fitted().predict(others)
    after, _ = fitted().adapt(table).predict(others)
    assert np.abs(after - before).max() < 0.1


def test_points_are_medians_of_bins() -> None:
    shared = {"gpu": "L40S", "collective": "all_reduce", "n_devices": 2}
    rows = [{**shared, "bytes": 1000 + step, "latency_us": value} for step, value in enumerate((10.0, 90.0, 11.0))]
    table = rows_table(rows)
    knots = knots_of(cases_of(table), np.log(table.latency_s))
    assert np.exp(knots.log_s) * 1e6 == pytest.approx([11.0])
    assert knots.rows.tolist() == [3]


def test_weights_come_back_as_they_were(tmp_path: Path) -> None:
    save_weights(tmp_path / "w", fitted().to_weights({"rows": 1}))
    again = load_collective_model(tmp_path / "w")
    table = table_of(SYSTEMS)
    assert again.predict(table)[0] == pytest.approx(fitted().predict(table)[0], abs=2e-3)


def test_weights_of_other_features_are_refused(tmp_path: Path) -> None:
    weights = fitted().to_weights({})
    changed = type(weights)(weights.kind, weights.arrays, {**weights.description, "features": "collectives-0"})
    save_weights(tmp_path / "w", changed)
    with pytest.raises(WeightsError, match="features"):
        load_collective_model(tmp_path / "w")


def test_shipped_weights_are_small_and_know_their_systems() -> None:
    model = load_collective_model()
    assert "h200_sxm|H200-SXM-141GB" in model.vocabulary.codes["system"]
    assert from_weights(model.to_weights({})).numbers == pytest.approx(model.numbers)
    folder = Path(__file__).parents[3] / "learned_cost" / "weights"
    assert sum((folder / f"collectives.{suffix}").stat().st_size for suffix in ("json", "safetensors")) <= 1 << 20
