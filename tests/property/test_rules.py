"""Every algebraic rule is a law: both sides are equal over Z_p, forward and gradient, wherever ``when`` allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ir.builder import Builder
from ir.errors import VerificationError
from ir.exact import verify_equal
from ir.graph import Graph, Node
from ir.mesh import Mesh
from pdv.rewrite.algebra import (
    RULES,
    associate_linear,
    move_chunk_into_linear,
    move_chunk_past_add,
    move_scale_past_linear,
    share_linear_of_sum,
)
from pdv.rewrite.rule import RewriteBuilder, Rule
from tests.pdv.worlds import f32

ALONE = Mesh(())
Bindings = Mapping[str, Any]  # Any: nodes and attribute values
Draw = Callable[[Builder, np.random.Generator], Bindings]


def value(k: Builder, name: str, *shape: int) -> Node:
    """An activation with a gradient, so that a law is checked backward too."""
    return k.tanh(k.param(name, f32(*shape)))


def weight(k: Builder, name: str, *shape: int) -> Node:
    return k.param(name, f32(*shape))


def lead(rng: np.random.Generator) -> list[int]:
    return [int(rng.integers(1, 5)) for _ in range(int(rng.integers(1, 3)))]


def chunk_past_add(k: Builder, rng: np.random.Generator) -> Bindings:
    parts, piece, dims = int(rng.integers(2, 4)), int(rng.integers(1, 4)), lead(rng)
    b_dims = dims[int(rng.integers(len(dims) + 1)) :]
    return {
        "x": value(k, "x", *dims, parts * piece),
        "b": weight(k, "b", *b_dims, parts * piece),
        "dim": len(dims),
        "parts": parts,
        "index": int(rng.integers(parts)),
    }


def chunk_into_linear(k: Builder, rng: np.random.Generator) -> Bindings:
    parts, piece, inner, dims = int(rng.integers(2, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 5)), lead(rng)
    return {
        "x": value(k, "x", *dims, inner),
        "w": weight(k, "w", parts * piece, inner),
        "dim": len(dims),
        "parts": parts,
        "index": int(rng.integers(parts)),
    }


def scale_past_linear(k: Builder, rng: np.random.Generator) -> Bindings:
    outer = int(rng.integers(1, 4))
    inner = outer + int(rng.integers(1, 4))
    return {"x": value(k, "x", *lead(rng), inner), "w": weight(k, "w", outer, inner), "factor": 0.25}


def linear_of_sum(k: Builder, rng: np.random.Generator) -> Bindings:
    dims, inner = lead(rng), int(rng.integers(1, 5))
    return {
        "x": value(k, "x", *dims, inner),
        "y": value(k, "y", *dims, inner),
        "w": weight(k, "w", int(rng.integers(1, 5)), inner),
    }


def linear_of_linear(k: Builder, rng: np.random.Generator) -> Bindings:
    m, n, o = (int(size) for size in rng.integers(1, 5, 3))
    return {"x": value(k, "x", *lead(rng), m), "v": weight(k, "v", n, m), "w": weight(k, "w", o, n)}


DRAWS: dict[str, Draw] = {
    move_chunk_past_add.name: chunk_past_add,
    move_chunk_into_linear.name: chunk_into_linear,
    move_scale_past_linear.name: scale_past_linear,
    share_linear_of_sum.name: linear_of_sum,
    associate_linear.name: linear_of_linear,
}


def sides(rule: Rule, seed: int) -> tuple[Graph, Graph]:
    """The program before, and what matching and applying the rule makes of it."""
    k = RewriteBuilder()
    before = rule.before(Builder(), *DRAWS[rule.name](Builder(), np.random.default_rng(seed)).values())
    binding = rule.match(before)
    assert binding is not None, "the drawn program is matched"
    return Builder().graph({"y": before}), k.graph({"y": rule.apply(k, binding)})


def test_every_rule_has_programs() -> None:
    assert set(DRAWS) == {rule.name for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_both_sides_are_equal(rule: Rule) -> None:
    for seed in range(12):
        before, after = sides(rule, seed)
        verify_equal(before, after, ALONE, scale=False, trials=1, seed=seed)


WRONG = {
    "the next piece of the bias": replace(
        move_chunk_past_add,
        after=lambda k, x, b, dim, parts, index: k.add(
            k.chunk(x, dim=dim, parts=parts, index=index),
            k.chunk(b, dim=b.type.rank - 1, parts=parts, index=(index + 1) % parts),
        ),
    ),
    "another factor": replace(
        move_scale_past_linear, after=lambda k, x, w, factor: k.scale(k.linear(x, w), factor=2 * factor)
    ),
    "one of two terms": replace(share_linear_of_sum, after=lambda k, x, y, w: k.linear(k.add(x, x), w)),
    "a gradient lost": replace(
        associate_linear,
        after=lambda k, x, v, w: k.linear(x, k.matmul(w, k.param("v", v.type, trainable=False))),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_caught(name: str) -> None:
    caught = 0
    for seed in range(6):
        before, after = sides(WRONG[name], seed)
        try:
            verify_equal(before, after, ALONE, scale=False, trials=1)
        except VerificationError:
            caught += 1
    assert caught == 6


def unmatched() -> dict[str, tuple[Rule, Node]]:
    """Programs of a rule's form that its ``when`` must refuse."""
    k = Builder()
    x = value(k, "x", 6, 12)
    return {
        "the chunked dim is not the last": (
            move_chunk_into_linear,
            k.chunk(k.linear(x, weight(k, "w", 4, 12)), dim=0, parts=2, index=0),
        ),
        "the bias has no such dim": (
            move_chunk_past_add,
            k.chunk(k.add(x, weight(k, "one", 1)), dim=1, parts=2, index=0),
        ),
        "the bias has more dims": (
            move_chunk_past_add,
            k.chunk(k.add(x, weight(k, "deep", 2, 6, 12)), dim=1, parts=3, index=0),
        ),
        "scaling afterwards would cost more": (
            move_scale_past_linear,
            k.linear(k.scale(x, factor=2.0), weight(k, "up", 24, 12)),
        ),
        "a sum of unlike terms": (
            share_linear_of_sum,
            k.add(k.linear(x, weight(k, "u", 4, 12)), k.linear(value(k, "y", 1, 12), weight(k, "u", 4, 12))),
        ),
        "two weights": (
            share_linear_of_sum,
            k.add(k.linear(x, weight(k, "u", 4, 12)), k.linear(x, weight(k, "t", 4, 12))),
        ),
    }


@pytest.mark.parametrize("name", unmatched())
def test_when_refuses(name: str) -> None:
    rule, node = unmatched()[name]
    assert rule.match(node) is None
