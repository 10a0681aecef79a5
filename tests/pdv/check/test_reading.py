"""What is read of a module against the module: each kind of state and gradient that a reading may lose is seen."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdv
from ir.errors import ModelError
from pdv.check import module_run, reading
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from tests.pdv.worlds import cluster


class Doing(nn.Module):
    """A linear map, and what ``what`` makes of it."""

    def __init__(self, what: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.norm, self.what = nn.Linear(3, 3), nn.BatchNorm1d(3), what
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        return self.what(self, x)


def counted(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.linear(x) * m.calls  # type: ignore[no-any-return]


def drawn(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * random.random()  # type: ignore[no-any-return]


class _Signs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004  # torch passes it
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004  # torch passes it
        return grads[0].sign()  # not linear in what it is given


def signs(m: Any, x: Tensor) -> Tensor:
    return _Signs.apply(m.linear(x))  # type: ignore[no-any-return, no-untyped-call]


def normed(m: Any, x: Tensor) -> Any:
    return {"normed": m.norm(m.linear(x)), "mean": (x.mean(), None)}


def said(module: nn.Module, x: Tensor, *, train: bool = True) -> str:
    source = copy_of(module, (x,), train=train)
    return check_reading(load_program(module, (x,)).graph, source, train=train)


def test_what_is_right_is_said_and_nothing_is_changed() -> None:
    module, x = Doing(normed), torch.zeros(4, 3)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.random.get_rng_state()
    assert "gradients and state are the same" in said(module, x)
    assert "gradients" not in said(module.eval(), x, train=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(state, torch.random.get_rng_state())
    assert not x.any()


@pytest.mark.parametrize(
    ("what", "differs"),
    [
        (counted, "output 0 of a second call differs by 5"),
        (drawn, "output 0"),
        (signs, "the gradient of linear"),
    ],
)
def test_what_the_reading_lost_is_refused(what: Callable[[Any, Tensor], Any], differs: str) -> None:
    with pytest.raises(ModelError, match=differs):
        said(Doing(what), torch.randn(4, 3))


def test_hooks_on_gradients_are_seen_where_they_count() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].register_full_backward_hook(lambda layer, given, taken: (2 * given[0],))
    with pytest.raises(ModelError, match=r"the gradient of 0\."):
        said(module, torch.randn(4, 3))
    assert "same" in said(module, torch.randn(4, 3), train=False)


def test_hooks_on_parameters_are_seen_where_they_count() -> None:
    module = nn.Linear(3, 3)
    module.bias.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ModelError, match="the gradient of bias is given to a hook"):
        said(module, torch.randn(4, 3))
    assert "same" in said(module, torch.randn(4, 3), train=False)


def in_parts(layers: Any) -> None:
    layers[1].weight = nn.Parameter(layers[0].weight.data[:, :2])


def as_two(layers: Any) -> None:
    layers[1].weight = nn.Parameter(layers[0].weight.data)


def as_a_buffer(layers: Any) -> None:
    layers[1].register_buffer("bias_of_0", layers[0].bias.detach())


def as_an_attribute(layers: Any) -> None:
    layers[1].transposed = layers[0].weight.data.t()


@pytest.mark.parametrize("share", [in_parts, as_two, as_a_buffer, as_an_attribute])
def test_a_parameter_whose_memory_is_also_another_tensor_is_not_trained(share: Callable[[Any], None]) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layers[1].weight = layers[0].weight  # one parameter under two names
    assert "same" in said(layers, torch.randn(4, 3))
    share(layers)
    with pytest.raises(ModelError, match=r"the parameter 0.* shares memory with 1"):
        copy_of(layers, (torch.randn(4, 3),), train=True)
    assert not isinstance(copy_of(layers, (torch.randn(4, 3),), train=False), str)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_held_to_their_own_rounding(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8)).to(dtype)
    assert "same" in said(module, torch.randn(4, 8, dtype=dtype))


def test_what_cannot_be_run_is_said() -> None:
    meta = nn.Linear(3, 3, device="meta")
    assert "not run against the module: the module is on the meta device" in said(
        meta, torch.randn(4, 3, device="meta")
    )
    module = nn.Linear(3, 3)
    module.__dict__["made"] = module.weight * 2  # copy.deepcopy takes leaves alone
    assert "cannot be copied" in said(module, torch.randn(4, 3))


@pytest.mark.parametrize("seed", range(8))
def test_statistics_of_few_rows_are_no_false_alarm(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_POINTS", 1)
    torch.manual_seed(seed)
    assert "(2 rows of them)" in said(Doing(normed), torch.randn(8, 3))


def test_large_modules_are_run_over_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_POINTS", 1)
    monkeypatch.setattr(module_run, "MOST_WEIGHTS", 1)
    module, x = Doing(normed), torch.randn(8, 3)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert "(2 rows of them)" in said(module, x)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    with pytest.raises(ModelError, match="the gradient of linear"):
        said(Doing(signs), x)
    monkeypatch.setattr(reading, "MOST_PRODUCTS", 1)
    assert "not run against the module: it takes" in said(module, x)


def test_exported_programs_are_run_too() -> None:
    program = torch.export.export(nn.Linear(3, 3), (torch.randn(4, 3),))
    assert "same" in check_reading(load_program(program).graph, copy_of(program, None, train=True), train=True)


def test_optimize_refuses_what_it_did_not_read() -> None:
    with pytest.raises(ModelError, match="what was read of the model is not the module"):
        pdv.optimize(Doing(counted), (torch.randn(4, 3),), cluster=cluster(2))
    plan = pdv.optimize(Doing(normed), (torch.randn(4, 3),), cluster=cluster(2))
    assert "against the module" in plan.document["reading"]


def twice_hidden(m: Any, x: Tensor) -> Tensor:
    """Nine tenths of the least number of the type, twice: no number in float64, where the constant is another one."""
    least = 0.9 * torch.finfo(x.dtype).min
    hidden = (x[:, :1] * 0 + least) if x.dtype == torch.float32 else (x[:, :1] * 0 + least) * 2
    return (m.linear(x) + hidden).softmax(-1)  # type: ignore[no-any-return]


def whole_times_much(m: Any, x: Tensor) -> Tensor:
    """Integers made floats, times what integers do not hold."""
    mask = (x > 0).long()
    return (m.linear(x) + (1.0 - mask) * -1e30).softmax(-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", [twice_hidden, whole_times_much])
def test_masks_by_the_least_number_are_no_false_alarm(what: Callable[[Any, Tensor], Any]) -> None:
    torch.manual_seed(0)
    module, x = Doing(what), torch.randn(4, 3)
    graph = load_program(module, x).graph
    assert "are the same" in check_reading(graph, copy_of(module, x, train=True), train=True)


def in_float32(m: Any, x: Tensor) -> Tensor:
    """Scores that are hidden by a number beside which float32 has no room for them, and float64 has."""
    return ((m.linear(x) - 1e10).float().softmax(-1).type_as(x)) * x  # type: ignore[no-any-return]


def in_float32_and_wrong(m: Any, x: Tensor) -> Tensor:
    """The same beside a number that a reading takes for another."""
    return in_float32(m, x) + m.linear(x) * (1.0 if torch.compiler.is_exporting() else 1.001)


def test_what_a_module_computes_in_float32_is_held_to_float32() -> None:
    torch.manual_seed(0)
    module, x = Doing(in_float32), torch.randn(4, 3)
    graph = load_program(module, x).graph
    assert "are the same" in check_reading(graph, copy_of(module, x, train=True), train=True)
    wrong = Doing(in_float32_and_wrong)
    with pytest.raises(ModelError, match="output 0 differs"):
        check_reading(load_program(wrong, x).graph, copy_of(wrong, x, train=True), train=True)


def test_a_backward_of_ones_own_is_compared_or_refused() -> None:
    x = torch.randn(4, 3)
    with pytest.raises(ModelError, match=r"_Signs .* have a backward of their own"):
        pdv.optimize(Doing(signs), x, cluster=cluster(2), check=False)


def test_a_buffer_with_two_names_is_one_in_float64() -> None:
    """Torch makes two of it, and its state was asked for by both names."""
    first, second = Doing(counted), Doing(counted)
    mask = torch.tensor([1.0, 0.0, 1.0])
    for part in (first, second):
        part.register_buffer("mask", mask)
    source = copy_of(nn.Sequential(first, second), (torch.randn(4, 3),), train=True)
    assert isinstance(source, module_run.Source)
    assert source.in_float64().first_names == source.first_names
    assert source.first_names["1.mask"] == "0.mask"
