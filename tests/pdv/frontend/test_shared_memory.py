"""Weights shared in any form: they train as in the module, and states load from one to the other under all names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import pdv
from ir.errors import ModelError
from pdv.plan.package import Plan
from tests.pdv.worlds import cluster

D = 8


class Weights(nn.Module):
    """Named tensors, and what is made of them."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, tensor)
        self.call = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def draw(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 3)


def of(tensor: Tensor) -> nn.Parameter:
    """Another parameter in the same memory."""
    return nn.Parameter(tensor.detach())


def ab(m: Any, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, m.a).relu(), m.b)


def abc(m: Any, x: Tensor) -> Tensor:
    return F.linear(ab(m, x), m.c)


def in_forward(m: Any, x: Tensor) -> Tensor:
    w = m.w
    return F.linear(F.linear(x, w).relu(), w.t()) + F.linear(x, w[:D])


def fused(m: Any, x: Tensor) -> Tensor:
    q, k, v = F.linear(x, m.qkv).chunk(3, -1)
    return q * k + v + F.linear(x, m.qkv[:D])


def flat(m: Any, x: Tensor) -> Tensor:
    return ab(m, x) + F.linear(x, m.flat[D : D + D * D].view(D, D))


def regrouped(m: Any, x: Tensor) -> Tensor:
    rows = F.linear(x, m.w.repeat_interleave(2, 0).flatten(0, 1)).unflatten(1, (2, -1))
    return (rows.sum(1) * F.linear(x, m.w.view(6, 2, D).flatten(0, 1)))[..., :D]


def tensors(name: str) -> dict[str, Tensor]:
    w, wide, row = draw(2 * D, D), draw(D, 2 * D), draw(3 * D * D)
    of_row = {"a": of(row[: D * D].view(D, D)), "b": of(row[D * D : 2 * D * D].view(D, D))}
    return {
        "in forward": {"w": w},
        "fused": {"qkv": draw(3 * D, D)},
        "apart": {"a": of(w[:D]), "b": of(w[D:])},
        "transposed": {"a": (square := draw(D, D)), "b": of(square.t())},
        "overlapping rows": {"a": of(w[:D]), "b": of(w[4 : 4 + D])},
        "columns": {"a": of(wide[:, :D]), "b": of(wide[:, 4 : 4 + D]), "c": of(wide.t()[D:])},
        "every second row": {"a": w, "b": of(w[::2])},
        "of a row": {"flat": row, **of_row},
        "in other shapes": {"w": draw(4, 3, D)},
        "attributes": {"w": w, "a": w[:D], "b": w[D:]},
    }[name]


FORWARD = {"in forward": in_forward, "fused": fused, "columns": abc, "of a row": flat, "in other shapes": regrouped}
NAMES = ("in forward", "fused", "apart", "transposed", "overlapping rows", "columns", "every second row", "of a row")


def make(name: str) -> Weights:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        forward = FORWARD.get(name, ab)
        if name == "every second row":
            return Weights(lambda m, x: F.linear(F.linear(x, m.a).relu()[..., :D], m.b), **tensors(name))
        return Weights(forward, **tensors(name))


def plan(module: nn.Module, x: Tensor) -> Plan:
    return pdv.optimize(module, (x,), cluster=cluster(2), mesh={"x": 2})


@pytest.mark.parametrize("name", [*NAMES, "attributes", "in other shapes"])
def test_shared_weights_train_as_in_the_module_and_keep_their_names(name: str) -> None:
    torch.manual_seed(1)
    module, x, y = make(name), torch.randn(4, D), torch.randn(4, D)
    planned = plan(module, x)
    program: Any = planned.build("cpu")
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.02) for each in (module, program)]
    for _ in range(3):
        loss = F.mse_loss(module(x), y)
        torch.autograd.backward(loss)
        torch.testing.assert_close(program.train_step(x, y, F.mse_loss), loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = program.full_state_dict()
    assert set(found) == set(state)
    make(name).load_state_dict(found)
    for key, tensor in module.state_dict().items():
        torch.testing.assert_close(found[key], tensor)
        assert not torch.equal(found[key], state[key])
    program.load_full_state_dict(state)
    for key, tensor in program.full_state_dict().items():
        assert torch.equal(tensor, state[key]), key


def test_what_is_one_parameter_now_is_said() -> None:
    assert (
        "(b of a), whose gradient is the sum of theirs"
        in plan(make("transposed"), torch.randn(4, D)).document["reading"]
    )
    assert "share memory" not in plan(make("fused"), torch.randn(4, D)).document["reading"]


def test_a_buffer_in_the_memory_of_a_parameter_is_refused() -> None:
    module = make("transposed")
    del module.b
    module.register_buffer("b", module.a.detach().t())  # type: ignore[operator, union-attr]
    for check in (True, False):
        with pytest.raises(ModelError, match="the parameter a shares memory with b"):
            pdv.optimize(module, (torch.randn(4, D),), cluster=cluster(2), check=check)


def test_a_checkpoint_of_parts_is_read_into_what_they_share(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    module, x = make("overlapping rows"), torch.randn(4, D)
    w = torch.randn(2 * D, D)
    save_file({"a": w[:D].clone(), "b": w[4 : 4 + D].clone()}, tmp_path / "model.safetensors")
    planned = pdv.optimize(module, (x,), cluster=cluster(2), mesh={"x": 2}, weights=tmp_path / "model.safetensors")
    torch.testing.assert_close(planned.build("cpu")(x), F.linear(F.linear(x, w[:D]).relu(), w[4 : 4 + D]))
