"""Activations in the host's memory: what is sent, when it is let go and had back, and what plans say of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pdv
from ir.errors import NoPlanFitsError, UsageError, VerificationError
from ir.types import DType
from pdv.emit.emission import shapes_in
from pdv.emit.templates import rounding
from pdv.emit.templates.gradients import local
from pdv.emit.templates.rounding import Group, Piece, on_host
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import program
from pdv.memory import step_memory
from pdv.plan.package import Plan
from pdv.problem.workload import Recompute, Workload
from pdv.report.loaded import load_plan, workload_of_plan
from pdv.report.summary import summarize
from pdv.simulate.step import simulate
from pdv.verification.package import verify
from tests.pdv.emit.test_offload import small
from tests.pdv.miniatures import Gpt, ids, settled
from tests.pdv.packages import Document, change_plan
from tests.pdv.pipelined import Blocks
from tests.pdv.worlds import cluster

DEEP = "gpt:layers=8,hidden=128,heads=4,seq=256,vocab=256"


class Block(nn.Module):
    """It keeps its input and what its tanh gives; the weight stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.table = nn.Buffer(torch.randn(8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(x @ local(self.weight)) * mask * self.table + x


def run(blocks: list[Block], x: Tensor, mask: Tensor, *, there: bool) -> Tensor:
    for block in blocks:
        x = on_host(block, x, mask) if there else block(x, mask)
    return x.square().sum()


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> WeakSet[Piece]:
    """Those that are alive."""
    found, make = WeakSet[Piece](), Piece.__init__

    def note(piece: Piece, here: Tensor, group: Group) -> None:
        make(piece, here, group)
        found.add(piece)

    monkeypatch.setattr(Piece, "__init__", note)
    return found


@pytest.fixture
def blocks() -> list[Block]:
    torch.manual_seed(0)
    return [Block() for _ in range(5)]


def test_gradients_are_those_of_blocks_that_keep_it(blocks: list[Block]) -> None:
    x, mask = torch.randn(4, 8), torch.rand(4, 8)
    wanted = torch.autograd.grad(run(blocks, x, mask, there=False), [block.weight for block in blocks])
    loss = run(blocks, x, mask, there=True)
    for _ in range(2):  # the graph may be kept
        found = torch.autograd.grad(loss, [block.weight for block in blocks], retain_graph=True)
        assert all(one.equal(other) for one, other in zip(found, wanted, strict=True))
    with torch.no_grad():
        assert run(blocks, x, mask, there=True).equal(loss)


def test_passes_under_way_are_kept_apart(blocks: list[Block], pieces: WeakSet[Piece]) -> None:
    """As of a pipeline: the first one's backward comes behind the second one's forward."""
    first, second = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    mask = torch.rand(4, 8)
    wanted = [torch.autograd.grad(run(blocks, x, mask, there=False), x)[0] for x in (first, second)]
    losses = [run(blocks, x, mask, there=True) for x in (first, second)]
    found = [torch.autograd.grad(loss, x)[0] for loss, x in zip(losses, (first, second), strict=True)]
    assert all(one.equal(other) for one, other in zip(found, wanted, strict=True))
    del losses
    assert not pieces, "all of it is gone with the graph"


def test_two_blocks_are_on_the_device_at_once(blocks: list[Block], pieces: WeakSet[Piece]) -> None:
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(len({id(one.group) for one in pieces if one.here is not None}))

    for block in blocks:
        block.register_forward_pre_hook(look)
        block.register_full_backward_hook(look)
    loss = run(blocks, torch.randn(4, 8, requires_grad=True), torch.rand(4, 8), there=True)
    assert seen == [0, 1, 1, 1, 1]
    held = list(pieces)
    assert len(held) == 2 * len(blocks) - 1, (
        "of each its tanh and, but for the first, its input: no weight, mask, table"
    )
    assert all(one.there is not None and one.there.nbytes == 4 * 8 * 4 for one in held)
    del held
    seen.clear()
    loss.backward()  # type: ignore[no-untyped-call]
    assert max(seen) <= 2


def test_of_a_block_that_runs_again_its_input_waits_there(blocks: list[Block], pieces: WeakSet[Piece]) -> None:
    x, mask = torch.randn(4, 8, requires_grad=True), torch.rand(4, 8)
    wanted = torch.autograd.grad(run(blocks, x, mask, there=False), x)[0]
    out = x
    for block in blocks:
        out = on_host(checkpoint, block, out, mask, use_reentrant=False)
    assert len(pieces) == len(blocks) - 1, "the first one's is the caller's"
    assert torch.autograd.grad(out.square().sum(), x)[0].equal(wanted)


def test_what_comes_back_is_asked_for_one_block_ahead(blocks: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Group] = []
    fetch = Group.fetch

    def note(group: Group) -> None:
        asked.append(group)
        fetch(group)

    monkeypatch.setattr(rounding.Group, "fetch", note)
    run(blocks, torch.randn(4, 8, requires_grad=True), torch.rand(4, 8), there=True).backward()  # type: ignore[no-untyped-call]
    order = list(dict.fromkeys(asked))
    assert len(order) == len(blocks)
    assert all(later.before is earlier for later, earlier in pairwise(order))


# ---- Plans ----


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Gpt on two devices."""
    options: dict[str, Any] = {"offload": "activations", "stages": 1, "micro_batches": 2, "rules": "none"}
    return pdv.optimize(settled(Gpt(4)), (ids(8, 8),), cluster=cluster(2), **options)


@pytest.mark.parametrize("change", ["drop", "to", "sites"])
def test_a_plan_that_says_otherwise_than_its_program_is_refused(change: str, plan: Plan, tmp_path: Path) -> None:
    folder = plan.save(tmp_path / "gpt_pdv")
    verify(folder)

    def other(document: Document) -> None:
        (step,) = [step for step in document["derivation"] if step["rule"] == "offload-activations"]
        if change == "drop":
            document["derivation"].remove(step)
        elif change == "to":
            step["bindings"]["to"] = "disk"
        else:
            step["sites"] = ["all"]

    copied = Path(shutil.copytree(folder, tmp_path / "other" / "gpt_pdv", ignore=shutil.ignore_patterns("__pycache__")))
    with pytest.raises(VerificationError):
        verify(change_plan(copied, other))


def test_the_plan_and_the_program_say_it(plan: Plan) -> None:
    assert "on_host(" in plan.emission.body(shapes_in(plan.weights))
    assert "activations on the host" in str(summarize(plan.document))
    assert plan.document["simulated"]["host_bytes"] > 0


def of(recompute: str, **given: Any) -> Plan:
    options: dict[str, Any] = {"rules": "none", "cost": "analytic", "micro_batches": 1, "stages": 1, **given}
    options |= {"recompute": "full"} if "full" in recompute else {"recompute": "none"}
    options |= {"offload": "activations"} if "hosted" in recompute else {}
    return pdv.optimize(program(arch(DEEP), 8, DType.F32), **options)


@pytest.fixture
def work_of(tmp_path: Path) -> Callable[[Plan], Workload]:
    """Of a plan, as it is read back."""

    def read(plan: Plan) -> Workload:
        return workload_of_plan(load_plan(plan.save_plan(tmp_path / "gpt_pdv", overwrite=True)))

    return read


def test_what_layers_keep_leaves_the_device_and_takes_the_link(work_of: Callable[[Plan], Workload]) -> None:
    ways: tuple[Recompute, ...] = ("hosted", "full", "full-hosted")
    fast = {way: of(way, cluster=small("16 GiB", host_link="1000 GB/s")) for way in ways}
    slow = of("hosted", cluster=small("16 GiB", host_link="100 kB/s"))
    memory = {way: step_memory(work_of(one)).worst for way, one in fast.items()}
    assert memory["full-hosted"].peak_bytes < memory["full"].peak_bytes
    assert 0 < memory["full-hosted"].host_bytes < memory["hosted"].host_bytes
    steps = {way: simulate(work_of(one), draws=0) for way, one in fast.items()}
    assert steps["hosted"].step_ps < steps["full"].step_ps
    moved = simulate(work_of(slow), draws=0)
    (share,) = moved.breakdown
    there = memory["hosted"].host_bytes / 1e5 * 1e12  # each way, but for two layers of eight
    assert 1.2 * there < share.parts["offload"] <= 2.1 * there
    assert sum(share.parts.values()) == moved.step_ps


def test_it_is_taken_where_it_is_allowed_and_nothing_else_is_as_fast(work_of: Callable[[Plan], Workload]) -> None:
    def made(memory: str, **given: Any) -> set[str]:
        found = pdv.optimize(
            program(arch(DEEP), 8, DType.F32),
            **{"rules": "none", "cost": "analytic", "cluster": small(memory, **given.pop("device", {})), **given},
        )
        return {step["rule"] for step in found.document["derivation"]}

    fewer: tuple[Recompute, ...] = ("hosted", "full")
    needs = {way: step_memory(work_of(of(way, cluster=small("16 GiB")))).worst.least_bytes for way in ("light", *fewer)}
    less = f"{(needs['light'] + max(needs[way] for way in fewer)) / 2**21:.0f} MiB"
    options: dict[str, Any] = {"stages": 1, "micro_batches": 1}
    assert "offload-activations" not in made("16 GiB", allow=["offload"], **options)
    assert "recompute" in made(less, **options)
    fast, slow = ({"host_link": rate, "host_bandwidth": "1 GB/s"} for rate in ("1000 GB/s", "1 MB/s"))
    kept = options | {"recompute": "none"}  # what is light takes less to make again than the optimizer to move
    assert "offload-activations" in made(less, allow=["offload"], device=fast, **kept)
    assert "offload-activations" not in made(less, allow=["offload"], device=slow, **options)
    with pytest.raises(NoPlanFitsError, match="of its host"):
        made("16 GiB", offload="activations", device={**fast, "host_memory": "64 MiB"}, **options)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"mode": "infer"}, "inference"),
        ({"allow": ["offload"]}, "allowed"),
        ({"stages": 2, "schedule": "zbv"}, "activations on the host"),
        ({"stages": 2, "schedule": "zero-bubble"}, "activations on the host"),
        ({"recompute": "light"}, "light"),
    ],
)
def test_what_does_not_go_with_it_is_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        pdv.optimize(Blocks(), (torch.randn(8, 4, 16),), cluster=cluster(2), offload="activations", **given)
    with pytest.raises(UsageError, match="without repeated layers"):
        pdv.optimize(nn.Linear(4, 4), (torch.randn(8, 4),), cluster=cluster(2), offload="activations")


@pytest.mark.parametrize("mesh", [{"mesh": {"dp": 2}}, {}])
def test_it_goes_with_pins_and_a_mesh(mesh: dict[str, Any]) -> None:
    pins = {"mesh": {"dp": 2}, "techniques": {"dp": "zero-2"}}
    for where in ("activations", "all"):
        plan = pdv.optimize(
            Blocks(), (torch.randn(8, 4, 16),), cluster=cluster(2), offload=where, pins=pins, check=False, **mesh
        )
        assert "ZeRO-2" in plan.document["techniques"]["dp"]
        assert "offload-activations" in {step["rule"] for step in plan.document["derivation"]}
