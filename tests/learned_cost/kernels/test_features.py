"""Rows and questions become the same features, which say nothing of a device where they should not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from learned_cost.data.kernel import Subgraph
from learned_cost.devices.device import load_records, record
from learned_cost.kernels.features import RESOURCES, features_of
from learned_cost.kernels.nodes import of_subgraphs, of_table
from tests.learned_cost.worlds import chain, kernel, seconds, table, world

A100 = record("A100-PCIE-40GB")


def test_a_row_and_the_question_about_it_have_the_same_features() -> None:
    subgraphs = [Subgraph.of(kernel(64, 96, 128)), chain(kernel(64, 96, 128), kernel(64, 96, op="gelu"))]
    rows = features_of(of_table(table([(s, A100.name, seconds(s, A100)) for s in subgraphs]), load_records()))
    asked = features_of(of_subgraphs(subgraphs, A100))
    for name in ("resources", "bound", "own", "graphs", "graph", "edges"):
        np.testing.assert_allclose(getattr(rows, name), getattr(asked, name), rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(rows.blind, asked.blind, rtol=1e-5, atol=1e-6)


def test_edges_name_kernels_of_their_own_subgraph_in_any_order_of_rows() -> None:
    pair, single = chain(kernel(8, 8, 8), kernel(8, 8, op="add")), Subgraph.of(kernel(8, 8, 8))
    features = features_of(of_table(table([(s, A100.name, 1e-5) for s in (pair, single, pair)]), load_records()))
    assert features.graph.tolist() == [0, 0, 1, 2, 2]
    assert features.edges.T.tolist() == [[0, 1], [3, 4]]
    codes, vocab = features.texts["op"]
    assert [vocab[code] for code in codes] == ["linear", "add", "linear", "linear", "add"]


def test_resources_of_a_product_are_its_work_over_the_rates() -> None:
    features = features_of(of_subgraphs([Subgraph.of(kernel(512, 512, 512))], A100))
    work = kernel(512, 512, 512)
    found = dict(zip(RESOURCES, np.exp(features.resources[0].astype(np.float64)), strict=True))
    assert found["arithmetic"] == pytest.approx(work.flops / 19.49e12, rel=1e-3)
    assert found["memory"] == pytest.approx(work.bytes / 1555e9, rel=1e-3)


def test_a_card_of_little_power_slows_down() -> None:
    t4 = record("T4")
    cool = t4.model_copy(update={"tdp_w": 250.0})
    hot, cold = (features_of(of_subgraphs([Subgraph.of(kernel(512, 512, 512))], card)) for card in (t4, cool))
    assert hot.resources[0, 0] > cold.resources[0, 0] + 0.3


def test_twice_the_device_for_twice_the_batch_changes_no_relative_size() -> None:
    twice = A100.model_copy(
        update={
            "sm_count": 2 * A100.sm_count, "tdp_w": 2 * (A100.tdp_w or 0), "l2_bytes": 2 * (A100.l2_bytes or 0),
            "memory_bandwidth_bytes_per_s": 2 * A100.memory_bandwidth_bytes_per_s,
            "peak_flops": {name: 2 * rate for name, rate in A100.peak_flops.items()},
        }
    )  # fmt: skip
    small, large = kernel(4096, 512, op="gelu"), kernel(8192, 512, op="gelu")
    one = features_of(of_subgraphs([Subgraph.of(small)], A100))
    two = features_of(of_subgraphs([Subgraph.of(large)], twice))
    np.testing.assert_allclose(one.resources[0, :5], two.resources[0, :5], rtol=1e-5)
    np.testing.assert_allclose(one.bound, two.bound, rtol=1e-5)


def test_features_are_finite_for_operators_nobody_knows() -> None:
    strange = replace(kernel(3, 5, op="fourier_of_nothing"), dims={}, flops=0.0, bytes=0.0)
    features = features_of(of_subgraphs([Subgraph.of(strange)], record("cpu-core")))
    for array in (features.resources, features.bound, features.blind, features.own):
        assert np.isfinite(array).all()


def test_every_row_of_a_world_has_a_subgraph() -> None:
    features = features_of(of_table(world(200), load_records()))
    assert len(features) == 200
    assert np.unique(features.graph).tolist() == list(range(200))
