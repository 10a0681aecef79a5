"""Every parallel operator keeps the value forward and the gradient backward, in the states of its declaration.

A tensor's *pieces* are what the ranks of one axis hold. Its *value* follows from pieces and state: the blocks joined
(Shard), any one of the equal wholes (Invariant, Replicate), the sum of the terms (Partial). An operator changes
the state and never the value; its backward does the same to the gradient, whose state is the dual one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pdv.emit.templates import parallel
from pdv.emit.templates.parallel import Axis
from pdv.emit.templates.runtime import make_mesh
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed

SHAPE = (4, 8, 16)
DUAL = {"S": "S", "I": "I", "R": "P", "P": "R"}


@dataclass(frozen=True)
class Case:
    """An operator with its dims, and the states of its input and its result (a shard's dim behind the S)."""

    name: str
    dims: tuple[int, ...]
    before: str
    after: str

    def __call__(self, x: Tensor, axis: Axis) -> Tensor:
        operator: Callable[..., Tensor] = getattr(parallel, self.name)
        return operator(x, *self.dims, axis)


CASES = [
    Case("replicate", (), "I", "R"),
    Case("reduce", (), "P", "I"),
    *(Case("partition", (d,), "I", f"S{d}") for d in range(3)),
    *(Case("combine", (d,), f"S{d}", "I") for d in range(3)),
    *(Case("all_gather", (d,), f"S{d}", "R") for d in range(3)),
    *(Case("reduce_scatter", (d,), "P", f"S{d}") for d in range(3)),
    *(Case("all_to_all", (i, j), f"S{i}", f"S{j}") for i in range(3) for j in range(3) if i != j),
]


def dual(state: str) -> str:
    return DUAL[state[0]] + state[1:]


def pieces(state: str, size: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """What ``size`` ranks hold of a random tensor in the given state; small integers, so that sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    terms = [torch.randint(-8, 9, SHAPE, generator=generator).to(dtype) for _ in range(size)]
    if state == "P":
        return terms
    return list(terms[0].chunk(size, int(state[1:]))) if state[0] == "S" else [terms[0]] * size


def value(state: str, held: list[Tensor]) -> Tensor:
    if state == "P":
        return torch.stack(held).sum(0)
    if state[0] == "S":
        return torch.cat(held, int(state[1:]))
    assert all(torch.equal(piece, held[0]) for piece in held), f"unequal pieces in state {state}"
    return held[0]


Name = tuple[str, ...]  # of an axis, or of several as one


def run_cases(
    sizes: dict[str, int], dtype: torch.dtype, names: tuple[Name, ...] = ()
) -> dict[tuple[Name, Case], tuple[int, Tensor, Tensor | None]]:
    """Per axis (each alone, by default) and case: this rank's place along the axis, its result, and its gradient."""
    mesh = make_mesh(sizes, "cpu")
    results: dict[tuple[Name, Case], tuple[int, Tensor, Tensor | None]] = {}
    for name in names or [(axis,) for axis in sizes]:
        axis = mesh[name[0]] if len(name) == 1 else mesh[name]
        for seed, case in enumerate(CASES):
            x = pieces(case.before, axis.size, seed, dtype)[axis.rank]
            x = x.transpose(0, 2).contiguous().transpose(0, 2)  # the same values, other strides
            x.requires_grad_(dtype.is_floating_point)
            y = case(x, axis)
            if dtype.is_floating_point:
                grad = pieces(dual(case.after), axis.size, seed + 100, dtype)[axis.rank]
                torch.autograd.backward(y, grad.transpose(1, 2).contiguous().transpose(1, 2))
            results[name, case] = axis.rank, y.detach(), x.grad
    return results


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ({"tp": 2}, ()),
        ({"tp": 4}, ()),
        ({"dp": 2, "tp": 2}, (("dp",), ("tp",), ("dp", "tp"))),
        ({"dp": 2, "cp": 2, "tp": 2}, (("dp", "tp"), ("dp", "cp"))),
    ],
    ids=str,
)
def test_operators_keep_value_and_gradient(sizes: dict[str, int], names: tuple[Name, ...]) -> None:
    grid = torch.arange(math.prod(sizes.values())).reshape(*sizes.values())  # rank = row-major index over the axes
    ranks = run_ranks(run_cases, grid.numel(), sizes, torch.float64, names)
    for name, case in ranks[0]:
        size = math.prod(sizes[axis] for axis in name)
        places = [list(sizes).index(axis) for axis in name]
        for members in grid.movedim(places, tuple(range(-len(places), 0))).reshape(-1, size).tolist():
            held = [ranks[rank][name, case] for rank in members]
            assert [place for place, _, _ in held] == list(range(size))
            seed = CASES.index(case)
            x, y = pieces(case.before, size, seed), [piece[1] for piece in held]
            assert torch.equal(value(case.after, y), value(case.before, x)), f"{case} over {name}: forward"
            grad_y = pieces(dual(case.after), size, seed + 100)
            grad_x = [piece[2] for piece in held if piece[2] is not None]
            expected = value(dual(case.after), grad_y)
            assert torch.equal(value(dual(case.before), grad_x), expected), f"{case} over {name}: backward"


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float32], ids=str)
def test_operators_take_any_dtype(dtype: torch.dtype) -> None:
    ranks = run_ranks(run_cases, 2, {"tp": 2}, dtype)
    for name, case in ranks[0]:
        if dtype == torch.bool and case.before == "P":
            continue  # a sum of truth values has no meaning
        y = [rank[name, case][1] for rank in ranks]
        assert y[0].dtype == dtype
        x = pieces(case.before, 2, CASES.index(case), dtype)
        assert torch.equal(value(case.after, y), value(case.before, x)), f"{case}: forward"


def reference_and_sharded_gradient(forget_replicate: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of a function of x, first and second order, on one device and with its middle dim sharded."""
    (axis,) = make_mesh({"tp": 2}, "cpu").axes
    w = torch.linspace(0.5, 2, 8, dtype=torch.float64)
    mine = parallel.partition(w, 0, axis)

    def whole(x: Tensor) -> Tensor:
        return (torch.outer(x, w).sin() * w).sum()

    def sharded(x: Tensor) -> Tensor:
        copy = x if forget_replicate else parallel.replicate(x, axis)
        return parallel.reduce((torch.outer(copy, mine).sin() * mine).sum(), axis)

    x = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
    answers: list[Tensor] = []
    for function in (whole, sharded):
        (first,) = torch.autograd.grad(function(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x)
        answers += [first.detach(), second]
    return answers[0], answers[1], answers[2], answers[3]


def test_first_and_second_derivatives_equal_those_of_one_device() -> None:
    for first, second, sharded_first, sharded_second in run_ranks(reference_and_sharded_gradient, 2, False):
        torch.testing.assert_close(sharded_first, first, rtol=1e-12, atol=0)
        torch.testing.assert_close(sharded_second, second, rtol=1e-12, atol=0)


def test_a_forgotten_replicate_is_seen_in_the_gradient() -> None:
    for first, _, sharded_first, _ in run_ranks(reference_and_sharded_gradient, 2, True):
        assert not torch.allclose(sharded_first, first)
