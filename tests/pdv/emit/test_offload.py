"""What is emitted for an optimizer in the host's memory, and what its plan says.

On one process and a CPU, parameters rest where they are read.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import pdv
from ir.errors import NoPlanFitsError, VerificationError
from ir.types import DType
from pdv.emit.templates.rounding import DeviceCopy, Rounding
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import program
from pdv.plan.package import Plan, import_package
from pdv.report.summary import summarize
from pdv.verification.package import verify
from tests.pdv.miniatures import Gpt, ids, settled
from tests.pdv.packages import Document, change_plan
from tests.pdv.worlds import cluster

STEPS = 3
SMALL = "gpt:layers=2,hidden=512,heads=4,seq=16,vocab=512"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Gpt, its embedding tied, for two devices."""
    given = {"cluster": cluster(2), "precision": "mixed", "offload": "optimizer", "pipelines": "never"}
    return pdv.optimize(settled(Gpt(2)), (ids(8, 8),), **given)


@pytest.fixture(scope="module")
def package(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It, written."""
    return plan.save(tmp_path_factory.mktemp("offload") / "gpt_pdv")


def loss_of(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Sum over tokens, and how many."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def test_the_plan_and_the_program_say_it(plan: Plan, package: Path) -> None:
    (step,) = [step for step in plan.document["derivation"] if step["rule"] == "offload"]
    assert step["bindings"] == {"to": "host"}
    assert set(step["sites"]) == {param.attr("name") for param in plan.source.params}
    text = (package / "model.py").read_text("utf-8")
    assert ", offload=True)" in text
    assert "the optimizer, with parameters, in the host's memory" in text
    verify(package)


def test_a_device_keeps_six_bytes_of_eighteen_and_the_host_sixteen(plan: Plan) -> None:
    count = plan.document["source"]["parameters"]
    memory = plan.document["predicted"]["memory_breakdown_bytes"]
    assert (memory["gradients"], memory["optimizer"]) == (4 * count, 0)
    assert plan.document["simulated"]["host_bytes"] == 16 * count
    assert "of its host" in summarize(plan.document)["predicted memory"]


@pytest.mark.parametrize("change", ["drop", "to", "sites"])
def test_another_place_than_the_programs_is_refused(change: str, package: Path, tmp_path: Path) -> None:
    def other(document: Document) -> None:
        (step,) = [step for step in document["derivation"] if step["rule"] == "offload"]
        if change == "drop":
            document["derivation"].remove(step)
        elif change == "to":
            step["bindings"]["to"] = "disk"
        else:
            step["sites"].pop()

    folder = Path(shutil.copytree(package, tmp_path / "gpt_pdv", ignore=shutil.ignore_patterns("__pycache__")))
    with pytest.raises(VerificationError):
        verify(change_plan(folder, other))


def test_one_process_trains_as_without(package: Path) -> None:
    model = import_package(package).build(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(STEPS):
        losses.append(model.train_step(ids(8, 8), ids(8, 8).roll(-1, 1), loss_of, micro_batches=2).item())
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_copy_is_made_anew_behind_each_change() -> None:
    rests = torch.ones(4)
    copy = DeviceCopy(rests, Rounding(torch.bfloat16, torch.device("cpu")))
    copy.refresh(rests._version)
    assert copy.tensor.dtype == torch.bfloat16
    copy.tensor.zero_()
    copy.refresh(rests._version)
    assert not copy.tensor.any(), "nothing changed"
    copy.forget()
    copy.refresh(rests._version)
    assert copy.tensor.eq(1).all(), "lent, so perhaps changed"
    rests.add_(1)
    copy.refresh(rests._version)
    assert copy.tensor.eq(2).all()


def small(memory: str, **device: str) -> dict[str, Any]:
    """A device of a GPU's kind with little memory, and a slower host."""
    made, device = cluster(1), {"host_link": "1 GB/s", "host_bandwidth": "1 GB/s", **device}
    made["nodes"][0]["device"] |= {"memory": memory, **device}
    return made


def test_it_is_named_where_it_would_fit_and_taken_where_it_is_allowed() -> None:
    def made(**given: object) -> Plan:
        options: dict[str, Any] = {"rules": "none", "pipelines": "never", "cost": "analytic", **given}
        return pdv.optimize(program(arch(SMALL), 2, DType.F32), **options)

    whole, hosted = (made(cluster=small("4 GiB"), offload=name) for name in ("none", "optimizer"))
    needs = [max(one.document["simulated"]["peak_bytes"].values()) for one in (whole, hosted)]
    assert needs[1] < needs[0]
    between = f"{sum(needs) / 2 / 2**20:.0f} MiB"
    with pytest.raises(NoPlanFitsError, match="--allow offload"):
        made(cluster=small(between))
    found = made(cluster=small(between), allow=["offload"])
    assert "offload" in {step["rule"] for step in found.document["derivation"]}
    unasked = made(cluster=small("4 GiB"), allow=["offload"])
    assert "offload" not in {step["rule"] for step in unasked.document["derivation"]}
    with pytest.raises(NoPlanFitsError):
        made(cluster=small(between, host_memory="64 MiB"), allow=["offload"])
