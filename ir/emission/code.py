"""Expressions of the emitted program."""

from __future__ import annotations

import math
from dataclasses import dataclass

SUM, PRODUCT, UNARY, ATOM = range(4)
"""How tightly an expression binds, loosest first."""


@dataclass(frozen=True, slots=True)
class Code:
    """An expression. A call keeps its parts, so that a long one can be broken at its arguments."""

    text: str
    level: int = ATOM
    head: str = ""
    arguments: tuple[Code, ...] = ()

    def at(self, level: int) -> str:
        """The text, in parentheses if it binds less tightly than ``level``."""
        return self.text if self.level >= level else f"({self.text})"


def call(head: str, *arguments: Code | str) -> Code:
    """``head(arguments)``; a keyword argument is text."""
    codes = tuple(Code(argument) if isinstance(argument, str) else argument for argument in arguments)
    return Code(f"{head}({', '.join(code.text for code in codes)})", ATOM, head, codes)


def keyword_argument(name: str, value: Code) -> Code:
    """``name=value``, still breakable inside."""
    return Code(f"{name}={value.text}", SUM, f"{name}={value.head}" if value.head else "", value.arguments)


def method(x: Code, name: str, *arguments: str) -> Code:
    """``x.name(arguments)``."""
    return Code(f"{x.at(ATOM)}.{name}({', '.join(arguments)})")


def binary(left: Code, operator: str, right: Code) -> Code:
    """``left operator right`` for + - * / //; a sum is added term by term."""
    level = PRODUCT if operator in ("*", "/", "//") else SUM
    return Code(f"{left.at(level)} {operator} {right.at(level if operator == '+' else level + 1)}", level)


def negative(x: Code) -> Code:
    """``-x``."""
    return Code(f"-{x.at(ATOM)}", UNARY)


def tuple_of(items: tuple[str, ...]) -> str:
    """A tuple's literal."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def literal(number: float) -> Code:
    """A number as Python reads it, infinities and what is no number included."""
    return Code(repr(number) if math.isfinite(number) else f'float("{number}")')
