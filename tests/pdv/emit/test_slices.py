"""Slices in time: what a plan says of them, what they take and hold, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F  # noqa: N812

import pdv
from ir.errors import UsageError, VerificationError
from pdv.engines.exported import export
from pdv.engines.formats.known import ENGINES
from pdv.memory import step_memory
from pdv.plan.package import Plan
from pdv.plan.proofs import AT_THIS_LENGTH
from pdv.report.axes import strategy_text
from pdv.report.loaded import load_plan, workload_of_plan
from pdv.simulate.step import simulate
from pdv.simulate.trace import trace
from pdv.verification.package import verify
from tests.distributed.harness import mark_slow
from tests.pdv.miniatures import D, Gpt, S, V, ids, settled
from tests.pdv.packages import Document, change_plan
from tests.pdv.pipelined import Blocks, plan_pipeline
from tests.pdv.worlds import cluster

STAGES, MICRO_BATCHES, SLICES = 4, 2, 4


@pytest.fixture(scope="module")
def plan() -> Plan:
    how: dict[str, Any] = {"stages": STAGES, "micro_batches": MICRO_BATCHES, "moments": SLICES, "mesh": {}}
    return plan_pipeline(settled(Gpt(4)), (ids(8, S),), cluster(STAGES), **how)


@pytest.fixture(scope="module")
def package(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan.save(tmp_path_factory.mktemp("slices") / "gpt_pdv")


def test_it_says_so(plan: Plan, package: Path) -> None:
    sliced = [step for step in plan.document["derivation"] if step["rule"] == "slice"]
    assert [step["bindings"] for step in sliced] == [{"slices": SLICES}]
    text = (package / "model.py").read_text()
    assert "each in 4 slices in time" in text
    assert "k = earlier(" in text
    assert "4 slices in time" in strategy_text(plan.document)
    assert "nothing of later ones" in plan.document["proof"]["slices"]["statement"]
    assert len(text.splitlines()) <= 200
    assert verify(package, run=True)["run"]


@pytest.mark.parametrize("change", ["drop", "other", "one", "order"])
def test_other_slices_are_refused(change: str, package: Path, tmp_path: Path) -> None:
    def other(document: Document) -> None:
        (step,) = (step for step in document["derivation"] if step["rule"] == "slice")
        if change == "drop":
            document["derivation"].remove(step)
        elif change == "order":
            for staged in (step for step in document["derivation"] if step["rule"] == "stage"):
                staged["bindings"]["order"] = "gpipe"
        else:
            step["bindings"]["slices"] = {"other": 3, "one": 1}[change]

    folder = Path(shutil.copytree(package, tmp_path / "gpt_pdv", ignore=shutil.ignore_patterns("__pycache__")))
    with pytest.raises(VerificationError):
        verify(change_plan(folder, other))


def test_a_pipeline_fills_in_a_slice(tmp_path: Path) -> None:
    how: dict[str, Any] = {"stages": STAGES, "micro_batches": MICRO_BATCHES, "moments": SLICES, "mesh": {}}
    equal = plan_pipeline(Blocks(), (torch.randn(64, 64, 16),), cluster(STAGES), **how)
    loaded = load_plan(equal.save(tmp_path / "blocks_pdv"))
    work = workload_of_plan(loaded)
    whole = workload_of_plan(replace(loaded, execution=replace(loaded.execution, moments=1)))
    ours, theirs = (simulate(one, draws=0) for one in (work, whole))
    bubbles = [min(share.parts["bubble"] for share in one.breakdown) / one.step_ps for one in (ours, theirs)]
    for found, passes in zip(bubbles, (MICRO_BATCHES * SLICES, MICRO_BATCHES), strict=True):
        assert found == pytest.approx((STAGES - 1) / (passes + STAGES - 1), rel=0.2)
    for share in ours.breakdown:
        assert sum(share.parts.values()) == ours.step_ps
        assert min(share.parts.values()) >= 0
        assert "time" not in share.parts
    held = step_memory(work)
    assert [one.by_kind["weights"] for one in held.stages] == [
        one.by_kind["weights"] for one in step_memory(whole).stages
    ]
    assert trace(ours, held)["traceEvents"]


def test_what_an_engine_does_not_do_of_them(package: Path) -> None:
    """Slices are told of once, and not as an axis of the mesh."""
    lost = [one["what"] for one in export(load_plan(package), ENGINES["megatron"]).document["lost"]]
    assert [what for what in lost if "time" in what] == [f"{SLICES} slices in time"]


def made(model: nn.Module, inputs: tuple[Tensor, ...] | None = None, **given: Any) -> Plan:
    options: dict[str, Any] = {"cluster": cluster(2), "rules": "none", "stages": 2, "micro_batches": 2, "slices": 2}
    return pdv.optimize(model, inputs or (ids(8, S),), **{**options, **given})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"stages": None}, "no pipeline"),
        ({"schedule": "gpipe"}, "order gpipe"),
        ({"schedule": "interleaved", "virtual_stages": 2}, "order interleaved"),
        ({"recompute": "full"}, "recomputation"),
        ({"offload": "activations"}, "activations on the host"),
        ({"offload": "optimizer"}, "host's memory"),
        ({"precision": "mixed"}, "master weights"),
        ({"products": "fp8", "dtype": "bfloat16"}, "narrower format"),
        ({"mode": "infer"}, "inference"),
        ({"slices": 1}, "1 slices"),
        ({"slices": 3}, "8 positions in 3 slices"),
    ],
    ids=str,
)
def test_what_does_not_go_with_it_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        made(Gpt(2), **given)


class Mixed(nn.Module):
    """Two layers over tokens, mixed along the sequence in a way of their own: ids [b, s] -> logits [b, s, v]."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.embed, self.head = way, nn.Embedding(V, D), nn.Linear(D, V)
        self.layers = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(2))
        self.conv, self.drop = nn.Conv1d(D, D, 3, padding=1), nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.mix(*layer(x).chunk(3, -1))
        logits: Tensor = self.head(x)
        return logits

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[b, s, d] each -> [b, s, d]."""
        at = torch.arange(q.shape[1])
        past = at[:, None] - at[None, :]
        match self.way:
            case "attention both ways":
                return F.scaled_dot_product_attention(q, k, v)
            case "a mask ahead":
                return F.scaled_dot_product_attention(q, k, v, attn_mask=past >= -1)
            case "a window":
                return F.scaled_dot_product_attention(q, k, v, attn_mask=(past >= 0) & (past < 3))
            case "two and two":
                return F.scaled_dot_product_attention(q, k, v, attn_mask=at[:, None] // 2 >= at[None, :] // 2)
            case "causal":
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            case "a mask of products":
                scores = (q @ k.transpose(-1, -2)).masked_fill(past < 0, float("-inf"))
                return scores.softmax(-1) @ v
            case "a convolution":
                y: Tensor = self.conv(v.transpose(1, 2)).transpose(1, 2)
                return y
            case "turned round":
                return v.flip(1)
            case "summed from the right":
                return v.flip(1).cumsum(1).flip(1)
            case "a mean":
                return v + v.mean(1, keepdim=True)
            case "dropout":
                return self.drop(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        raise AssertionError(self.way)


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("attention both ways", "positions depend on later ones"),
        ("a mask ahead", "positions depend on later ones"),
        ("a convolution", "conv1d is not made slice by slice"),
        ("turned round", "flip is not made slice by slice"),
        ("summed from the right", "flip is not made slice by slice"),
        ("a mean", "reduce_mean mean is not made slice by slice"),
        ("dropout", "dropout"),
    ],
)
def test_what_sees_later_positions_is_refused(way: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        made(Mixed(way))


@pytest.mark.parametrize("way", ["a window", "a mask of products"])
def test_masks_that_show_earlier_ones_alone_are_proved(way: str) -> None:
    assert made(Mixed(way)).document["proof"]["slices"]["error_bound"] < 1e-6


@pytest.mark.parametrize(
    ("way", "fixed"),
    mark_slow(
        [("causal", ""), ("a window", AT_THIS_LENGTH), ("two and two", AT_THIS_LENGTH)],
        [("two and two", AT_THIS_LENGTH)],
    ),
)
def test_a_mask_of_one_length_fixes_it(way: str, fixed: str, tmp_path: Path) -> None:
    """Four slices of 8 positions see no later ones where two and two see each other; four of 4 would."""
    shapes = {"ids": {0: Dim("batch"), 1: Dim("length", max=32)}}
    plan = made(Mixed(way), slices=4, dynamic_shapes=shapes)
    assert plan.document["sizes"]["length"]["fixed_by"] == fixed
    folder = plan.save(tmp_path / "mixed_pdv")
    text = (folder / "model.py").read_text()
    assert ('("b", 8)' if fixed else '("b", "length")') in text
    verify(folder)

    def opened(document: Document) -> None:
        document["sizes"]["length"]["fixed_by"] = "" if fixed else "nothing"

    with pytest.raises(VerificationError, match="sizes" if fixed else "model.py"):
        verify(change_plan(folder, opened))


def test_it_is_taken_where_it_is_asked_for() -> None:
    asked, unasked = made(Gpt(2)).document, made(Gpt(2), slices=None).document
    rules = [{step["rule"] for step in one["derivation"]} for one in (asked, unasked)]
    assert "slice" in rules[0] - rules[1]
    assert "no bound is known" in asked["search"]["certificate"]["statement"]
