"""The generator: what it finds in small worlds, the same each time, and nothing that follows from what it has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pdv.rewrite import library
from pdv.rewrite.check import check_law
from pdv.rewrite.generate.enumerate import KeptLaws, explore
from pdv.rewrite.generate.fuse import fusions
from pdv.rewrite.generate.generalize import generalize
from pdv.rewrite.generate.library import generate, written_library
from pdv.rewrite.generate.menu import WORLDS
from pdv.rewrite.generate.names import name_laws
from pdv.rewrite.generate.select import independent, is_implied, orient, profitable
from pdv.rewrite.generate.worlds import World
from pdv.rewrite.law import Law, parse_law
from pdv.rewrite.library import written_laws

SMALL = (
    World("chains", "x[t, k] y[k, n] w[n, p]", {"t": 3, "k": 4, "n": 5, "p": 2}, "matmul(_, _)"),
    World(
        "fused",
        "x[t, k] u[n, k] v[m, k]",
        {"t": 2, "k": 3, "n": 5, "m": 7},
        "linear(x, _), concat(_, _, dim=0), concat(_, _, dim=-1)",
        flat=frozenset({"concat", "linear"}),
    ),
)


def found_in(*worlds: World, max_ops: int = 3) -> list[Law]:
    found = KeptLaws()
    for world in worlds:
        explore(world, found, max_ops=max_ops, seed=0, report=lambda stage, share: None)
    return found.laws


def laws(*texts: str) -> list[Law]:
    return [parse_law(text) for text in texts]


def test_associativity_is_found_once() -> None:
    (law,) = found_in(SMALL[0])
    assert str(law) == "candidate: matmul(matmul(x, y), w) == matmul(x, matmul(y, w)) for x[*s, k] y[k, n] w[n, p]"


FUSED = (
    "linear(x, u), linear(x, v) == slice(linear(x, concat(u, v, dim=0)), dim=-1, start=0, stop=n), "
    "slice(linear(x, concat(u, v, dim=0)), dim=-1, start=n, stop=n + m) for x[*s, k] u[n, k] v[m, k]"
)


def test_what_joins_two_products_gives_their_fusion() -> None:
    (law,) = laws("j: concat(linear(x, u), linear(x, v), dim=-1) == linear(x, concat(u, v, dim=0)) "
                  "for x[*s, k] u[n, k] v[m, k]")  # fmt: skip
    by_slice, by_chunk = name_laws(fusions(law, seed=0))
    assert str(by_slice) == f"fuse-linear-sharing-input-by-slice: {FUSED}"
    assert by_chunk.name == "fuse-linear-sharing-input-by-chunk"


@pytest.mark.slow
def test_the_fusion_is_found_from_nothing() -> None:
    generated = generate(SMALL)
    texts = [str(law).partition(" #")[0] for law in generated.laws]
    assert f"fuse-linear-sharing-input-by-slice: {FUSED}" in texts
    for law in generated.laws:
        assert law.proof
        check_law(law, seed=5)


@pytest.mark.slow
def test_the_shipped_file_is_what_the_generator_makes() -> None:
    """Some 100 CPU-seconds."""
    text = written_library(generate(written=written_laws()), "pdv rules generate --max-ops 4 --seed 0")
    assert text == (Path(library.__file__).parent / "generated.laws").read_text(encoding="utf-8")


def test_two_runs_give_the_same_bytes() -> None:
    one, other = (written_library(generate(SMALL[:1], seed=3), "command") for _ in range(2))
    assert one == other


def test_no_pair_of_terms_that_is_equal_by_chance_becomes_a_law() -> None:
    """At 3, a + a + a is a · 3; at other factors it is not."""
    world = World("chance", "x[t, k] y[t, k]", {"t": 2, "k": 3, "c": 2.0}, "add(_, _), scale(_, factor=c)", 3)
    for law in found_in(world):
        check_law(law, seed=9)


SWAPS = ("a: relu(neg(x)) == relu(neg(x)) for x[*s]", "b: neg(scale(x, factor=c)) == scale(neg(x), factor=c) for x[*s]")


@pytest.mark.parametrize("text", SWAPS)
def test_a_law_that_changes_no_work_is_not_shipped(text: str) -> None:
    assert not profitable(parse_law(text), 0)


def test_a_law_that_moves_work_is_shipped() -> None:
    assert profitable(
        parse_law("c: scale(linear(x, w), factor=c) == linear(scale(x, factor=c), w) for x[*s, k] w[n, k]"), 0
    )


def test_the_side_of_more_work_is_on_the_left() -> None:
    law = orient(
        parse_law("d: linear(x, add(u, v)) == add(linear(x, u), linear(x, v)) for x[*s, k] u[n, k] v[n, k]"), 0
    )
    assert str(law.left[0]).startswith("add(")


def test_what_follows_from_other_laws_goes() -> None:
    general = "general: chunk(relu(x), dim=d, parts=p, index=i) == relu(chunk(x, dim=d, parts=p, index=i)) for x[*s]"
    special = "special: chunk(relu(x), dim=0, parts=2, index=1) == relu(chunk(x, dim=0, parts=2, index=1)) for x[t, k]"
    twice = (
        "twice: chunk(relu(relu(x)), dim=0, parts=2, index=1) == relu(relu(chunk(x, dim=0, parts=2, index=1))) "
        "for x[t, k]"
    )
    assert [law.name for law in independent(laws(general, special, twice), 0)] == ["general"]
    assert is_implied(*_split(laws(special, general)), 0)
    assert not is_implied(*_split(laws(general, special)), 0)


def _split(given: Sequence[Law]) -> tuple[Law, Sequence[Law]]:
    return given[0], given[1:]


def test_a_law_is_freed_of_leading_dims_and_literals() -> None:
    (law,) = laws("e: relu(chunk(x, dim=-1, parts=2, index=0)) == chunk(relu(x), dim=-1, parts=2, index=0) for x[t, k]")
    freed = generalize(law, {}, seed=0)
    assert str(freed) == (
        "e: relu(chunk(x, dim=d, parts=parts, index=i)) == chunk(relu(x), dim=d, parts=parts, index=i) for x[*s]"
    )


def test_an_equation_of_one_size_is_no_law() -> None:
    (law,) = laws("f: add(x, add(x, x)) == scale(x, factor=c) for x[t, k]")
    assert generalize(law, {"c": 3.0}, seed=0) is None


def test_names_tell_effects_and_are_each_their_own() -> None:
    texts = (
        "a: permute(permute(x, perm=(1, 0)), perm=(1, 0)) == x for x[t, k]",
        "b: chunk(relu(x), dim=d, parts=p, index=i) == relu(chunk(x, dim=d, parts=p, index=i)) for x[*s]",
        "c: matmul(matmul(x, y), z) == matmul(x, matmul(y, z)) for x[t, k] y[k, n] z[n, p]",
        "d: scale(scale(x, factor=c), factor=e) == scale(x, factor=c * e) for x[*s]",
        "e: linear(scale(x, factor=c), w) == linear(x, scale(w, factor=c)) for x[*s, k] w[n, k]",
        "f: matmul(x, permute(w, perm=(1, 0))) == linear(x, w) for x[*s, k] w[n, k]",
        "g: matmul(matmul(x, y), z) == matmul(x, matmul(y, z)) for x[*s, t, k] y[*s, k, n] z[*s, n, p]",
    )
    assert [law.name for law in name_laws(laws(*texts), taken=("fuse-scale",))] == [
        "cancel-permute-of-permute",
        "move-chunk-past-relu",
        "associate-matmul",
        "associate-matmul-2",
        "fuse-scale-2",
        "move-scale-across-linear",
        "fuse-matmul-permute-into-linear",
    ]


def test_what_is_joined_of_unlike_things_is_not_fused() -> None:
    (law,) = laws("g: concat(relu(x), relu(y), dim=-1) == relu(concat(x, y, dim=-1)) for x[*s, k] y[*s, m]")
    assert not list(fusions(law, seed=0))


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_a_world_reads(world: World) -> None:
    assert world.steps
    assert set(world.shapes) >= {slot for _, slots in world.steps for slot in slots if slot is not None}
