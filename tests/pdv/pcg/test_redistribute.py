"""Chains of parallel operators between every two shardings: legal step by step, and only where there is a way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from ir.builder import Builder
from ir.graph import Node
from ir.mesh import Mesh
from ir.proof.exact import verify_equal
from ir.sharding import Invariant, Partial, Replicate, Shard, Sharding, State, invariant, parse_sharding
from ir.verify import infer_shardings
from pdv.pcg.redistribute import Chain, Redistribution, all_shardings
from tests.pdv.worlds import f32, problem

TENSOR = f32(12, 36)
MESHES = (Mesh.of(a=2), Mesh.of(a=3), Mesh.of(a=2, b=3), Mesh.of(a=2, b=2))
LARGE = Mesh.of(a=2, b=3, c=2)
STATES: tuple[State, ...] = (Invariant(), Replicate(), Shard(0), Shard(1), Partial())


def moves_on(mesh: Mesh) -> Redistribution:
    return Redistribution(mesh, problem(Builder().graph({}), mesh).axes)


def pairs(mesh: Mesh) -> Iterator[tuple[Sharding, Sharding]]:
    shardings = all_shardings(TENSOR, mesh, STATES)
    return ((before, after) for before in shardings for after in shardings)


def possible(before: Sharding, after: Sharding) -> bool:
    """Chains start where values are made, and no operator makes copies; nothing enters Partial."""
    if Replicate() in before:
        return before == after
    return all(new != Partial() or old == Partial() for old, new in zip(before, after, strict=True))


def append(k: Builder, x: Node, chain: Chain) -> Node:
    for step in chain.steps:
        x = getattr(k, step.name)(x, **dict(step.dims), axis=step.axis)
    return x


def check(mesh: Mesh) -> None:
    """Each chain, appended to a node that is as it says, is accepted by the validator and ends where it says."""
    moves = moves_on(mesh)
    for before, after in pairs(mesh):
        chain = moves.chain(TENSOR, before, after, gradient=True)
        assert (chain is not None) == possible(before, after), (before, after)
        if chain is None:
            continue
        assert (not chain.steps) == (before == after)
        assert chain.forward_s >= 0.0
        assert chain.backward_s >= 0.0
        if Partial() not in before and Replicate() not in before:
            k = Builder()
            entry = moves.chain(TENSOR, invariant(mesh), before, gradient=True)
            assert entry is not None
            x = append(k, append(k, k.param("x", TENSOR), entry), chain)
            assert infer_shardings(k.graph({"y": x}), mesh)[x] == after


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_pair_of_shardings(mesh: Mesh) -> None:
    check(mesh)


@pytest.mark.slow
def test_every_pair_of_shardings_on_three_axes() -> None:
    check(LARGE)


@pytest.mark.parametrize("mesh", MESHES[:3], ids=str)
def test_there_and_back_is_nothing(mesh: Mesh) -> None:
    """whole -> before -> after -> whole computes the identity, forward and backward, and costs what it costs back."""
    moves = moves_on(mesh)
    k = Builder()
    source = k.graph({"y": k.tanh(k.param("x", TENSOR))})
    states: tuple[State, ...] = (Invariant(), Shard(0), Shard(1))
    for before, after in itertools.product(all_shardings(TENSOR, mesh, states), repeat=2):
        k = Builder()
        x = k.tanh(k.param("x", TENSOR))
        for start, end in itertools.pairwise((invariant(mesh), before, after, invariant(mesh))):
            chain = moves.chain(TENSOR, start, end, gradient=True)
            back = moves.chain(TENSOR, end, start, gradient=True)
            assert chain is not None
            assert back is not None
            assert chain.seconds == pytest.approx(back.seconds)
            x = append(k, x, chain)
        verify_equal(source, k.graph({"y": x}), mesh, trials=1)


def test_a_chain_is_never_dearer_than_by_way_of_a_third() -> None:
    mesh = Mesh.of(a=2, b=3)
    moves = moves_on(mesh)
    shardings = all_shardings(TENSOR, mesh, STATES)
    for before, between, after in itertools.product(shardings, repeat=3):
        first = moves.chain(TENSOR, before, between, gradient=True)
        second = moves.chain(TENSOR, between, after, gradient=True)
        if first is not None and second is not None:
            direct = moves.chain(TENSOR, before, after, gradient=True)
            assert direct is not None
            assert direct.seconds <= (first.seconds + second.seconds) * (1 + 1e-12)


def test_without_a_gradient_only_forward_is_paid() -> None:
    moves = moves_on(Mesh.of(a=2))
    chain = moves.chain(TENSOR, (Invariant(),), (Replicate(),), gradient=False)
    assert chain is not None
    assert chain.seconds == 0.0
    assert [step.name for step in chain.steps] == ["replicate"]


def test_axes_in_the_same_state_are_crossed_at_once() -> None:
    """One collective over both axes costs no more than one after the other, and is one operator."""
    mesh = Mesh.of(a=2, b=2)
    moves = moves_on(mesh)
    for before, after in [("P,P", "I,I"), ("I,I", "R,R"), ("S0,S0", "R,R"), ("I,I", "S1,S1"), ("P,P", "S0,S0")]:
        chain = moves.chain(TENSOR, parse_sharding(before), parse_sharding(after), gradient=True)
        assert chain is not None
        assert [step.axis for step in chain.steps] == ["a+b"], (before, after)
    mixed = moves.chain(TENSOR, parse_sharding("P,S0"), parse_sharding("I,I"), gradient=True)
    assert mixed is not None
    assert {step.axis for step in mixed.steps} == {"a", "b"}
