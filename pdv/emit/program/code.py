"""Expressions of the emitted program, and their layout in lines of at most 120 columns, as formatters lay them out."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

WIDTH = 120

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


def statement(prefix: str, code: Code, indent: int, suffix: str = "") -> list[str]:
    """The lines of ``prefix`` + code + ``suffix``; too long a call is broken at its arguments."""
    pad = " " * indent
    line = f"{pad}{prefix}{code.text}{suffix}"
    if len(line) <= WIDTH or not code.arguments:
        return [line]
    inner = " " * (indent + 4)
    together = inner + ", ".join(argument.text for argument in code.arguments)
    lines = [f"{pad}{prefix}{code.head}("]
    if len(together) <= WIDTH:
        lines.append(together)
    else:
        for argument in code.arguments:
            lines += statement("", argument, indent + 4, ",")
    return [*lines, f"{pad}){suffix}"]


def with_comment(lines: list[str], comment: str) -> list[str]:
    """The lines with a comment at the end of the last, or above the first where it does not fit."""
    if not comment:
        return lines
    if len(lines[-1]) + len(comment) + 4 <= WIDTH:
        return [*lines[:-1], f"{lines[-1]}  # {comment}"]
    pad = " " * (len(lines[0]) - len(lines[0].lstrip()))
    return [f"{pad}# {comment}", *lines]


def docstring(sentence: str, indent: int) -> list[str]:
    """A sentence as a docstring: on one line if it fits, else its words on lines as long as they may be."""
    pad = " " * indent
    if len(line := f'{pad}"""{sentence}"""') <= WIDTH:
        return [line]
    first, *rest = textwrap.wrap(f'{pad}"""{sentence}', WIDTH, break_long_words=False, break_on_hyphens=False)
    return [first, *(f"{pad}{line}" for line in textwrap.wrap(" ".join(rest), WIDTH - indent)), f'{pad}"""']
