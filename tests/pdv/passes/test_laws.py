"""Laws and steps: what it makes of a small graph, that this computes the same, and where it must not apply."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ir.builder import Builder
from ir.evaluation.interpret import evaluate
from ir.graph import Graph, Node
from ir.types import DType, TensorType
from pdv.passes import LAWS, canonicalize
from pdv.passes.simplify import STEPS, fold_constant
from pdv.rewrite.library import read_laws

Build = Callable[[Builder, Node], Node]


def x(k: Builder, *shape: int) -> Node:
    return k.input("x", TensorType(shape, DType.F32))


def param(k: Builder, name: str, *shape: int) -> Node:
    return k.param(name, TensorType(shape, DType.F32))


def const(k: Builder, array: object) -> Node:
    return k.const(np.asarray(array, np.float32))


@dataclass(frozen=True, slots=True)
class Case:
    """before(x) becomes after(x), for x of a shape."""

    law: str
    shape: tuple[int, ...]
    before: Build
    after: Build


def attend(k: Builder, q: Node, *mask: Node, causal: bool = False) -> Node:
    return k.attention(q, q, q, *mask, causal=causal, scale=0.5)


def eager(k: Builder, q: Node, mask: Node) -> Node:
    half = 0.5**0.5
    scores = k.matmul(k.scale(q, factor=half), k.scale(k.permute(q, perm=(0, 2, 1)), factor=half))
    return k.matmul(k.softmax(k.add(scores, mask)), q)


def long_gelu(k: Builder, v: Node, *, halve_last: bool = False) -> Node:
    inner = k.add(v, k.scale(k.pow(v, exponent=3.0), factor=0.044715))
    gate = k.shift(k.tanh(k.scale(inner, factor=0.7978846)), offset_by=1.0)
    return k.scale(k.mul(v, gate), factor=0.5) if halve_last else k.mul(gate, k.scale(v, factor=0.5))


def long_rms(k: Builder, v: Node, *, square: str) -> Node:
    squared = k.mul(v, v) if square == "mul" else k.pow(v, exponent=2.0)
    mean = k.shift(k.reduce_mean(squared, dims=(1,), keepdim=True), offset_by=1e-6)
    return k.mul(param(k, "w", 4), k.mul(v, k.reciprocal(k.sqrt(mean))))


def repeat_batch(array: object) -> np.ndarray[Any, Any]:  # Any: masks of bools or floats
    return np.broadcast_to(np.asarray(array), (2, 1, 3, 3)).copy()


CAUSAL = np.tri(3, dtype=bool)
BLOCKED = np.eye(3, dtype=bool)

CASES = [
    Case(
        "fold_constant",
        (2,),
        lambda k, v: k.mul(v, k.cos(const(k, [1.0, 2.0]))),
        lambda k, v: k.mul(v, const(k, np.cos(np.array([1, 2], np.float32)))),
    ),
    Case(
        "drop-scale",
        (2, 3),
        lambda k, v: k.relu(k.permute(k.scale(v, factor=1.0), perm=(0, 1))),
        lambda k, v: k.relu(v),
    ),
    Case(
        "merge-reshapes",
        (2, 6),
        lambda k, v: k.reshape(k.reshape(v, shape=(12,)), shape=(3, 4)),
        lambda k, v: k.reshape(v, shape=(3, 4)),
    ),
    Case(
        "merge-permutes",
        (2, 3, 4),
        lambda k, v: k.permute(k.permute(v, perm=(2, 0, 1)), perm=(0, 2, 1)),
        lambda k, v: k.permute(v, perm=(2, 1, 0)),
    ),
    Case(
        "permute_of_singletons",
        (2, 1, 4),
        lambda k, v: k.permute(v, perm=(1, 0, 2)),
        lambda k, v: k.reshape(v, shape=(1, 2, 4)),
    ),
    Case(
        "drop-dims-of-sum",
        (2, 3, 4),
        lambda k, v: k.reshape(k.reduce_sum(v, dims=(1,), keepdim=True), shape=(2, 4)),
        lambda k, v: k.reduce_sum(v, dims=(1,), keepdim=False),
    ),
    Case(
        "mean-of-sum",
        (2, 3, 4),
        lambda k, v: k.scale(k.reduce_sum(v, dims=(0, 2), keepdim=False), factor=0.125),
        lambda k, v: k.reduce_mean(v, dims=(0, 2), keepdim=False),
    ),
    Case(
        "param_move_is_view",
        (2, 4),
        lambda k, v: k.linear(v, k.permute(param(k, "w", 4, 3), perm=(1, 0))),
        lambda k, v: k.linear(v, k.param("w", TensorType((3, 4), DType.F32), view=(("permute", (1, 0)),))),
    ),
    Case(
        "sink_reshape_below_linear",
        (2, 3, 4),
        lambda k, v: k.linear(k.reshape(v, shape=(6, 4)), param(k, "w", 5, 4)),
        lambda k, v: k.reshape(k.linear(v, param(k, "w", 5, 4)), shape=(6, 5)),
    ),
    Case(
        "sink_reshape_below_vector",
        (2, 3, 4),
        lambda k, v: k.add(k.reshape(v, shape=(6, 4)), param(k, "b", 4)),
        lambda k, v: k.reshape(k.add(v, param(k, "b", 4)), shape=(6, 4)),
    ),
    Case(
        "absorb_expand",
        (2, 3),
        lambda k, v: k.add(v, k.expand(param(k, "b", 1, 3), shape=(2, 3))),
        lambda k, v: k.add(v, param(k, "b", 1, 3)),
    ),
    Case(
        "shrink_constant",
        (2, 3),
        lambda k, v: k.mul(v, const(k, [[1, 2, 3], [1, 2, 3]])),
        lambda k, v: k.mul(v, const(k, [1, 2, 3])),
    ),
    Case("name-division", (2, 3), lambda k, v: k.div(v, const(k, [[4.0]])), lambda k, v: k.scale(v, factor=0.25)),
    Case(
        "usual_scale",
        (2, 3, 4),
        lambda k, v: k.attention(v, v, v, scale=0.49999997),
        lambda k, v: k.attention(v, v, v, scale=0.5),
    ),
    Case(
        "usual_scale",
        (2, 3, 8),
        lambda k, v: k.attention(v, v, v, scale=0.35355338),  # as float32 has it
        lambda k, v: k.attention(v, v, v, scale=1 / math.sqrt(8)),
    ),
    Case("name-division", (2,), lambda k, v: k.div(v, const(k, [3.0])), lambda k, v: k.scale(v, factor=0.33333334)),
    Case("leaf_second", (3,), lambda k, v: k.add(param(k, "b", 3), v), lambda k, v: k.add(v, param(k, "b", 3))),
    Case(
        "repeated_ids",
        (2, 3, 4),
        lambda k, v: k.add(v, k.embedding(param(k, "t", 5, 4), k.const(np.array([[0, 1, 2]] * 2)))),
        lambda k, v: k.add(v, k.embedding(param(k, "t", 5, 4), k.const(np.array([[0, 1, 2]])))),
    ),
    Case(
        "constant_mask",
        (2, 2, 3, 4),
        lambda k, v: attend(k, v, k.const(repeat_batch(CAUSAL))),
        lambda k, v: attend(k, v, causal=True),
    ),
    Case("constant_mask", (2, 2, 3, 4), lambda k, v: attend(k, v, k.const(repeat_batch(CAUSAL | True))), attend),
    Case(
        "constant_mask",
        (2, 2, 3, 4),
        lambda k, v: attend(k, v, const(k, repeat_batch(np.where(CAUSAL, 0, -3e38)))),
        lambda k, v: attend(k, v, causal=True),
    ),
    Case(
        "constant_mask",
        (2, 2, 3, 4),
        lambda k, v: attend(k, v, k.const(repeat_batch(BLOCKED))),
        lambda k, v: attend(k, v, k.const(BLOCKED)),
    ),
    Case(
        "sink_reshape_below_transpose",
        (2, 3, 4, 5),
        lambda k, v: k.permute(k.reshape(v, shape=(6, 4, 5)), perm=(0, 2, 1)),
        lambda k, v: k.reshape(k.permute(v, perm=(0, 1, 3, 2)), shape=(6, 5, 4)),
    ),
    Case(
        "fuse-masked-attention",
        (2, 3, 4),
        lambda k, v: eager(k, v, const(k, np.eye(3))),
        lambda k, v: attend(k, v, const(k, np.eye(3))),
    ),
    Case(
        "fuse-attention",
        (2, 3, 4),
        lambda k, v: k.matmul(k.softmax(k.scale(k.matmul(v, k.permute(v, perm=(0, 2, 1))), factor=0.5)), v),
        attend,
    ),
    Case("name-silu", (3,), lambda k, v: k.mul(k.sigmoid(v), v), lambda k, v: k.silu(v)),
    Case("name-rsqrt", (3,), lambda k, v: k.reciprocal(k.sqrt(k.exp(v))), lambda k, v: k.rsqrt(k.exp(v))),
    Case("name-gelu-4", (3,), long_gelu, lambda k, v: k.gelu(v, approximate="tanh")),
    Case(
        "name-gelu-6", (3,), lambda k, v: long_gelu(k, v, halve_last=True), lambda k, v: k.gelu(v, approximate="tanh")
    ),
    Case(
        "name-gelu",
        (3,),
        lambda k, v: k.mul(k.scale(v, factor=0.5), k.shift(k.erf(k.scale(v, factor=0.70710678)), offset_by=1.0)),
        lambda k, v: k.gelu(v, approximate="none"),
    ),
    Case(
        "name-rms_norm",
        (3, 4),
        lambda k, v: long_rms(k, v, square="pow"),
        lambda k, v: k.rms_norm(v, param(k, "w", 4), eps=1e-6),
    ),
    Case(
        "name-rms_norm",
        (3, 4),
        lambda k, v: long_rms(k, v, square="mul"),
        lambda k, v: k.rms_norm(v, param(k, "w", 4), eps=1e-6),
    ),
]


def graph_of(build: Build, shape: tuple[int, ...]) -> Graph:
    k = Builder()
    return k.graph({"y": build(k, x(k, *shape))})


def run_alike(before: Graph, after: Graph, shape: tuple[int, ...]) -> bool:
    """Both graphs on the same random numbers; the first one has every parameter as it is stored."""
    rng = np.random.default_rng(0)
    values = {"x": rng.standard_normal(shape)}
    values |= {node.attr("source"): rng.standard_normal(node.type.shape) for node in before.params}
    y, z = (evaluate(graph, values).gather()["y"] for graph in (before, after))
    return bool(np.allclose(y, z, atol=1e-5))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.law)
def test_law_gives_the_equal_graph(case: Case) -> None:
    before, after = graph_of(case.before, case.shape), graph_of(case.after, case.shape)
    found = canonicalize(before)
    assert found.digest == after.digest
    assert canonicalize(found).digest == found.digest
    assert run_alike(before, found, case.shape)


def test_every_step_has_a_case() -> None:
    steps = {step.__name__ for step in (fold_constant, *STEPS)}
    assert steps <= {case.law for case in CASES} <= steps | {law.name for law in read_laws(LAWS)}


UNCHANGED: dict[str, tuple[tuple[int, ...], Build]] = {
    "a reshape that mixes the last dim stays above linear": (
        (2, 4),
        lambda k, v: k.linear(k.reshape(v, shape=(4, 2)), param(k, "w", 3, 2)),
    ),
    "an expand that the sum needs stays": ((1, 3), lambda k, v: k.add(k.expand(v, shape=(2, 3)), param(k, "b", 3))),
    "a constant that broadcasts x itself stays whole": (
        (1, 3),
        lambda k, v: k.add(v, const(k, [[1, 2, 3], [1, 2, 3]])),
    ),
    "another factor is no gelu": (
        (3,),
        lambda k, v: k.mul(k.scale(v, factor=0.5), k.shift(k.erf(k.scale(v, factor=0.8)), offset_by=1.0)),
    ),
    "the gate of another value is no silu": ((3,), lambda k, v: k.mul(v, k.sigmoid(k.relu(v)))),
    "a mask that trains keeps its gradient": ((2, 3, 4), lambda k, v: eager(k, v, param(k, "bias", 3, 3))),
    "an additive mask that only damps stays": (
        (2, 2, 3, 4),
        lambda k, v: attend(k, v, const(k, np.where(CAUSAL, 0, -5.0))),
    ),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_law_does_not_apply(name: str) -> None:
    shape, build = UNCHANGED[name]
    graph = graph_of(build, shape)
    assert canonicalize(graph).digest == graph.digest
