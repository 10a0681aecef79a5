"""Functions with a backward of their own: programs have the gradients that they define, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import pdv
from ir.errors import ModelError
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from pdv.frontend.onnx.export import export_onnx
from tests.pdv.worlds import cluster

Function: Any = torch.autograd.Function  # Any: torch types what its methods take as one form of many


class Straight(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004  # torch passes it
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return grad


class Within(Function):
    """Straight through where it is small; may be differentiated once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x > 0, 1.0, -1.0)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class Reversed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.by * grad, None


class Product(Function):
    """Of a weight, whose gradient is twice what it is; saved apart from forward."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), 2 * x.t() @ grad


class Several(Function):
    """Two results with gradients, and one without."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        large = x > 0
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(large)
        return x.exp(), x.sin(), large

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor, _: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return first * x.exp() + 3 * second * x.cos()


class Swish(Function):
    """As those that spare memory have it: the gradient is that of forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return grad * (gate * (1 + x * (1 - gate)))


class Bounded(Function):
    """Of the gradient no linear function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return grad.clamp(-0.01, 0.01)


class Doing(nn.Module):
    """Two linear maps, and ``what`` between them."""

    def __init__(self, what: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.what = nn.Linear(3, 4), nn.Linear(4, 3), what
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Any:
        return self.last(self.what(self.first(x), self.weight))


def several(x: Tensor, _: Tensor) -> Tensor:
    first, second, large = Several.apply(x)
    return first + second * large  # type: ignore[no-any-return]


LINEAR: list[Callable[[Tensor, Tensor], Any]] = [
    lambda x, _: Straight.apply(x),
    lambda x, _: Within.apply(x) + Straight.apply(2 * x),
    lambda x, _: Reversed.apply(x, 0.7),
    lambda x, weight: Product.apply(x, weight) + x,
    several,
    lambda x, _: Swish.apply(x),
]
NAMES = ["straight", "within", "reversed", "product", "several", "swish"]


@pytest.mark.parametrize("what", LINEAR, ids=NAMES)
def test_programs_have_the_gradients_that_functions_define(what: Callable[[Tensor, Tensor], Any]) -> None:
    torch.manual_seed(0)
    module, x = Doing(what), torch.randn(5, 3)
    source = copy_of(module, x, train=True)
    program = load_program(module, x)
    assert "gradients and state are the same" in check_reading(program.graph, source, train=True)
    assert program.own_backward == ()
    pdv.optimize(module, x, cluster=cluster(2), check=False)  # known without that run, too


@pytest.mark.parametrize("what", LINEAR, ids=NAMES)
def test_our_export_keeps_them(what: Callable[[Tensor, Tensor], Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Doing(what), torch.randn(5, 3)
    export_onnx(module, x, tmp_path / "model.onnx")
    found = load_program(tmp_path / "model.onnx").graph
    assert "gradients and state are the same" in check_reading(found, copy_of(module, x, train=True), train=True)


def test_a_gradient_that_is_that_of_forward_is_written_as_such() -> None:
    x = torch.randn(5, 3)
    own = load_program(Doing(lambda x, _: Swish.apply(x)), x).graph
    assert len(own.nodes) == len(load_program(Doing(lambda x, _: nn.functional.silu(x)), x).graph.nodes)


def test_what_is_no_linear_function_is_refused(tmp_path: Path) -> None:
    module, x = Doing(lambda x, _: Bounded.apply(x)), torch.randn(5, 3)
    with pytest.raises(ModelError, match="the gradient of first"):
        pdv.optimize(module, x, cluster=cluster(2))
    with pytest.raises(ModelError, match=r"Bounded .* have a backward of their own"):
        pdv.optimize(module, x, cluster=cluster(2), check=False)
    with pytest.raises(ModelError, match=r"Bounded have a backward of their own, for which ONNX has no word"):
        export_onnx(module, x, tmp_path / "model.onnx")
    pdv.optimize(module, x, cluster=cluster(2), mode="infer")
    export_onnx(module.eval(), x, tmp_path / "model.onnx")


def test_reading_leaves_state_as_it_is() -> None:
    module, x = nn.Sequential(nn.BatchNorm1d(3), Doing(lambda x, _: Straight.apply(x))), torch.randn(5, 3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    drawn = torch.random.get_rng_state()
    load_program(module, x)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert all(p.grad is None for p in module.parameters())


def test_gradients_beside_dropout_are_compared_under_one_mask() -> None:
    module, x = (
        nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), Doing(lambda x, _: Straight.apply(x))),
        torch.randn(5, 3),
    )
    assert load_program(module, x).own_backward == ()
