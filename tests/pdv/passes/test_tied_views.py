"""A weight used as it is and transposed, or whole and in part, is one parameter, planned and trained as one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pdv
from ir.builder import Builder
from ir.graph import Graph, View
from ir.mesh import Mesh
from ir.proof.exact import verify_equal
from pdv.passes.tied_views import untangle, whole_buffers
from pdv.plan.package import import_package
from tests.pdv.worlds import cluster, f32

VIEWS: dict[str, tuple[View, View]] = {
    "transposed": ((), (("permute", (1, 0)),)),
    "whole and rows": ((), (("slice", 0, 0, 3, 6),)),
    "parts that overlap": ((("slice", 0, 0, 4, 6),), (("slice", 0, 2, 6, 6),)),
    "a part of the transpose": ((), (("permute", (1, 0)), ("chunk", 0, 2, 1))),
}


def two_readers(views: tuple[View, View]) -> Graph:
    k = Builder()
    x = k.input("x", f32(4, 6))
    ends = {}
    for number, view in enumerate(views):
        rows = {"slice": 4, "chunk": 3}.get(view[-1][0], 6) if view else 6
        rows = 3 if view == (("slice", 0, 0, 3, 6),) else rows
        shape = (1, 2, 6) if view and view[0][0] == "reshape" else (rows, 6)
        w = k.param("w", f32(*shape), view=view)
        ends[f"y{number}"] = k.linear(x, k.reshape(w, shape=(2, 6)) if len(shape) > 2 else w)
    return k.graph(ends)


@pytest.mark.parametrize("name", VIEWS)
def test_overlapping_views_are_operators_on_one_parameter(name: str) -> None:
    graph = two_readers(VIEWS[name])
    found = untangle(graph, {})
    assert [param.type.shape for param in found.params] == [(6, 6)]
    verify_equal(graph, found, Mesh.of(a=2), gradients=True)


def test_parts_that_do_not_overlap_stay_parameters() -> None:
    graph = two_readers(((("slice", 0, 0, 4, 8),), (("slice", 0, 4, 8, 8),)))
    assert untangle(graph, {}) is graph


def test_views_that_begin_with_one_shape_and_then_part_stay_parameters() -> None:
    alike = ("reshape", (3, 2, 6))
    graph = two_readers(((alike, ("chunk", 0, 3, 0)), (alike, ("chunk", 0, 3, 2))))
    assert untangle(graph, {"w": (6, 6)}) is graph


BUFFER_VIEWS: dict[str, tuple[View, ...]] = {
    "a part": ((("chunk", 0, 2, 1),),),
    "whole and in part": ((), (("chunk", 0, 2, 1),)),
    "transposed": ((("permute", (1, 0)),),),
}


@pytest.mark.parametrize("name", BUFFER_VIEWS)
def test_a_buffer_that_is_overwritten_is_read_whole(name: str) -> None:
    """What is stored apart would not move along."""
    k = Builder()
    x = k.input("x", f32(6, 6))
    outputs = {}
    for i, view in enumerate(BUFFER_VIEWS[name]):
        tensor = f32(3 if view and view[0][0] == "chunk" else 6, 6)
        outputs[f"y{i}"] = k.linear(x, k.param(f"last.{i}", tensor, source="last", view=view, trainable=False))
    graph = k.graph(outputs, {"last": k.scale(x, factor=0.5)})
    found = whole_buffers(graph)
    assert [(param.attr("name"), param.attr("view")) for param in found.params] == [("last", ())]
    verify_equal(graph, found, Mesh.of(a=2))


def test_one_reader_of_a_whole_buffer_stays() -> None:
    k = Builder()
    x = k.input("x", f32(4, 6))
    last = k.param("last", f32(6), trainable=False)
    graph = k.graph({"y": k.add(x, last)}, {"last": k.scale(last, factor=0.5)})
    assert whole_buffers(graph) is graph


FORWARDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "autoencoder": lambda x, w: torch.nn.functional.linear(x, w).relu() @ w,
    "square": lambda x, w: torch.nn.functional.linear(x, w[:, :4].t()) @ w[:, :4].t(),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_weight_and_its_transpose_train_as_one(name: str, tmp_path: Path) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(4, 8))

        def forward(self, x: torch.Tensor) -> Any:  # Any: a tensor
            return FORWARDS[name](x, self.w)

    torch.manual_seed(0)
    module = Module()
    x = torch.randn(8, 8 if name == "autoencoder" else 4)
    plan = pdv.optimize(module, (x,), cluster=cluster(4))
    model = import_package(plan.save(tmp_path / "tied_pdv")).build(device="cpu")
    for found, expected in ((model(x), module(x)),):
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
    (gradient,) = [param.grad for param in model.parameters()]
    torch.testing.assert_close(getattr(gradient, "to_local", lambda: gradient)(), module.w.grad)
