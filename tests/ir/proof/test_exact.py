"""What a proof says, and what a refusal says; the mistakes that plans make are in tests/mistakes."""

from __future__ import annotations

import math

import pytest

from ir.builder import Builder
from ir.errors import VerificationError
from ir.evaluation.polynomial import Pieces, Size
from ir.graph import Graph
from ir.mesh import Mesh
from ir.proof.exact import verify_equal
from ir.proof.primes import PRIMES
from ir.types import DType, TensorType

F32 = DType.F32
SINGLE = Mesh(())
X, W = TensorType((4, 6), F32), TensorType((6, 6), F32)


def chain(*ops: str, trainable: bool = True) -> Graph:
    k = Builder()
    x = k.linear(k.input("x", X), k.param("w", W, trainable=trainable), name="first")
    for op in ops:
        x = getattr(k, op)(x, name=op)
    return k.graph({"y": x})


def test_the_bound_is_the_one_derived() -> None:
    """One gelu over 24 points, twice (source and plan), of sums of 6 products; gradients of degree up to 3.

    Gradients by w are sums of 4 products of x with a cotangent and a derivative; those have no denominators.
    """

    def chance(degree: int, height: float) -> float:
        return degree / 2**30 + (height + 1) // 30 / PRIMES

    proof = verify_equal(chain("gelu"), chain("gelu"), SINGLE, trials=2, scale=False)
    first = chance(3, math.log2(4)) ** 2
    assert proof.error_bound == pytest.approx(first + 24**2 / 2 * 4 * (chance(2, math.log2(6)) ** 2))
    assert (proof.trials, proof.scaled) == (2, "full size")


def test_primes_follow_from_both_programs() -> None:
    """A law of one prime is no law: 2^31 is 1 modulo 2^31 - 1, and a program may not choose what judges it."""
    one, other = (verify_equal(chain(op), chain(op), SINGLE).primes for op in ("gelu", "relu"))
    assert one == verify_equal(chain("gelu"), chain("gelu"), SINGLE).primes
    assert not set(one) & set(other)
    k = Builder()
    x = k.scale(k.linear(k.input("x", X), k.param("w", W)), factor=2.0**31)
    with pytest.raises(VerificationError):
        verify_equal(chain(), k.graph({"y": x}), SINGLE)


def test_more_trials_say_more() -> None:
    graphs = chain("gelu", "tanh"), chain("gelu", "softmax")
    elements, rows = ([verify_equal(g, g, SINGLE, trials=n).error_bound for n in (2, 3)] for g in graphs)
    assert elements[0] > 1e6 * elements[1]
    assert rows[0] > rows[1] > 2.0**-64  # hashes of rows have 64 bits, however many trials


def test_too_few_trials_are_more() -> None:
    """One trial would let 288 arguments of gelu collide with a probability of 8e-5."""
    k = Builder()
    x = k.gelu(k.linear(k.input("x", TensorType((48, 6), F32)), k.param("w", W)))
    graph = k.graph({"y": x})
    assert verify_equal(graph, graph, SINGLE, trials=1, scale=False).trials == 2


def test_a_difference_names_output_and_the_first_new_value() -> None:
    with pytest.raises(VerificationError, match=r"y of the plan .* does not have is tanh tanh") as caught:
        verify_equal(chain("gelu", "relu"), chain("gelu", "tanh"), SINGLE)
    assert caught.value.check == "values"


def test_a_different_interface_is_refused() -> None:
    k = Builder()
    other = k.graph({"z": k.linear(k.input("x", X), k.param("w", W))})
    with pytest.raises(VerificationError, match="outputs of the plan are z"):
        verify_equal(chain(), other, SINGLE)


def test_algebra_is_proved_with_gradients() -> None:
    """x u + x v == x (u + v), and not x (u - v)."""

    def apart(sign: str) -> Graph:
        k = Builder()
        x, u, v = k.input("x", X), k.param("u", W), k.param("v", W)
        return k.graph({"y": getattr(k, sign)(k.linear(x, u), k.linear(x, v))})

    k = Builder()
    together = k.graph({"y": k.linear(k.input("x", X), k.add(k.param("u", W), k.param("v", W)))})
    verify_equal(apart("add"), together, SINGLE)
    with pytest.raises(VerificationError):
        verify_equal(apart("sub"), together, SINGLE)


def test_pieces_of_a_fused_weight_add_up_to_its_gradient() -> None:
    k = Builder()
    x = k.input("x", X)
    fused = k.linear(x, k.param("w", TensorType((18, 6), F32)))
    source = k.graph({"y": k.mul(k.chunk(fused, dim=1, parts=3, index=0), k.chunk(fused, dim=1, parts=3, index=2))})

    def pieces(second: int) -> Graph:
        k = Builder()
        parts = [
            k.linear(k.input("x", X), k.param(f"w{i}", W, source="w", view=(("chunk", 0, 3, i),))) for i in (0, second)
        ]
        return k.graph({"y": k.mul(*parts)})

    verify_equal(source, pieces(2), SINGLE)
    with pytest.raises(VerificationError):
        verify_equal(source, pieces(1), SINGLE)


def test_a_weight_may_go_only_if_its_gradient_is_zero() -> None:
    def with_unused(factor: float) -> Graph:
        k = Builder()
        x = k.input("x", X)
        v = k.linear(x, k.param("v", W))
        return k.graph({"y": k.add(k.linear(x, k.param("w", W)), k.scale(v, factor=factor))})

    verify_equal(with_unused(0.0), chain(), SINGLE)
    with pytest.raises(VerificationError):
        verify_equal(with_unused(1e-9), chain(), SINGLE)


def test_what_the_source_trains_the_plan_trains() -> None:
    with pytest.raises(VerificationError, match="disagree"):
        verify_equal(chain(), chain(trainable=False), SINGLE)


def filled_in(count: int) -> Graph:
    """Rows, each but the first its own times the one before, written in place one after the other."""
    k = Builder()
    x = k.linear(k.input("x", TensorType((count, 2), F32)), k.param("w", TensorType((2, 2), F32)))
    for n in range(1, count):
        row = k.mul(k.slice(x, dim=0, start=n, stop=n + 1), k.slice(x, dim=0, start=n - 1, stop=n))
        rest = [k.slice(x, dim=0, start=n + 1, stop=count)] if n + 1 < count else []
        x = k.concat(k.slice(x, dim=0, start=0, stop=n), row, *rest, dim=0)
    return k.graph({"y": x})


def test_what_is_written_in_place_is_bounded_row_by_row() -> None:
    """The last row's degree is its own and that of the row before: not twice the whole array's for every row."""
    graph = filled_in(40)
    assert verify_equal(graph, graph, SINGLE, scale=False).error_bound < 1e-15


def test_pieces_are_bounds_on_stretches() -> None:
    low, high = Size(1), Size(5, 2.0)
    pieces = Pieces.of(0, [(2, low), (0, high), (1, low), (4, high)])
    assert pieces.stretches == ((3, low), (4, high))
    assert pieces.within(1, 3).size == low
    assert pieces.within(2, 5).stretches == ((1, low), (2, high))
    assert pieces.within(2, 5).size == low.plus(high)
