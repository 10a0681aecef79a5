"""The layout of the emitted program in lines of at most 120 columns, as formatters lay them out."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from ir.emission.code import Code, call

WIDTH = 120


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


def signature(name: str, arguments: Iterable[str], results: int, indent: int = 4) -> list[str]:
    """The lines of ``def name(self, x: Tensor, …) -> Tensor:``, of several results a tuple."""
    result = "Tensor" if results == 1 else f"tuple[{', '.join(['Tensor'] * results)}]"
    return statement("def ", call(name, "self", *(f"{given}: Tensor" for given in arguments)), indent, f" -> {result}:")


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
