"""A program with fewer of its equal layers, numbered as a model of so few would be.

Entry point: ``renumber``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ir.builder import Builder
from ir.graph import Graph, Node, View, param_view
from ir.views import sources_of


def renumber(whole: Graph, *short: Graph) -> tuple[Mapping[str, str], tuple[Graph, ...]]:
    """New name of a stored tensor -> its name in ``whole``; and graphs with fewer layers, by their new names.

    Where ``h.3`` to ``h.10`` are left out, ``h.11`` becomes ``h.3``.
    """
    kept = {source for graph in short for node in graph.params for source in sources_of(node)}
    left_out = {source for node in whole.params for source in sources_of(node)} - kept
    there = {layer for source in kept for layer in _layers(source)}
    gone: dict[str, set[int]] = {}
    for layer in {layer for source in left_out for layer in _layers(source)} - there:
        gone.setdefault(layer.head, set()).add(layer.number)
    names = _Names(gone)
    return {names.new(source): source for source in kept}, tuple(_rename(graph, names) for graph in short)


@dataclass(frozen=True)
class _Layer:
    """What a name says before and in one of its numbers: ``model.layers.7.mlp`` is in layer 7 of ``model.layers``."""

    head: str
    number: int


def _layers(name: str) -> Iterator[_Layer]:
    parts = name.split(".")
    heads = itertools.accumulate(parts, lambda head, part: f"{head}.{part}")
    for head, part in zip(["", *heads], parts, strict=False):
        if part.isdecimal():
            yield _Layer(head, int(part))


@dataclass(frozen=True)
class _Names:
    """Names without the numbers that are gone, by what stands before these."""

    gone: Mapping[str, set[int]]

    def new(self, name: str) -> str:
        """The name a tensor gets."""
        parts = name.split(".")
        at = {layer.head: layer.number for layer in _layers(name)}
        for place in range(len(parts)):
            head = ".".join(name.split(".")[:place])
            if head in at:
                parts[place] = str(at[head] - sum(number < at[head] for number in self.gone.get(head, ())))
        return ".".join(parts)


def _rename(graph: Graph, names: _Names) -> Graph:
    k = Builder()

    def make(node: Node, operands: tuple[Node, ...]) -> Node:
        if not node.is_param:
            return k.copy(node, operands)
        attrs = {**node.attrs, "source": names.new(node.attr("source")), "view": _view(param_view(node), names)}
        return k.param(names.new(str(attrs.pop("name"))), node.type, **attrs)  # type: ignore[arg-type]  # each as it was

    return k.rebuild(graph, make)[0]


def _view(view: View, names: _Names) -> View:
    if not view or view[0][0] != "concat":
        return view
    joined = tuple((names.new(source), *rest) for source, *rest in view[0][2])
    return (("concat", view[0][1], joined), *view[1:])
