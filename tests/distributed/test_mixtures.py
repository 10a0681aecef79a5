"""Mixtures of stages, micro-batches, recomputation and meshes train as the module does: forward, gradients, AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pytest

from benchmarks.measured.parity import compare, observe_package, reference
from benchmarks.models import build
from benchmarks.models.techniques import Technique
from pdv.problem import Pins
from pdv.problem.workload import Order, Recompute
from tests.distributed.harness import mark_slow, run_ranks
from tests.pdv.pipelined import plan_pipeline
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.distributed
FORWARD, GRADIENT, LOSS = 1e-5, 1e-4, 1e-4  # relative, float32
STEPS = 4

ALONE = Technique("alone", (("wire", 1),))
DP = Technique("dp", (("dp", 2),))
ZERO = Technique("zero", (("dp", 2),), zero=True)
TP = Technique("tp", (("tp", 2),))
TP_SP = Technique("tp+sp", (("tp", 2),), sequence=True)
ZERO_1 = Technique("zero-1", (("dp", 2),), zero=True, once=True)
DP_TP = Technique("dp+tp", (("dp", 2), ("tp", 2)))
ZERO_TP = Technique("zero+tp", (("dp", 2), ("tp", 2)), zero=True)
ZERO_TP_SP = Technique("zero+tp+sp", (("dp", 2), ("tp", 2)), zero=True, sequence=True)
TP_LATER = replace(TP.pins, split=lambda node, _, split: TP.allows(node, "tp", split))  # whatever axis it is
DP_TP_TP = Technique("dp+tp+tp", (("dp", 2), ("tp", 2), ("tp1", 2)))


@dataclass(frozen=True)
class Mixture:
    """A model and how it is run.

    ``sizes``: pieces of each stage, where they are unequal; ``last``: how the last one runs, where otherwise.
    """

    model: str
    technique: Technique
    stages: int
    micro_batches: int
    order: Order = "1f1b"
    recompute: Recompute = "none"
    sizes: Sequence[int] | None = None
    virtual: int = 1
    places: tuple[int, ...] = ()
    last: Pins | None = None

    @property
    def processes(self) -> int:
        """In all."""
        return self.stages * self.technique.mesh.num_devices


MIXTURES = {
    "gpt2, gpipe": Mixture("gpt2", ALONE, 2, 4, "gpipe"),
    "llama, pp2 x zero-1, in another order": Mixture("llama", ZERO_1, 2, 4, places=(1, 2, 0, 3)),
    "mlp, pp4, in another order": Mixture("mlp", ALONE, 4, 4, "gpipe", sizes=(1, 1, 2, 2), places=(0, 2, 3, 1)),
    "gpt2, pp2 x tp2, recomputed": Mixture("gpt2", TP, 2, 4, recompute="full"),
    "llama, zero x tp, accumulated": Mixture("llama", ZERO_TP, 1, 4),
    "llama, zero x tp, accumulated and recomputed": Mixture("llama", ZERO_TP, 1, 2, recompute="full"),
    "bert, pp2 x zero": Mixture("bert", ZERO, 2, 2),
    "bert, pp2 x dp2, a row each": Mixture("bert", DP, 2, 4),
    "llama, pp2 x zero-1": Mixture("llama", ZERO_1, 2, 4),
    "vit, unequal stages, gpipe": Mixture("vit", DP, 2, 4, "gpipe", sizes=(3, 1)),
    "vit, pp2 x tp2, recomputed": Mixture("vit", TP, 2, 2, recompute="full"),
    "convolutions, pp2 x dp2": Mixture("squeezenet", DP, 2, 2),
    "recommender, pp2 x dp2": Mixture("dlrm", DP, 2, 2),
    "mixtral, pp2 x tp2": Mixture("mixtral", TP, 2, 2),
    "gpt2, three axes, zero": Mixture("gpt2", ZERO_TP, 2, 2),
    "llama, three axes, sequence": Mixture("llama", ZERO_TP_SP, 2, 4, recompute="full"),
    "gpt2, zero, then tp": Mixture("gpt2", ZERO, 2, 4, sizes=(2, 2), last=TP_LATER),
    "mlp, pp4": Mixture("mlp", ALONE, 4, 4, sizes=(1, 1, 2, 2)),
    "gpt2, pp2 x tp2, interleaved and recomputed": Mixture(
        "gpt2", TP, 2, 4, "interleaved", "full", sizes=(1, 1, 1, 1), virtual=2
    ),
}

expected_of = lru_cache(reference)


LONG = {  # each of their techniques is in another one, too
    "llama, zero x tp, accumulated and recomputed", "bert, pp2 x dp2, a row each", "vit, pp2 x tp2, recomputed",
    "recommender, pp2 x dp2", "gpt2, gpipe", "mlp, pp4, in another order", "llama, pp2 x zero-1",
    "gpt2, pp2 x tp2, recomputed", "gpt2, three axes, zero",
}  # fmt: skip


@pytest.mark.parametrize("name", mark_slow(MIXTURES, LONG))
def test_a_mixture_trains_as_the_module_does(name: str, tmp_path: Path) -> None:
    case = MIXTURES[name]
    expected = expected_of(case.model, steps=STEPS)
    module, inputs = build(case.model, "small")
    plan = plan_pipeline(
        module, inputs, cluster(case.processes), pins=case.technique.pins,
        stages=case.stages, micro_batches=case.micro_batches, mesh=dict(case.technique.sizes),
        order=case.order, recompute=case.recompute, sizes=case.sizes, virtual=case.virtual, places=case.places,
        last=case.last,
    )  # fmt: skip
    folder = plan.save(tmp_path / "package")
    batches = expected.batches, expected.targets
    for observed in run_ranks(observe_package, case.processes, folder, *batches, timeout_s=240):
        difference = compare(expected.observed, observed)
        assert difference.forward <= FORWARD, difference
        assert difference.gradient <= GRADIENT, difference
        assert difference.loss <= LOSS, difference
