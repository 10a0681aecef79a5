"""Names that are safe in a Python file: identifiers from a model's names, and string literals.

A model's names come from strangers: they may hold quotes, newlines, keywords or nothing at all.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable

from ir.graph import Node

MAX_IDENTIFIER = 48


def identifier(text: str, fallback: str = "value") -> str:
    """The nearest identifier: ASCII letters, digits and underscores, no keyword, the last words that fit in 48."""
    words = re.findall(r"[A-Za-z0-9]+", text)
    while len(words) > 1 and len("_".join(words)) > MAX_IDENTIFIER:
        words.pop(0)
    name = "_".join(words)[-MAX_IDENTIFIER:] or fallback
    if name[0].isdigit():
        name = f"{fallback}_{name}"
    return f"{name}_" if keyword.iskeyword(name) or keyword.issoftkeyword(name) else name


def argument(text: str) -> str:
    """The name itself, where a function may have an argument that is called so, else the nearest identifier."""
    plain_name = text.isascii() and text.isidentifier() and not keyword.iskeyword(text)
    return text if plain_name else identifier(text, "x")


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


def together(name: str) -> str:
    """``qkv_proj`` of ``q_proj_k_proj_v_proj``, the name of three that were joined; other names as they are."""
    words = name.split("_")
    heads, ends = words[0::2], words[1::2]
    if len(heads) < 2 or len(heads) != len(ends) or len(set(ends)) > 1:
        return name
    return ("" if all(len(head) == 1 for head in heads) else "_").join(heads) + f"_{ends[0]}"


def module_name(param: Node) -> str:
    """``q_proj`` of ``model.layers.0.self_attn.q_proj.weight``."""
    parts = [part for part in param.attr("name").split(".") if part and not part.isdigit()]
    if len(parts) > 1 and parts[-1] in ("weight", "bias"):
        parts.pop()
    return identifier(together(parts[-1]) if parts else "weight", "weight")
