"""The names of one graph that pins may use: parameters, values, operators, modules; globs over them.

A rewritten operator is another node, so a pin remembers names, not nodes: parameters by the stored tensor that they
read, other values by operator and name.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

from ir.errors import PinsError, did_you_mean
from ir.graph import Graph, Node
from ir.views import sources_of
from pdv.cluster.units import shorten
from pdv.pins.weights import Weights

SHOWN = 4  # names in a message


class Key(NamedTuple):
    """A value by its operator and its name."""

    op: str
    name: str


def key_of(node: Node) -> Key:
    """The key of a node; nodes without a name share one that no pin has."""
    return Key(node.op.name, node.name)


def source_of(param: Node) -> str:
    """The stored tensors that a parameter reads, for messages."""
    return ", ".join(sources_of(param))


class Names:
    """What there is to match in a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.weights = Weights()
        self.operators = tuple(node for node in graph.nodes if not node.is_leaf)

    @cached_property
    def params(self) -> dict[str, list[Node]]:
        """Parameters by stored tensor."""
        found: dict[str, list[Node]] = {}
        for param in self._graph.params:
            for source in sources_of(param):
                found.setdefault(source, []).append(param)
        return found

    @cached_property
    def values(self) -> dict[str, Node]:
        """Inputs, operators' results and outputs by name; of several of one name the last."""
        named = [node for node in (*self._graph.inputs, *self.operators) if node.name]
        return {node.name: node for node in named} | {
            name: node for name, node in self._graph.outputs if not node.is_leaf and node.name
        }

    @cached_property
    def modules(self) -> dict[str, list[str]]:
        """Modules by path, each with the parameters below it."""
        found: dict[str, list[str]] = {}
        for source in self.params:
            parts = source.split(".")
            for length in range(1, len(parts)):
                found.setdefault(".".join(parts[:length]), []).append(source)
        return found

    def inside(self, module: str) -> list[Node]:
        """Operators that read a parameter of a module, and those on a way from one such to another."""
        sources = set(self.modules[module])
        readers = {node for node in self.operators if sources & self.weights.read(node)}
        places = [place for place, node in enumerate(self.operators) if node in readers]
        run = self.operators[min(places, default=0) : max(places, default=-1) + 1]
        after: set[Node] = set()
        for node in run:
            if node in readers or any(operand in after for operand in node.operands):
                after.add(node)
        before: set[Node] = set()
        for node in reversed(run):
            if node in readers or any(user in before for user in self._graph.users[node]):
                before.add(node)
        return [node for node in run if node in after and node in before]


def matching(pattern: str, known: Iterable[str]) -> list[str]:
    """Names that a pattern means: itself, or as a glob."""
    return [name for name in known if name == pattern or fnmatchcase(name, pattern)]


def match_some(where: str, kind: str, pattern: str, known: Iterable[str]) -> list[str]:
    """As ``matching``, but something.

    Raises:
        PinsError: if nothing is called so.
    """
    names = list(known)
    found = matching(pattern, names)
    if found:
        return found
    wider = f"*{pattern}" if matching(f"*{pattern}", names) else f"*.{pattern}"
    mend = f"Did you mean {wider!r}?" if matching(wider, names) else did_you_mean(pattern, names)
    near = get_close_matches(pattern, names, n=SHOWN, cutoff=0.4)
    few = [*near, *(name for name in sorted(names) if name not in near)][:SHOWN]
    shown = ", ".join(few) + (f", … ({len(names)} in all)" if len(names) > SHOWN else "")
    raise PinsError(f"{where}: no {kind} is called {shorten(pattern)}", f"There are {shown}" if names else "", mend)
