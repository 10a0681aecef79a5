"""Ids that a program computes lie in the tables that it looks up, where it is evaluated and where its text is run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ir.builder import Builder
from ir.errors import VerificationError
from ir.evaluation.id_ranges import are_computed, id_ranges
from ir.evaluation.interpret import evaluate
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.proof.exact import verify_equal
from ir.types import DType, TensorType
from pdv.check import check_text, checked
from pdv.emit.emission import Emission
from pdv.frontend.program import Weights

F32 = DType.F32
OFFSETS = np.array([0, 32, 64])

COMPUTED: dict[str, Callable[[Builder, Node], Node]] = {
    "an offset": lambda k, ids: k.shift(ids, offset_by=40),
    "from the end": lambda k, ids: k.shift(ids, offset_by=-40),
    "twice": lambda k, ids: k.shift(k.scale(ids, factor=2), offset_by=1),
    "a table for each column": lambda k, ids: k.add(ids, k.const(OFFSETS)),
}


def looked_up(computed: Callable[[Builder, Node], Node], *, factor: float = 1.0) -> Graph:
    k = Builder()
    ids = k.input("ids", TensorType((8, 3), DType.I64))
    table = k.param("table", TensorType((96, 8), F32))
    w = k.param("w", TensorType((8, 8), F32))
    return k.graph({"y": k.scale(k.linear(k.embedding(table, computed(k, ids)), w), factor=factor)})


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_ids_lie_in_their_table(name: str) -> None:
    (found,) = id_ranges(looked_up(COMPUTED[name]), {"ids": 96}).values()
    least, most = found
    assert 0 <= least < most <= 96
    ids = np.arange(least, most)
    places = {
        "an offset": ids + 40,
        "from the end": ids - 40,
        "twice": 2 * ids + 1,
        "a table for each column": ids[:, None] + OFFSETS,
    }[name]
    assert places.min() >= 0
    assert places.max() < 96


@pytest.mark.parametrize("rows", [2, 8, 30])
def test_few_ids_do_not_lie_in_their_table_by_luck(rows: int) -> None:
    """The last row of each sequence, by its length: ids count on from where each begins."""
    k = Builder()
    tokens, lengths = (
        k.input("tokens", TensorType((rows, 6), DType.I64)),
        k.input("lengths", TensorType((rows,), DType.I64)),
    )
    words = k.param("words", TensorType((40, 8), F32))
    places = k.add(k.shift(lengths, offset_by=-1), k.const(6 * np.arange(1, rows + 1)))
    h = k.reshape(k.embedding(words, k.reshape(tokens, shape=(6 * rows,))), shape=(6 * rows, 8))
    found = id_ranges(k.graph({"y": k.embedding(h, places)}), {"tokens": 40, "lengths": 6 * rows})
    assert found["tokens"] == (0, 40)
    least, most = found["lengths"]
    assert 0 <= least < most <= 2


def test_ids_as_they_are_given_are_drawn_from_the_whole_table() -> None:
    k = Builder()
    ids = k.input("ids", TensorType((8, 3), DType.I64))
    moved = k.reshape(k.permute(ids, perm=(1, 0)), shape=(24,))
    assert not are_computed(moved)
    assert are_computed(k.shift(moved, offset_by=1))


@pytest.mark.parametrize("name", COMPUTED)
def test_a_proof_reads_rows_that_are_there(name: str) -> None:
    """Rows beyond a table are zero in both programs, and twice zero is zero."""
    right = looked_up(COMPUTED[name])
    verify_equal(right, right, Mesh.of(a=2))
    with pytest.raises(VerificationError):
        verify_equal(right, looked_up(COMPUTED[name], factor=2.0), Mesh.of(a=2))


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("few", [0, 1 << 20])
def test_a_text_with_computed_ids_is_run(name: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "FEW_ELEMENTS", few)
    graph = looked_up(COMPUTED[name])
    assert check_text(graph, Emission.of(graph, Mesh(()), train=True), Weights({})).ran


def masked(*, right: bool) -> Graph:
    k = Builder()
    mask = k.input("mask", TensorType((8, 16), DType.I64))
    x = k.input("x", TensorType((8, 16), F32))
    y = k.linear(x, k.param("w", TensorType((16, 16), F32)))
    return k.graph({"y": k.where(k.cast(mask, dtype="bool"), y, k.scale(y, factor=0.5) if right else y)})


def test_masks_of_integers_are_false_somewhere() -> None:
    verify_equal(masked(right=True), masked(right=True), Mesh.of(a=2))
    with pytest.raises(VerificationError):
        verify_equal(masked(right=True), masked(right=False), Mesh.of(a=2))


def test_what_is_no_zero_is_true() -> None:
    k = Builder()
    mask = k.input("mask", TensorType((4,), DType.I64))
    graph = k.graph({"y": k.cast(k.cast(mask, dtype="bool"), dtype="f32")})
    assert evaluate(graph, {"mask": np.array([0, 1, 2, -3])}).gather()["y"].tolist() == [0.0, 1.0, 1.0, 1.0]
