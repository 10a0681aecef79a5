"""What measurements of a new system tell of its other collectives."""

from __future__ import annotations

import numpy as np

from learned_cost.collectives.physics import facts_of
from learned_cost.collectives.process import Points, Vocabulary, points_of
from learned_cost.collectives.rows import Floats, cases_of
from learned_cost.collectives.systems import NOISE, deviations
from tests.learned_cost.collectives.worlds import SYSTEMS, rows_table, table_of


def points(*rows: tuple[str, int, int], gpu: str = "L40S", link: str = "PCIe4") -> Points:
    """Large all-reduces: (library, devices, nodes) each."""
    cases = cases_of(
        rows_table(
            [
                {
                    "system": "new", "gpu": gpu, "interconnect": link, "collective": "all_reduce", "algo_lib": library,
                    "n_devices": n, "n_nodes": nodes, "devices_per_node": n // nodes, "bytes": 1 << 28,
                    "latency_us": 1.0,
                }
                for library, n, nodes in rows
            ]
        )
    )  # fmt: skip
    return points_of(cases, facts_of(cases), np.full(len(cases), 0.05), Vocabulary({}))


def correlation(found: Points) -> Floats:
    """Of each with the first."""
    matrix = deviations(found, found)
    return np.asarray(matrix[0] / np.sqrt(matrix[0, 0] * matrix.diagonal()))


def test_systems_tell_nothing_of_each_other_and_the_covariance_is_one() -> None:
    cases = cases_of(table_of(SYSTEMS))
    found = points_of(cases, facts_of(cases), np.linspace(0.0, 1.0, len(cases)), Vocabulary({}))
    matrix = deviations(found, found)
    assert np.array_equal(matrix, matrix.T)
    assert (matrix[found.system[:, None] != found.system[None, :]] == 0).all()
    assert np.linalg.eigvalsh(matrix + NOISE * np.eye(len(cases))).min() > 0


def test_eight_devices_on_pcie_tell_of_four_by_any_library_more_than_of_two() -> None:
    _, four, two = correlation(points(("nccl", 8, 1), ("vLLM_custom_graph", 4, 1), ("vLLM_custom_graph", 2, 1)))
    assert four > 0.8
    assert two < 0.5


def test_a_switched_node_tells_of_its_other_libraries_less_than_of_the_same() -> None:
    shared = {"gpu": "A100-SXM4-80GB", "link": "NVLink3+NVSwitch"}
    _, same, other = correlation(points(("nccl", 8, 1), ("nccl", 4, 1), ("vLLM_custom_graph", 4, 1), **shared))
    assert 1 > same > other > 0
