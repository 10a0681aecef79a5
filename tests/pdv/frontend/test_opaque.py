"""Operators without a declaration: planned whole, proved, written, run; refused where asked; cut where registered."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everyone calls it

import pdv
from ir.errors import UnsupportedOperatorsError, UsageError, VerificationError
from ir.evaluation.floats import FloatField
from ir.evaluation.interpret import evaluate
from pdv.frontend import load_program
from pdv.frontend.torch import opaque
from pdv.frontend.torch.opaque import call_torch
from pdv.plan.package import import_package
from pdv.report.opaque import OpaqueWarning
from tests.distributed.harness import run_ranks
from tests.distributed.observed import Observed, observe_step
from tests.pdv.worlds import cluster

BATCH, WIDTH, RANKS = 8, 16, 2
LOOPS = "... d*, d* -> ... d*"


@torch.library.custom_op("pdv_tests::smooth", mutates_args=())
def smooth(x: Tensor, weight: Tensor, by: float) -> Tensor:
    """softmax(by x) weight."""
    return torch.softmax(x * by, -1) * weight


@smooth.register_fake
def _(x: Tensor, weight: Tensor, by: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.by = inputs[2]


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    y = torch.softmax(x * ctx.by, -1)
    of_y = g * weight
    return ctx.by * y * (of_y - (of_y * y).sum(-1, keepdim=True)), (g * y).flatten(0, -2).sum(0), None


smooth.register_autograd(_backward, setup_context=_keep)


class Smoothed(nn.Module):
    """[b, 16] -> [b, 16]: a custom operator between two products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.rand(4 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(smooth(torch.tanh(self.up(x)), self.weight, 2.0))  # type: ignore[no-any-return]


class Running(nn.Module):
    """[b, 16] -> [b, 16]: the largest element so far times its place: two results of one operator, one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        values, places = torch.cummax(self.up(x), 1)
        return values * places


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is not registered for the next."""
    monkeypatch.setattr(opaque, "LOOPS", {})


def plan_of(module: nn.Module, **options: Any) -> Any:
    return pdv.optimize(module, (torch.randn(BATCH, WIDTH),), cluster=cluster(RANKS), mesh={"a": RANKS}, **options)


@pytest.mark.parametrize("module", [Smoothed(), Running()], ids=["custom", "aten"])
def test_an_unknown_operator_is_run_whole_and_listed(module: nn.Module, tmp_path: Path) -> None:
    with pytest.warns(OpaqueWarning, match="no declaration of .* whole on every rank"):
        plan = plan_of(module)
    (entry,) = plan.document["opaque_operators"]
    assert entry["loops"] == ""
    assert entry["time_s"] > 0
    assert "outputs, gradients and buffers within" in plan.document["run"]["statement"]
    assert "gradients and state are the same" in plan.document["reading"]
    folder = plan.save(tmp_path / "planned")
    assert entry["function"] + "(" in (folder / "model.py").read_text(encoding="utf-8")
    assert "to let it be cut: pdv.register_operator(" in pdv.explain(folder)
    pdv.verify(folder)


class Through(nn.Module):
    """[b, 16] -> [b, 16], through a function of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.up(x))


@pytest.mark.parametrize(
    ("function", "is_open"),
    [
        (lambda x: x * x.kthvalue(3, 1, keepdim=True).values, True),
        (lambda x: x * torch.linalg.svdvals(x.unflatten(1, (4, 4))).kthvalue(2, 1, keepdim=True).values, True),
        (lambda x: x * x.unfold(1, 4, 4).sum(2).kthvalue(2, 1, keepdim=True).values, True),
        (lambda x: x * torch.kthvalue(x.detach(), x.size(0) // 2, 1, keepdim=True).values, False),  # of its rows
        (lambda x: x + torch.pdist(x).sum(), False),  # as many as there are pairs of rows
    ],
)
def test_another_batch_is_taken_where_the_function_takes_it(
    function: Callable[[Tensor], Tensor], is_open: bool, tmp_path: Path
) -> None:
    module, x = Through(function), torch.randn(3 * BATCH, WIDTH)
    with pytest.warns(OpaqueWarning):
        folder = pdv.optimize(module, (x[:BATCH],), cluster=cluster(1)).save(tmp_path / "planned")
    model = import_package(folder).build(device="cpu")
    if is_open:
        torch.testing.assert_close(model(x), module(x))
    else:
        with pytest.raises(ValueError, match="wrong-size"):
            model(x)


class Bits(nn.Module):
    """[b, 16] -> [b, 16]: functions of elements and of rows that nobody declared, and the places that they give."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        values, places = self.up(x).topk(2)
        return torch.special.bessel_j0(x) + (self.table(places) * values.unsqueeze(-1)).sum(1)


def test_what_torch_knows_to_be_of_elements_or_rows_is_cut() -> None:
    """And what is chosen by values that have gradients is written behind them, though it has none itself."""
    pins = {"mesh": {"a": RANKS}, "techniques": {"a": "ddp"}}
    plan = plan_of(Bits(), pins=pins)
    assert {entry["loops"] for entry in plan.document["opaque_operators"]} == {"... -> ...", "d0 n* -> d0 k*"}
    assert "outputs, gradients and buffers within" in plan.document["run"]["statement"]


class Grouped(nn.Module):
    """[b, 16] -> [b, 16]: the two best groups of four, all else zero, as a router of grouped experts chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.up(x).sigmoid()
        best = scores.unflatten(1, (4, 4)).topk(2, -1)[0].sum(-1).topk(2, -1, sorted=False)[1]
        mask = torch.zeros(x.shape[0], 4).scatter_(1, best, 1)
        return scores.masked_fill(mask.bool().repeat_interleave(4, 1).logical_not(), 0.0)


def test_routers_of_groups_are_cut_by_rows(tmp_path: Path) -> None:
    plan = plan_of(Grouped(), pins={"mesh": {"a": RANKS}, "techniques": {"a": "ddp"}})
    assert all(entry["loops"].startswith("d0 ") for entry in plan.document["opaque_operators"])
    assert "outputs, gradients and buffers within" in plan.document["run"]["statement"]
    module, x = Grouped(), torch.randn(3 * BATCH, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OpaqueWarning)
        folder = pdv.optimize(module, (x[:BATCH],), cluster=cluster(1)).save(tmp_path / "planned")
    torch.testing.assert_close(import_package(folder).build(device="cpu")(x), module(x))


def _places(*sizes: int) -> Tensor:
    """The first two of each row, by turns."""
    return torch.arange(math.prod(sizes)).reshape(sizes) % 2


@pytest.mark.parametrize(
    ("function", "loops"),
    [
        (lambda x: torch.sort(x, dim=0, stable=True)[0], "n* d1 -> k* d1"),
        (lambda x: torch.argsort(x, dim=0, stable=True), "n* d1 -> k* d1"),
        (lambda x: torch.sort(x, stable=True)[0], "d0 n* -> d0 k*"),
        (lambda x: x.argmax(-1), "d0 n* -> d0"),
        (lambda x: x.argmax(0, keepdim=True), "n* d1 -> k* d1"),
        (lambda x: x.argmax(), ""),
        (lambda x: x.max(-1)[1], "d0 n* -> d0"),
        (lambda x: x.min(0, keepdim=True)[1], "n* d1 -> k* d1"),
        (lambda x: x.median(0)[0], "n* d1 -> d1"),
        (lambda x: x.mode(-1, keepdim=True)[1], "d0 n* -> d0 k*"),
        (lambda x: x.prod(1), "d0 n* -> d0"),
        (lambda x: x.prod(), ""),
        (lambda x: torch.linalg.vector_norm(x, 3, dim=1, keepdim=True), "d0 n* -> d0 k*"),
        (lambda x: torch.linalg.vector_norm(x, 3, dim=(0, 1), keepdim=True), ""),
        (lambda x: x.int() & 3, "... -> ..."),
        (lambda x: x.int() ^ x.sum(0, keepdim=True).int(), "..., ... -> ..."),
        (lambda x: torch.cdist(x[:, :3], x[:, 3:6]), ""),  # one sample
        (lambda x: torch.cdist(x.unflatten(1, (4, 2)), x[:, :2]), ""),  # to four points that all samples share
        (lambda x: x.scatter(1, _places(x.shape[0], 3), 2.0), "d0 n*, d0 n1* -> d0 k*"),
        (lambda x: x.scatter(0, _places(2, x.shape[1]), 1.0), "n* d1, n1* d1 -> k* d1"),
        (lambda x: x.scatter(1, _places(x.shape[0], 3), x), "d0 n*, d0 n1*, d0 n2* -> d0 k*"),  # three of each row
        (lambda x: x.scatter(1, _places(x.shape[0] - 1, 3), 1.0), ""),  # not of all rows
        (lambda x: x.scatter_reduce(1, _places(*x.shape), x, "amax"), "d0 n*, d0 n1*, d0 n2* -> d0 k*"),
    ],
)
def test_rows_go_along_the_dim_that_is_said(function: Any, loops: str) -> None:
    """By name, by place or by default: stable sorts say it by name."""

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)  # type: ignore[no-any-return]

    graph = load_program(Module(), (torch.randn(4, 8),)).graph
    assert [node.attr("loops") for node in graph.nodes if node.op.name == "opaque"] == [loops]


SAMPLES: dict[str, tuple[nn.Module | Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "conv3d": (nn.Conv3d(4, 6, 3, padding=1, stride=(1, 2, 2)), (4, 4, 6, 6)),
    "conv3d of patches": (nn.Conv3d(4, 6, (2, 3, 3), (2, 3, 3), bias=False), (4, 4, 6, 6)),
    "transposed": (nn.ConvTranspose2d(4, 6, 4, 2, 1), (4, 5, 5)),
    "transposed, in groups": (nn.ConvTranspose1d(4, 8, 3, 2, 1, output_padding=1, groups=2), (4, 7)),
    "pools": (nn.Sequential(nn.MaxPool3d(2), nn.AvgPool3d(2, 1), nn.AdaptiveAvgPool3d((1, 1, 2))), (4, 4, 6, 6)),
    "grid": (lambda x: F.grid_sample(x, torch.tanh(x[:, :2].permute(0, 2, 3, 1)), align_corners=False), (4, 5, 5)),
    "solve": (lambda x: torch.linalg.solve(x + 9 * torch.eye(4), torch.linalg.inv(x + 9 * torch.eye(4))), (4, 4)),
    "decompositions": (lambda x: torch.linalg.svdvals(x) * torch.linalg.det(x).unsqueeze(1), (4, 4)),
    "distances": (lambda x: torch.cdist(x, x[:, 1:].tanh()), (4, 5)),
    "fold": (lambda x: F.fold(F.unfold(x, 3, padding=1) * 2, (5, 5), 3, padding=1), (4, 5, 5)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_functions_of_each_sample_are_cut_by_samples(name: str, tmp_path: Path) -> None:
    """Convolutions over volumes, transposed ones whose windows overlap, and what else works sample by sample."""
    function, shape = SAMPLES[name]

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv1d(4, 4, 1)
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            return self.function(self.first(x.flatten(2)).view_as(x))  # type: ignore[no-any-return]

    module, x = Module(), torch.randn(2 * BATCH, *shape)
    pins = {"mesh": {"a": RANKS}, "techniques": {"a": "ddp"}}
    plan = pdv.optimize(module, (x[:BATCH],), cluster=cluster(RANKS), pins=pins)
    assert all(entry["loops"].startswith("n ") for entry in plan.document["opaque_operators"])
    assert "outputs, gradients and buffers within" in plan.document["run"]["statement"]
    model = import_package(plan.save(tmp_path / "planned")).build(device="cpu")
    torch.testing.assert_close(model(x), module(x))


RESIZED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "to a size": (lambda x: F.interpolate(x, size=(7, 5), mode="bilinear", align_corners=True), (4, 5, 6)),
    "by a factor": (lambda x: F.interpolate(x, scale_factor=2.5, mode="bicubic"), (4, 5, 6)),
    "along a line": (lambda x: F.interpolate(x, scale_factor=2.0, mode="linear"), (4, 6)),
    "volumes": (lambda x: F.interpolate(x, size=(3, 4, 5), mode="trilinear"), (4, 2, 3, 3)),
    "smaller, smoothed": (lambda x: F.interpolate(x, size=(3, 2), mode="bilinear", antialias=True), (4, 6, 5)),
}


@pytest.mark.parametrize("name", RESIZED)
@pytest.mark.parametrize("ways", [{"a": "ddp"}, {"a": "megatron"}])
def test_resized_channels_are_torchs_own_kernel_and_cut(name: str, ways: dict[str, str], tmp_path: Path) -> None:
    """Made of others, U-Nets took 1.2 to 1.5 times as long as their modules; nobody has to allow or register it."""
    function, shape = RESIZED[name]

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv1d(4, 8, 1), nn.Conv1d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            resized = function(self.first(x.flatten(2)).unflatten(2, x.shape[2:]))
            return self.last(resized.flatten(2))  # type: ignore[no-any-return]

    module, x = Module(), torch.randn(2 * BATCH, *shape)
    pins = {"mesh": {"a": RANKS}, "techniques": ways}
    with warnings.catch_warnings():
        warnings.simplefilter("error", OpaqueWarning)
        plan = pdv.optimize(module, (x[:BATCH],), cluster=cluster(RANKS), pins=pins, strict=True)
    assert [entry["loops"][:4] for entry in plan.document["opaque_operators"]] == ["n c "]
    assert "outputs, gradients and buffers within" in plan.document["run"]["statement"]
    package = plan.save(tmp_path / "resized")
    text = (package / "model.py").read_text()
    assert text.count("upsample") == 1
    assert "index_select" not in text
    model = import_package(package).build(device="cpu")
    torch.testing.assert_close(model(x), module(x))


def test_strict_refuses_it_with_its_place() -> None:
    with pytest.raises(UnsupportedOperatorsError, match=r"pdv_tests\.smooth\.default at test_opaque\.py:\d+"):
        plan_of(Smoothed(), strict=True)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.multinomial(torch.sigmoid(x), 2), "it draws at random"),
        (lambda x: torch.fft.rfft(x).tanh().real, "complex numbers"),
    ],
)
def test_what_may_not_be_run_as_it_is_stays_refused(function: Any, reason: str) -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedOperatorsError, match=reason):
        load_program(Module(), (torch.randn(4, 8),))


def test_what_is_read_of_it_is_what_torch_gives() -> None:
    module, x = Running(), torch.randn(BATCH, WIDTH)
    program = load_program(module, (x,))
    assert program.opaque
    values = {"x": x.numpy(), **{name: p.detach().numpy() for name, p in module.named_parameters()}}
    found = evaluate(program.graph, values, field=FloatField(foreign=call_torch)).gather()["output"]
    torch.testing.assert_close(torch.from_numpy(found), module(x).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "loops", "reason"),
    [
        ("pdv_tests::nothing", LOOPS, "torch has no operator"),
        ("pdv_tests::smooth", "... d* -> ... d*", "are of 1 operands"),
        ("pdv_tests::smooth", "... d, d -> ...", "d may be cut"),
        ("pdv_tests::smooth", "... d*, d* ... d*", "cannot be read"),
        ("aten::bernoulli", "... -> ...", "it draws at random"),
    ],
)
def test_a_registration_that_cannot_be_right_is_refused(function: str, loops: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        pdv.register_operator(function, loops)


def test_loops_that_are_no_rows_are_refused() -> None:
    """A softmax needs all of its dim: cut along it the text gives something else."""
    pdv.register_operator(smooth, "... d, d -> ... d")
    pins = {"mesh": {"a": RANKS}, "techniques": {"a": "tensor"}}
    with pytest.raises(VerificationError, match="differs from the source's"):
        plan_of(Smoothed(), pins=pins)


def observe(folder: Path, x: Tensor) -> Observed:
    """As ``observe_step``, from a module that makes the operator: a rank imports it."""
    return observe_step(folder, x)


@pytest.mark.distributed
@pytest.mark.parametrize("registered", [True, False])
def test_a_plan_runs(registered: bool, tmp_path: Path) -> None:
    module, x = Smoothed(), torch.randn(BATCH, WIDTH)
    if registered:
        pdv.register_operator(smooth, LOOPS)
        pins = {"mesh": {"a": RANKS}, "techniques": {"a": "ddp"}}
        plan = pdv.optimize(module, (x,), cluster=cluster(RANKS), mesh={"a": RANKS}, pins=pins)
        assert (
            "[b/a, 64]" in plan.emission.body(lambda name: ()) or plan.document["opaque_operators"][0]["loops"] == LOOPS
        )
    else:
        with pytest.warns(OpaqueWarning):
            plan = plan_of(module)
    folder = plan.save(tmp_path / "planned")
    x = torch.randn(2 * BATCH, WIDTH)  # whatever it was planned for
    y = module(x)
    torch.autograd.backward(y.square().sum() / len(x))
    for (index, count), found, gradients in run_ranks(observe, RANKS, folder, x):
        assert count == (RANKS if registered else count)
        torch.testing.assert_close(found, y.detach().chunk(count)[index])
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)
