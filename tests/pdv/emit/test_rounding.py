"""What is emitted for mixed precision, in one process: parameters in float32, compute in bfloat16."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

import pdv
from ir.errors import UsageError, VerificationError
from pdv.plan.package import Plan, import_package
from pdv.verification.package import verify
from tests.pdv.miniatures import Gpt, ids, settled
from tests.pdv.packages import Document, change_plan
from tests.pdv.worlds import cluster

LEARNING_RATE, STEPS = 2e-5, 10  # of so short a step nothing is left of a bfloat16 number of 0.02 or more


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Gpt, its embedding tied, for two devices."""
    return pdv.optimize(settled(Gpt(2)), (ids(8, 8),), cluster=cluster(2), precision="mixed", pipelines="never")


@pytest.fixture(scope="module")
def package(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It, written."""
    return plan.save(tmp_path_factory.mktemp("rounding") / "gpt_pdv")


def built(package: Path, dtype: torch.dtype | None = None) -> Any:
    """The whole model, here."""
    return import_package(package).build(device="cpu", dtype=dtype)


def loss_of(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Sum over tokens, and how many."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def gradients(model: Any, rows: slice = slice(None), **options: Any) -> dict[str, Tensor]:
    """Of a step, which is then forgotten."""
    x = ids(8, 8)[rows]
    model.train_step(x, x.roll(-1, 1), loss_of, **options)
    found = {name: x.clone() for name, x in model.full_gradients().items()}
    model.zero_grad()
    return found


def test_parameters_rest_in_float32_and_are_read_in_bfloat16(package: Path) -> None:
    stored = load_file(package / "weights.safetensors")
    source = settled(Gpt(2)).state_dict()
    same = [name for name, x in stored.items() if name in source and torch.equal(x, source[name])]
    model, low = built(package), built(package, torch.bfloat16)
    assert len(same) == len(list(model.parameters())), "float32 as the source has them"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        found, expected = model(ids(8, 8)), low(ids(8, 8))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected), "rounded when they are read, or when they are loaded"


def test_gradients_add_up_in_float32(package: Path) -> None:
    model = built(package)
    parts = [gradients(model, slice(at, at + 2), reduction="sum") for at in range(0, 8, 2)]
    whole = gradients(model, micro_batches=4)
    for name, found in whole.items():
        total = torch.zeros_like(found)
        for part in parts:
            total += part[name]
        assert torch.equal(found, total / ids(8, 8).numel()), name
        assert found.dtype == torch.float32


def test_steps_that_bfloat16_would_round_away_are_taken(package: Path) -> None:
    moved = {}
    for name, dtype in (("exact", torch.float32), ("mixed", None), ("bfloat16", torch.bfloat16)):
        model = built(package, dtype)
        before = {name: x.float().clone() for name, x in model.full_state_dict().items()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        for _ in range(STEPS):
            model.train_step(ids(8, 8), ids(8, 8).roll(-1, 1), loss_of)
            optimizer.step()
            optimizer.zero_grad()
        state = model.full_state_dict()
        moved[name] = torch.cat([(state[key].float() - x).flatten() for key, x in sorted(before.items())])
    distance = {name: float((x - moved["exact"]).norm() / moved["exact"].norm()) for name, x in moved.items()}
    assert distance["mixed"] < 0.2, distance
    assert distance["bfloat16"] > 0.5, distance


def test_parameters_in_their_place_are_rounded_too(package: Path) -> None:
    model, x = built(package), ids(8, 8)
    expected = model(x)
    given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    found = functional_call(model, given, (x,))
    assert torch.equal(found, expected)
    found.float().square().sum().backward()
    assert {p.grad.dtype for p in given.values() if p.grad is not None} == {torch.float32}
    assert all(p.grad is None for p in model.parameters())


def test_the_plan_lists_what_is_rounded(plan: Plan, package: Path) -> None:
    (step,) = [step for step in plan.document["derivation"] if step["rule"] == "round"]
    assert step["bindings"] == {"to": "bfloat16", "parameters": "float32", "gradients": "float32", "moments": "float32"}
    assert set(step["sites"]) == {param.attr("name") for param in plan.source.params}
    assert "bfloat16, of parameters, gradients and moments in float32" in (package / "model.py").read_text("utf-8")
    verify(package)


def test_the_plan_counts_eighteen_bytes_a_parameter() -> None:
    found = pdv.optimize(settled(Gpt(2)), (ids(8, 8),), cluster=cluster(1), precision="mixed", pipelines="never")
    memory, count = found.document["predicted"]["memory_breakdown_bytes"], found.document["source"]["parameters"]
    assert (memory["gradients"], memory["optimizer"]) == (4 * count, 12 * count)
    held = found.document["simulated"]
    assert held["peak_bytes"]["slow"] > 18 * count


@pytest.mark.parametrize("change", ["drop", "types", "sites"])
def test_another_precision_than_the_program_has_is_refused(change: str, package: Path, tmp_path: Path) -> None:
    def other(document: Document) -> None:
        (step,) = [step for step in document["derivation"] if step["rule"] == "round"]
        if change == "drop":
            document["derivation"].remove(step)
        elif change == "types":
            step["bindings"]["moments"] = "bfloat16"
        else:
            step["sites"].pop()

    folder = Path(shutil.copytree(package, tmp_path / "gpt_pdv", ignore=shutil.ignore_patterns("__pycache__")))
    with pytest.raises(VerificationError):
        verify(change_plan(folder, other))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"precision": "mixt"}, "not known"),
        ({"precision": "mixed", "dtype": "float16"}, "float16"),
        ({"precision": "mixed", "mode": "infer"}, "inference"),
        ({"precision": "mixed-half-gradients"}, "not known"),
    ],
)
def test_what_is_not_run_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        pdv.optimize(settled(Gpt(1)), (ids(8, 8),), cluster=cluster(1), **given)


class Typed(torch.nn.Module):
    """Takes one input in a type of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8).bfloat16()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [b, 8] in float32, of which little is left in bfloat16; y: [b, 8] -> [b, 8]."""
        return self.layer((x - 1000).bfloat16()) + y  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{"precision": "mixed"}, {"dtype": "bfloat16"}], ids=str)
def test_inputs_of_other_floats_are_cast_to_the_type_of_compute(options: dict[str, Any]) -> None:
    x, layer = torch.randn(4, 8), torch.nn.Linear(8, 8)
    model = pdv.optimize(layer, (x,), cluster=cluster(2), **options).build("cpu")
    assert torch.equal(model(x), model(x.bfloat16()))
    assert torch.equal(model(x.double()), model(x.bfloat16()))
    assert model.train_step(x, x.bfloat16(), lambda y, t: ((y - t).float().square().sum(), 4)) > 0
    single = pdv.optimize(layer, (x,), cluster=cluster(2)).build("cpu", dtype=torch.float64)
    assert single(x).dtype == torch.float64


def test_an_input_in_a_type_of_its_own_stays_in_it() -> None:
    given = 1000 + torch.rand(4, 8), torch.randn(4, 8)
    module = Typed()
    model = pdv.optimize(module, (given[0], given[1].bfloat16()), cluster=cluster(2)).build("cpu")
    assert model.own_types == ("x",)
    assert torch.equal(model(*given), module(given[0], given[1].bfloat16()))
    assert torch.equal(model(given[0], y=given[1]), module(given[0], given[1].bfloat16()))
