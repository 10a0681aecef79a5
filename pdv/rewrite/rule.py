"""A rule: two equal expressions. It is read three ways: as a pattern, as a replacement, and as what must be proved.

``before`` and ``after`` are functions of a builder ``k`` and of variables, named by their parameters. Called with a
pattern builder, ``before`` says what to match: a variable that stands as an operand binds a node, one that stands as
an attribute binds its value. Called with a real builder and the bindings, ``after`` makes the replacement.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ir.builder import Builder
from ir.graph import Node, ViewStep

Binding = dict[str, Any]  # Any: nodes and attribute values


@dataclass(frozen=True, slots=True)
class Variable:
    """Stands for any node, or for any attribute value."""

    name: str


@dataclass(frozen=True, slots=True)
class Pattern:
    """Stands for a node of one operator."""

    op: str
    operands: tuple[Pattern | Variable, ...]
    attrs: tuple[tuple[str, Any], ...]  # Any: literal values or Variables


class PatternBuilder:
    """Records the calls of ``before`` as a pattern."""

    def __getattr__(self, name: str) -> Callable[..., Pattern]:
        def call(*operands: Pattern | Variable, **attrs: Any) -> Pattern:
            return Pattern(name, operands, tuple(attrs.items()))

        return call


def _always(*_: Any) -> bool:
    return True


@dataclass(frozen=True)
class Rule:
    """``before == after`` wherever ``when`` holds.

    Args:
        name: the effect, kebab-case.
        law: the equation, for people.
        before: pattern of (k, variables...).
        after: replacement of (k, the same variables...).
        when: pure predicate of the same variables, on types and attribute values only.
    """

    name: str
    law: str
    before: Callable[..., Any]
    after: Callable[..., Node]
    when: Callable[..., bool] = _always

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables, as ``before`` takes them."""
        return tuple(inspect.signature(self.before).parameters)[1:]

    @cached_property
    def pattern(self) -> Pattern:
        """What to match."""
        found = self.before(PatternBuilder(), *(Variable(name) for name in self.variables))
        assert isinstance(found, Pattern), f"{self.name} matches anything"
        return found

    def match(self, node: Node, inside: Callable[[Node], bool] = _always) -> Binding | None:
        """Bindings under which ``before`` is ``node``; inner matched nodes must be ``inside``."""
        binding: Binding = {}
        if not _match(self.pattern, node, binding, inside):
            return None
        values = [binding[name] for name in self.variables]
        return binding if self.when(*values) else None

    def apply(self, k: Builder, binding: Mapping[str, Any]) -> Node:
        """The replacement."""
        return self.after(k, *(binding[name] for name in self.variables))


def _match(pattern: Pattern | Variable, node: Node, binding: Binding, inside: Callable[[Node], bool]) -> bool:
    if isinstance(pattern, Variable):
        return _bind(pattern, node, binding)
    if node.op.name != pattern.op or len(node.operands) != len(pattern.operands) or not inside(node):
        return False
    for name, wanted in pattern.attrs:
        value = node.attr(name)
        if not (_bind(wanted, value, binding) if isinstance(wanted, Variable) else value == wanted):
            return False
    return all(_match(p, x, binding, inside) for p, x in zip(pattern.operands, node.operands, strict=True))


def _bind(variable: Variable, value: Any, binding: Binding) -> bool:
    return bool(binding.setdefault(variable.name, value) == value)


class RewriteBuilder(Builder):
    """A builder that keeps moved parameters parameters: ``chunk(w) == w`` read through a view."""

    def apply(self, op: Any, operands: tuple[Node, ...], attrs: Mapping[str, Any], name: str = "") -> Node:
        """As ``Builder.apply``; a chunk or permutation of a parameter is a parameter."""
        if op.name in ("chunk", "permute") and operands[0].op.name == "param":
            return self._view(op.name, operands[0], super().apply(op, operands, attrs, name))
        return super().apply(op, operands, attrs, name)

    def _view(self, op: str, param: Node, moved: Node) -> Node:
        step: ViewStep
        if op == "chunk":
            step = ("chunk", moved.attr("dim"), moved.attr("parts"), moved.attr("index"))
            suffix = str(moved.attr("index"))
        else:
            step, suffix = ("permute", moved.attr("perm")), "T"
        return self.param(
            f"{param.attr('name')}.{suffix}",
            moved.type,
            source=param.attr("source"),
            view=(*param.attr("view"), step),
            trainable=param.attr("trainable"),
        )
