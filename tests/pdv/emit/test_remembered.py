"""Values that backward makes again: the same gradients as of values that are kept, and nothing left behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F  # noqa: N812

from pdv.emit.templates.kernels import remembered
from pdv.emit.templates.kernels.remembered import again, pack, unpack

Again = Callable[..., Tensor]


def _kept(function: Again, *given: Any, **options: Any) -> Tensor:
    return function(*given, **options)


def _chain(again: Again, x: Tensor, y: Tensor) -> Tensor:
    return again(torch.mul, again(F.silu, x), y) @ again(F.silu, x).t()


def _views(again: Again, x: Tensor, y: Tensor) -> Tensor:
    h = again(F.gelu, x)
    return (h[:, ::2] * h.t().sum(1)[None, :3]) @ y[:3]


def _empty(again: Again, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.empty(0, dtype=torch.long)  # no other empty tensor's recipe
    return again(F.gelu, x[:0])[rows] @ y.t()


def _complex(again: Again, x: Tensor, y: Tensor) -> Tensor:
    left, right = again(torch.sin, x), again(torch.mul, y, x)
    return torch.view_as_complex(left.view(4, 3, 2)) * torch.view_as_complex(right.view(4, 3, 2)).conj()


def _negated(again: Again, x: Tensor, y: Tensor) -> Tensor:
    whole = torch.view_as_complex(x.view(4, 3, 2))
    return again(torch.sin, whole).conj().imag * y[:, :3]


def _changed(again: Again, x: Tensor, y: Tensor) -> Tensor:
    h, k = again(F.gelu, x), again(F.silu, y)
    h.mul_(3.0)  # as a hook may
    return again(torch.mul, h, k) @ h.t()


def _as_it_came(again: Again, x: Tensor, y: Tensor) -> Tensor:
    return again(torch.Tensor.contiguous, again(F.gelu, x)) @ y.t()


KINDS = (_chain, _views, _empty, _complex, _negated, _changed, _as_it_came)


@contextmanager
def _hooks() -> Iterator[None]:
    with saved_tensors_hooks(pack, unpack):
        yield


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 6, generator=generator, requires_grad=True) for _ in range(2)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.strip("_"))
def test_gradients_are_those_of_what_is_kept(kind: Callable[[Again, Tensor, Tensor], Tensor]) -> None:
    """Of one pass, of two over the same graph, and of the norm of a gradient."""
    with _hooks():
        made, given = kind(again, *(mine := _inputs())), mine
    expected, plain = kind(_kept, *(theirs := _inputs())), theirs
    torch.testing.assert_close(made, expected, rtol=0, atol=0)
    for _ in range(2):
        found = [
            torch.autograd.grad(x.abs().sum(), of, create_graph=True) for x, of in ((made, given), (expected, plain))
        ]
        torch.testing.assert_close(*found, rtol=0, atol=0)
    norms = [sum(((grad**2).sum() for grad in grads), torch.zeros(())) for grads in found]
    if norms[0].requires_grad:
        second = [torch.autograd.grad(norm, of) for norm, of in zip(norms, (given, plain), strict=True)]
        torch.testing.assert_close(*second)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("forward", [False, True])
def test_casts_are_those_of_the_forward_pass(forward: bool, backward: bool) -> None:
    found = []
    for way in (again, _kept):
        x, _ = _inputs()
        with _hooks(), torch.autocast("cpu", torch.bfloat16, enabled=forward):
            loss = (way(F.layer_norm, way(F.silu, x @ x.t()), (4,)) @ x).float().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=backward):
            loss.backward()  # type: ignore[no-untyped-call]
        found.append(x.grad)
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("ends", ["backward", "dropped"])
def test_nothing_stays_behind(ends: str) -> None:
    """Neither what was made, nor what it was made of, without another forward pass that would clear it away."""
    x, y = _inputs()
    with _hooks():
        source = x @ y.t()
        loss = (again(torch.mul, again(F.gelu, source), y @ x.t()) @ y).sum()
    memory = weakref.ref(source.untyped_storage())
    del source
    assert memory() is not None
    if ends == "backward":
        loss.backward()  # type: ignore[no-untyped-call]
        assert memory() is None, "while the loss is still there"
    del loss
    assert memory() is None


def test_a_value_is_kept_nowhere_and_made_once_for_its_readers() -> None:
    calls: list[int] = []

    def count(x: Tensor) -> Tensor:
        calls.append(1)
        return F.gelu(x)

    x, y = _inputs()
    with _hooks():
        h = again(count, x @ y.t())
        memory = weakref.ref(h.untyped_storage())
        loss = sum(((h @ y).sum() for _ in range(3)), torch.zeros(()))
    del h
    assert memory() is None
    loss.backward()  # type: ignore[no-untyped-call]
    assert len(calls) == 2
    gc.collect()
    assert not any(isinstance(one, remembered.Shared) for one in gc.get_objects())


def test_what_a_value_is_made_of_may_not_change() -> None:
    x, y = _inputs()
    bias = torch.zeros(6)
    with _hooks():
        loss = (again(F.layer_norm, x, (6,), None, bias) @ y.t()).sum()
    bias += 1.0
    with pytest.raises(RuntimeError, match="stale-weight"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_nothing_is_noted_without_gradients() -> None:
    x, _ = _inputs()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, _hooks():
            assert not hasattr(again(F.gelu, x).untyped_storage(), "recipe")
