"""Parameters that training leaves as they are, since the caller says so: files do not say which of theirs are frozen.

What a tool computed of frozen parameters alone is the constant that it is in the file. Entry point: ``freeze``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ir.builder import Builder
from ir.errors import UsageError
from ir.graph import Graph, Node
from ir.views import sources_of, trained_sources_of

if TYPE_CHECKING:
    from pdv.frontend.program import Program


def freeze(program: Program, patterns: str | Sequence[str]) -> Program:
    """The program with the parameters whose names match a pattern (``encoder.*``), or one of several, frozen.

    Raises:
        UsageError: naming a pattern that matches none.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not patterns:
        return program
    names = name_trained(program)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in (*names, *program.held)):
            some = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
            raise UsageError(
                f"{pattern!r} names no parameter to freeze", f"Names of trained parameters: {some}", "Check the name"
            )
    chosen = {source for name, source in names.items() if _matches(name, patterns)}
    # equal ones of those that the file lacks may have become one constant: it stays one if all of them do
    staying = set(program.held) if all(_matches(name, patterns) for name in program.held) else set()
    return replace(
        program.map(lambda graph: _with_frozen(graph, chosen)),
        absent=tuple(name for name in program.absent if name not in staying),
        untold={name: what for name, what in program.untold.items() if name not in chosen},
        sines=tuple(name for name in program.sines if name not in chosen),
        frozen=program.frozen.union(name for name, source in names.items() if source in chosen),
    )


def name_trained(program: Program) -> dict[str, str]:
    """Each name of a stored tensor that is trained, and the tensor."""
    names = {source: source for source in trained_sources_of(program.graph)}
    return names | {name: source for name, (source, _) in program.names.items() if source in names}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _with_frozen(graph: Graph, sources: set[str]) -> Graph:
    """The graph with parameters that are views of these stored tensors not trained."""
    k = Builder()

    def make(node: Node, operands: tuple[Node, ...]) -> Node:
        if not node.is_param or not set(sources_of(node)) <= sources:
            return k.copy(node, operands)
        return k.param(
            node.attr("name"), node.type, source=node.attr("source"), view=node.attr("view"), trainable=False
        )

    return k.rebuild(graph, make)[0]
