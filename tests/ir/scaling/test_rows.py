"""A program over fewer rows is the program that one would write for them."""

from __future__ import annotations

from ir.builder import Builder
from ir.graph import Graph
from ir.rows import rows_apart
from ir.scaling.rows import fewer_rows, micro_batch
from ir.types import DType, TensorType
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph
from tests.pdv import worlds


def test_rows_of_programs() -> None:
    whole, half = worlds.mlp(batch=12), worlds.mlp(batch=6)
    found = fewer_rows(whole, 2)
    assert found is not None
    assert found.digest == half.digest
    found = fewer_rows(worlds.attention_block(batch=6), 3)
    assert found is not None
    assert found.digest == worlds.attention_block(batch=2).digest


def test_rows_of_a_described_model() -> None:
    model = arch("llama:layers=2,hidden=64,heads=4,kv_heads=2,ffn=128,seq=16,vocab=128")
    whole = graph(model, 8, DType.F32, layout="exported")
    found = fewer_rows(whole, 4)
    assert found is not None
    assert found.digest == graph(model, 2, DType.F32, layout="exported").digest


def test_rows_that_get_a_token() -> None:
    def program(rows: int) -> Graph:
        k = Builder()
        token = k.expand(k.param("token", TensorType((1, 1, 8), DType.F32)), shape=(rows, 1, 8))
        x = k.concat(token, k.input("x", TensorType((rows, 4, 8), DType.F32)), dim=1)
        return k.graph({"y": k.linear(x, k.param("w", TensorType((8, 8), DType.F32)))})

    found = fewer_rows(program(6), 3)
    assert found is not None
    assert found.digest == program(2).digest


def test_rows_that_cannot_be_cut() -> None:
    assert fewer_rows(worlds.mlp(batch=6), 4) is None


def test_rows_in_pairs_are_no_micro_batch_of_two() -> None:
    k = Builder()
    x = k.linear(k.input("x", TensorType((8, 6), DType.F32)), k.param("w", TensorType((6, 6), DType.F32)))
    pairs = k.graph({"y": k.reshape(x, shape=(4, 2, 6))})
    assert rows_apart(pairs)
    assert micro_batch(pairs, 2) is not None
    assert fewer_rows(pairs, 4) is not None
    assert micro_batch(pairs, 4) is None
