"""Activations in the host's memory: steps are those of devices that keep them, alone and with what they are mixed with.

A CPU is its own host: copies are made and read there as between a GPU and its host, streams apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.models.techniques import Technique
from tests.distributed.emitted.test_offload import (
    ALONE,
    DP,
    PARITY,
    ROUNDED,
    TP,
    UNIT,
    ZERO_1,
    ZERO_TP,
    apart,
    plan,
    train,
)
from tests.distributed.harness import mark_slow, run_ranks

pytestmark = pytest.mark.distributed

WAYS: dict[str, tuple[Technique, dict[str, Any]]] = {
    "dp": (DP, {"stages": 1, "micro_batches": 2}),
    "tp, recomputed": (TP, {"stages": 1, "micro_batches": 1, "recompute": "full-hosted"}),
    "zero-3 x tp": (ZERO_TP, {"stages": 1, "micro_batches": 2}),
    "zero-3 x tp, recomputed": (ZERO_TP, {"stages": 1, "micro_batches": 1, "recompute": "full-hosted"}),
    "pp2 x tp2": (TP, {"stages": 2, "micro_batches": 4}),
    "pp2 x zero-1, recomputed": (ZERO_1, {"stages": 2, "micro_batches": 4, "recompute": "full-hosted"}),
    "interleaved": (ALONE, {"stages": 2, "virtual": 2, "micro_batches": 4, "order": "interleaved"}),
}
SLOW = set(WAYS) - {"pp2 x tp2"}
MIXED = {"zero-3 x tp", "pp2 x zero-1, recomputed"}


def hosted(way: str, **options: Any) -> tuple[Any, Any, int]:
    """The plan whose activations are on the host, the same with them on devices, and how many processes it has."""
    technique, how = WAYS[way]
    on_host = {"recompute": "hosted", **how}
    plain = {**how, "recompute": "full" if on_host["recompute"] == "full-hosted" else "none"}
    options = {"layers": 4, **options}
    return (
        plan(technique, on_host, **options),
        plan(technique, plain, **options),
        technique.mesh.num_devices * how["stages"],
    )


@pytest.mark.parametrize("way", mark_slow(WAYS, SLOW))
def test_steps_with_activations_on_the_host_are_those_without(way: str, tmp_path: Path) -> None:
    there, here, ranks = hosted(way)
    folder = there.save(tmp_path / "gpt_pdv")
    assert "on_host(" in (folder / "model.py").read_text()
    exact = train(here.save(tmp_path / "plain" / "gpt_pdv"))
    assert exact.losses[-1] < exact.losses[0]
    for seen in run_ranks(train, ranks, folder, tmp_path / "checkpoint"):
        assert max(apart(seen, exact)) <= PARITY, apart(seen, exact)


@pytest.mark.slow
@pytest.mark.parametrize("way", sorted(MIXED))
def test_mixed_precision_with_all_of_it_on_the_host_is_as_near_to_float32(way: str, tmp_path: Path) -> None:
    folder = hosted(way, precision="mixed", offload="optimizer")[0].save(tmp_path / "gpt_pdv")
    exact, alone = train(folder, dtype=torch.float32), train(folder)
    bounds = [max(ROUNDED * one, UNIT) for one in apart(alone, exact)]
    for seen in run_ranks(train, hosted(way)[2], folder, tmp_path / "checkpoint"):
        several = apart(seen, exact)
        assert all(one <= most for one, most in zip(several, bounds, strict=True)), (several, bounds)
