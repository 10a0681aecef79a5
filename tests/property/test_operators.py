"""Every operator, cut in every way that it declares, computes what it computes whole: forward and gradient.

Declarations are checked, not trusted: a forgotten ``whole``, a wrong ``linear`` set, a mean over the local count fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ir.dims import Loops
from ir.errors import ShapeError, ShardingError, VerificationError
from ir.evaluation.floats import FloatField
from ir.evaluation.interpret import evaluate
from ir.graph import Graph
from ir.mesh import Mesh
from ir.operator import Operator, Split
from ir.ops import OPERATORS
from ir.ops.batch_norm import batch_norm, channel_mean, channel_variance
from ir.ops.contraction import linear
from ir.ops.normalization import softmax
from ir.ops.reduction import reduce_mean
from ir.proof.exact import verify_equal
from ir.sharding import Partial, Replicate
from ir.types import DType, TensorType
from ir.verify import divides
from pdv.frontend.torch.opaque import call_torch
from tests.property.programs import EXAMPLES, Example, parallel, serial

# Linear all the same, but no plan leaves a norm's weight or a list of pieces pending, so they are not declared.
FLOATS = FloatField(foreign=call_torch)
UNDECLARED = {
    "layer_norm": {frozenset({1, 2}), frozenset({1})},  # {1} where there is no bias
    "rms_norm": {frozenset({1})},
    "batch_norm": {frozenset({3, 4}), frozenset({0, 1, 4})},
    "concat": {frozenset({0, 1}), frozenset({0, 1, 2})},
}


def loops_of(example: Example) -> Loops:
    return example.declared.solve(example.op, example.types, example.declared.check_attrs(example.attrs))


def cases(sizes: tuple[int, ...]) -> Iterator[Any]:
    for example in EXAMPLES:
        loops = loops_of(example)
        splits = example.declared.splits(loops)
        mesh = Mesh.of(**{f"a{i}": size for i, size in enumerate(sizes)})
        for chosen in itertools.product(splits, repeat=len(sizes)):
            if divides(loops, chosen, mesh):
                yield pytest.param(example, chosen, mesh, id=f"{example}|{','.join(s.label for s in chosen)}|{mesh}")


def drawn(graph: Graph, rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    values: dict[str, np.ndarray[Any, Any]] = {}
    for node in graph.nodes:
        if node.is_param:
            values[node.name] = rng.uniform(0.5, 1.5, node.type.shape)  # inside every function's domain
        elif node.is_input:
            values[node.name] = rng.integers(0, 2, node.type.shape).astype(node.type.dtype.torch_name)
            values[node.name][..., 0] = 1  # no row of a mask is all false: its softmax is not a number
    return values


def test_every_operator_has_an_example() -> None:
    declared = {name for name, op in OPERATORS.items() if op.kind not in ("leaf", "parallel")}
    assert declared == {example.op for example in EXAMPLES}


@pytest.mark.parametrize(("example", "splits", "mesh"), [*cases((2,)), *cases((3,))])
def test_a_split_operator_is_the_whole_operator(example: Example, splits: tuple[Split, ...], mesh: Mesh) -> None:
    whole, pcg = parallel(example, splits, mesh)
    verify_equal(whole, pcg, mesh, scale=False)

    rng = np.random.default_rng(0)
    values = drawn(whole, rng)
    cotangents = {"y": rng.normal(size=whole.outputs[0][1].type.shape)}
    expected, found = evaluate(whole, values, field=FLOATS), evaluate(pcg, values, mesh=mesh, field=FLOATS)
    np.testing.assert_allclose(found.gather()["y"], expected.gather()["y"], rtol=1e-12, atol=1e-12)
    gradients = found.gather_gradients(cotangents)
    for name, gradient in expected.gather_gradients(cotangents).items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("example", [example for example in EXAMPLES if example.declared.fold], ids=str)
def test_an_operator_over_constants_is_the_operator(example: Example) -> None:
    graph = serial(example)
    values = drawn(graph, np.random.default_rng(2))
    (_, node), *_ = graph.outputs
    assert node.op.fold is not None
    folded = node.op.fold(*(values[operand.name] for operand in node.operands), **node.attrs)
    np.testing.assert_allclose(folded, evaluate(graph, values).gather()["y"], rtol=1e-12)


@pytest.mark.parametrize(("example", "splits", "mesh"), [*cases((2, 3))])
def test_splits_along_two_axes(example: Example, splits: tuple[Split, ...], mesh: Mesh) -> None:
    whole, pcg = parallel(example, splits, mesh)
    verify_equal(whole, pcg, mesh, scale=False, trials=1)


STOPPING = {"detach", "padded_embedding"}  # operators whose gradients are no derivatives, since they stop some


@pytest.mark.parametrize("example", [example for example in EXAMPLES if example.op not in STOPPING], ids=str)
def test_gradients_are_derivatives(example: Example) -> None:
    graph = serial(example)
    rng = np.random.default_rng(1)
    values = drawn(graph, rng)
    cotangent = rng.normal(size=graph.outputs[0][1].type.shape)
    step = 1e-6
    for name, gradient in evaluate(graph, values, field=FLOATS).gather_gradients({"y": cotangent}).items():
        direction = rng.normal(size=gradient.shape)
        ends = [
            (
                evaluate(graph, {**values, name: values[name] + s * direction}, field=FLOATS).gather()["y"] * cotangent
            ).sum()
            for s in (step, -step)
        ]
        assert (gradient * direction).sum() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_declared_linear_sets_are_the_measured_ones(example: Example) -> None:
    floats = [i for i, tensor in enumerate(example.types) if tensor.dtype.is_floating]
    subsets = [frozenset(s) for n in range(1, len(floats) + 1) for s in itertools.combinations(floats, n)]
    measured = {subset for subset in subsets if is_linear(example, subset)}
    declared = set(example.declared.linear)
    assert measured - UNDECLARED.get(example.op, set()) == declared
    assert declared <= measured


def is_linear(example: Example, group: frozenset[int]) -> bool:
    """Whether a sum pending in these operands may wait until after the operator."""
    arity = len(example.shapes)
    split = Split(None, tuple(Partial() if i in group else Replicate() for i in range(arity)), Partial())
    op = replace(example.declared, linear=(group,))
    mesh = Mesh.of(a=2)
    whole, pcg = parallel(replace(example, operator=op), (split,), mesh)
    try:
        verify_equal(whole, pcg, mesh, scale=False, trials=1)
    except VerificationError:
        return False
    return True


WRONG = {
    "softmax whose row may be cut": (
        Example("softmax", ((6, 4),), operator=replace(softmax, loops="... d -> ... d")),
        "d",
    ),
    "mean over the local count": (
        Example(
            "reduce_mean",
            ((6, 6),),
            {"dims": (0,), "keepdim": False},
            operator=replace(
                reduce_mean, evaluate=lambda t, x, c: t.scale(t.einsum("ab->b", x[0]), 1 / c.loops.extents["d0"])
            ),
        ),
        "d0",
    ),
    "bias added on every rank": (
        Example(
            "linear",
            ((6, 6), (6, 6), (6,)),
            operator=replace(
                linear,
                loops="m k, n k, n -> m n",
                evaluate=lambda t, x, c: t.add(t.einsum("mk,nk->mn", x[0], x[1]), x[2]),
            ),
        ),
        "k",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_declaration_is_caught(name: str) -> None:
    example, loop = WRONG[name]
    split = next(s for s in example.declared.splits(loops_of(example)) if s.loop == loop)
    mesh = Mesh.of(a=2)
    whole, pcg = parallel(example, (split,), mesh)
    with pytest.raises((VerificationError, ShardingError)):
        verify_equal(whole, pcg, mesh, scale=False)


@pytest.mark.parametrize("op", [channel_mean, channel_variance, batch_norm], ids=lambda op: op.name)
def test_channels_take_a_dim_of_their_own(op: Operator) -> None:
    vectors = (TensorType((6,), DType.F32),) * {"channel_mean": 0, "channel_variance": 1}.get(op.name, 4)
    attrs = op.check_attrs({"eps": 1e-5} if op is batch_norm else {})
    with pytest.raises(ShapeError, match="channels are the second"):
        op.solve(op.name, (TensorType((6,), DType.F32), *vectors), attrs)
