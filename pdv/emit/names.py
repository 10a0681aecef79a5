"""Names that are safe in a Python file: identifiers from a model's names, and string literals.

A model's names come from strangers: they may hold quotes, newlines, keywords or nothing at all.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable

MAX_IDENTIFIER = 40


def identifier(text: str, fallback: str = "value") -> str:
    """The nearest lower-risk identifier: letters, digits and underscores, no keyword, at most 40 characters."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")
    name = name[-MAX_IDENTIFIER:].strip("_") or fallback
    if name[0].isdigit():
        name = f"{fallback}_{name}"
    return f"{name}_" if keyword.iskeyword(name) or keyword.issoftkeyword(name) else name


def unique(name: str, taken: Iterable[str]) -> str:
    """``name``, or ``name_2``, ``name_3`` … if it is taken."""
    taken = set(taken)
    number = 1
    candidate = name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def string(text: str) -> str:
    """A literal of ``text``, ASCII, in double quotes where that needs no escapes: as formatters write it."""
    literal = ascii(text)
    if '"' in text or literal[0] == '"':
        return literal
    return '"' + literal[1:-1] + '"'


def plain(text: str) -> str:
    """``text`` for a docstring or a comment: one line, no quotes, no backslashes."""
    return re.sub(r"[^A-Za-z0-9 .,:;/+*=<>@()\[\]_%~-]", "?", text)
