"""Techniques are read off a graph, by the cut that each operator takes."""

from __future__ import annotations

from ir.builder import Builder
from ir.mesh import Mesh
from pdv.pcg.techniques import techniques
from pdv.problem import Pins
from pdv.search.meshes import search_mesh
from tests.pdv.worlds import f32, mlp, problem

MESH = Mesh.of(a=2)


def test_megatron_is_a_column_and_a_row() -> None:
    k = Builder()
    x = k.replicate(k.input("x", f32(6, 12)), axis="a")
    up = k.partition(k.param("up", f32(24, 12)), dim=0, axis="a")
    down = k.partition(k.param("down", f32(12, 24)), dim=1, axis="a")
    y = k.reduce(k.linear(k.relu(k.linear(x, up)), down), axis="a")
    found = techniques(k.graph({"y": y}), MESH)["a"]
    assert "tensor parallel (column)" in found
    assert "tensor parallel (row)" in found
    assert "data parallel" not in found


def test_cutting_samples_is_data_parallel() -> None:
    pins = Pins(split=lambda node, axis, split: split.loop == "_0" or node.is_input, name="samples")
    found = search_mesh(problem(mlp(), MESH, pins=pins))
    assert "data parallel" in techniques(found.pcg, MESH)["a"]


def test_nothing_is_said_of_an_axis_that_does_nothing() -> None:
    k = Builder()
    pcg = k.graph({"y": k.linear(k.input("x", f32(6, 12)), k.param("w", f32(6, 12)))})
    assert techniques(pcg, Mesh.of(a=2, b=3)) == {"a": [], "b": []}
