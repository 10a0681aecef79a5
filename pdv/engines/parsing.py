"""Texts that configuration files are written in, as values: YAML, JSON, TOML, and command lines of shell scripts.

Nothing is run: of a script, words and plain assignments are read. Entry points: ``parse_yaml``, ``parse_json_object``,
``parse_toml``, ``parse_words``.
"""

from __future__ import annotations

import ast
import operator
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import yaml

from ir.errors import UsageError, first_line
from ir.files.plain_yaml import load_yaml
from ir.files.reading import parse_json

UNKNOWN = "$?"  # in place of what only a run of the script would tell
_ASSIGNED = re.compile(r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=([\"']?)([^\s\"'();]*)\2\s*;?\s*$", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_CALCULATED = re.compile(r"\$\(\(([^()]*)\)\)")
_RUN = re.compile(r"\$\([^()]*\)|`[^`]*`")
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
          ast.FloorDiv: operator.floordiv}  # fmt: skip
DEEPEST = 20  # variables in values of variables
LONGEST = 200  # characters of a calculation


def parse_yaml(text: str, engine: str) -> Any:  # Any: YAML
    """The value of a YAML text.

    Raises:
        UsageError: if it is none.
    """
    try:
        return load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _unreadable(engine, "YAML", error) from error


def parse_json_object(text: str, engine: str) -> dict[str, Any]:  # Any: JSON
    """The object of a JSON text.

    Raises:
        UsageError: if it is none, or says a name twice.
    """
    try:
        found = parse_json(text, _pairs)
    except ValueError as error:
        raise _unreadable(engine, "JSON", error) from error
    if not isinstance(found, dict):
        raise UsageError(f"this is no configuration of {engine}: it holds no object")
    return found


def parse_toml(text: str, engine: str) -> dict[str, Any]:  # Any: TOML
    """The tables of a TOML text.

    Raises:
        UsageError: if it is none.
    """
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _unreadable(engine, "TOML", error) from error


def parse_words(text: str) -> list[str]:
    """The words of a script, quotes and comments gone, variables that it sets put in place; ``$?`` what it computes."""
    text = re.sub(r"\\\r?\n", " ", _COMMENT.sub("", text.replace("\r\n", "\n")))
    values: dict[str, str] = {}
    for name, _, value in _ASSIGNED.findall(text):
        values[name] = value if values.get(name, value) == value or name in value else UNKNOWN
    text = _RUN.sub(UNKNOWN, _CALCULATED.sub(lambda match: _calculate(_filled(match[1], values)), text))
    return re.sub(r"[\"'()=]", " ", _filled(text, values)).split()


def _filled(text: str, values: Mapping[str, str], depth: int = 0) -> str:
    def value(match: re.Match[str]) -> str:
        name, otherwise = match[1] or match[3], match[2]
        own = values.get(name)
        if own is None or f"${name}" in own or f"${{{name}" in own:  # NAME=${NAME:-8}
            inner = _VARIABLE.search(own) if own else None
            return otherwise if otherwise is not None else (inner[2] or UNKNOWN) if inner else UNKNOWN
        return _filled(own, values, depth + 1) if depth < DEEPEST else UNKNOWN

    return _VARIABLE.sub(value, text)


def _calculate(text: str) -> str:
    """Whole numbers and four signs; anything else is not known."""
    if len(text) > LONGEST or not re.fullmatch(r"[\d\s+*/-]+", text):
        return UNKNOWN
    try:
        return str(_value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
        return UNKNOWN


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        found: int = _SIGNS[type(node.op)](_value(node.left), _value(node.right))
        return found
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(node)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: JSON
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found


def _unreadable(engine: str, kind: str, error: Exception) -> UsageError:
    return UsageError(
        f"this is no configuration of {engine}: no {kind} ({first_line(error)})", "", "See docs/engines.md"
    )
