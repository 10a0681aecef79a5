"""What a proof says, and what a refusal says; the mistakes that plans make are in tests/mistakes."""

from __future__ import annotations

import pytest

from ir.builder import Builder
from ir.errors import VerificationError
from ir.exact import verify_equal
from ir.graph import Graph
from ir.mesh import Mesh
from ir.modular import PRIME
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
    """One gelu over 24 points, twice (source and plan), of an argument of degree 2; gradients of degree up to 3."""
    proof = verify_equal(chain("gelu"), chain("gelu"), SINGLE, trials=2, scale=False)
    assert proof.error_bound == pytest.approx((3 / PRIME) ** 2 + 48**2 / 2 * ((2 / PRIME) ** 2 + 2.0**-64))
    assert (proof.trials, proof.prime, proof.scaled) == (2, 2**31 - 1, "full size")
    assert "probability of error below" in str(proof)


def test_more_trials_say_more() -> None:
    bounds = [
        verify_equal(chain("gelu", "tanh"), chain("gelu", "tanh"), SINGLE, trials=n).error_bound for n in (1, 2, 3)
    ]
    assert bounds[0] > 1e6 * bounds[1]
    assert bounds[1] > bounds[2] > 2.0**-64  # hashes of arguments have 64 bits, however many trials


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
