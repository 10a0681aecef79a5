"""Reading YAML strictly: plain data with the line of every value, and nothing that YAML could smuggle in.

Refused: tags, anchors and aliases (and with them entity bombs), several documents, repeated keys, keys that are no
text, deep or huge files. Entry point: `read_yaml`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ir.errors import ClusterError, PdvError, did_you_mean
from ir.files.plain_yaml import check_plain, compose_yaml, scalar
from ir.files.reading import FileKind, read_text, shown
from pdv.cluster.units import ValueProblem, shorten

EXAMPLES = "Give the path of a YAML file (examples/clusters has some)"
CLUSTER = FileKind(1 << 20, ClusterError, EXAMPLES, "Give a cluster description")  # which has a few hundred bytes

Place = tuple[str | int, ...]  # keys and positions from the top of the document


@dataclass(frozen=True)
class Source:
    """The plain data of a file, and the line (from 1) on which each of its values, or its key, stands."""

    name: str
    data: object
    lines: dict[Place, int]

    def where(self, place: Place) -> str:
        """`cluster.yaml line 7, nodes[0].device`: the nearest known place around `place`."""
        known = place
        while known not in self.lines and known:
            known = known[:-1]
        text = "".join(f"[{step}]" if isinstance(step, int) else f".{_key(step)}" for step in place).removeprefix(".")
        line = f"{self.name} line {self.lines[known]}" if known in self.lines else self.name
        return f"{line}, {text}" if text else line

    def by_line(self, error: ValidationError) -> list[tuple[Place, dict[str, Any]]]:  # Any: pydantic's details
        """The problems that pydantic found, with their places; it marks a mapping's key by a last "[key]"."""
        found = [(tuple(step for step in one["loc"] if step != "[key]"), dict(one)) for one in error.errors()]
        return sorted(found, key=lambda pair: self.lines.get(pair[0], 0))


def common_mistake(
    problem: dict[str, Any], place: Place, known_keys: Callable[[Place], Sequence[str]]
) -> tuple[str, str, str] | None:
    """What, allowed and mend of what may be wrong in any file: a value that a check of ours refused, or a key."""
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, ValueProblem):
        return cause.what, cause.allowed, cause.mend
    if problem["type"] == "extra_forbidden":
        known = known_keys(place[:-1])
        return "unknown key", f"Known keys: {', '.join(known)}", did_you_mean(str(place[-1]), known) or "Remove it"
    return ("missing", "", f"Add `{place[-1]}: ...`") if problem["type"] == "missing" else None


# what pydantic's kinds of errors want, in words
WANTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping, `key: value`",
    "greater_than_equal": "{ge} or more",
    "int_type": "a whole number",
    "list_type": "a list, `- entry`",
    "model_attributes_type": "a mapping, `key: value`",
    "model_type": "a mapping, `key: value`",
    "string_type": "a text",
}


def explain_first(
    error: ValidationError, source: Source, known_keys: Callable[[Place], Sequence[str]]
) -> tuple[str, str, str]:
    """What, allowed and mend of the first problem by line; the others are counted."""
    (place, first), *others = source.by_line(error)
    what, allowed, mend = common_mistake(first, place, known_keys) or _explain(first)
    more = f" (and {len(others)} more problems)" if others else ""
    return f"{source.where(place)}: {what}{more}", allowed, mend


def _explain(problem: dict[str, Any]) -> tuple[str, str, str]:  # Any: pydantic's details
    """What, allowed and mend for one error of pydantic."""
    value = problem["input"]
    shown = "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else shorten(value)
    allowed = WANTED.get(problem["type"], str(problem["msg"]))
    said = f"Allowed: {allowed.format_map(problem.get('ctx', {}))}" if problem["type"] in WANTED else allowed
    return f"{shown} is not allowed here", said, ""


def read_yaml_as(path: Path, error: type[PdvError], wanted: str) -> Source:
    """The data of a file that describes no cluster; ``wanted``: what it is to say.

    Raises:
        PdvError: ``error``, as ``read_yaml``.
    """
    try:
        return read_yaml(path)
    except ClusterError as found:
        mend = found.mend
        if "examples/clusters" in mend:
            mend = wanted if path.is_file() else "Give the path of a YAML file"
        raise error(found.what, found.allowed, mend) from None


def read_yaml(path: Path) -> Source:
    """The file's data.

    Raises:
        ClusterError: not a readable file, not text, not YAML, or a feature of YAML that is refused.
    """
    return parse_yaml(read_text(path, CLUSTER), shown(path))


def parse_yaml(text: str, name: str) -> Source:
    """The data of YAML `text`; `name` stands for the file in messages. Raises as `read_yaml`."""
    try:
        check_plain(text, name, ClusterError, "Describe nodes and network only")
        node = compose_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        problem = " ".join(str(error.problem or error.context).split())
        raise ClusterError(f"{name}{line}: not valid YAML ({problem})", mend="Mend the syntax") from error
    except yaml.YAMLError as error:  # a character that YAML forbids
        reason = " ".join(str(error).split(" in ")[0].split())
        raise ClusterError(f"{name}: not valid YAML ({reason})", mend="Mend the syntax") from error
    if node is None:
        raise ClusterError(f"{name} is empty", mend="Describe nodes and network (examples/clusters has some)")
    lines: dict[Place, int] = {(): node.start_mark.line + 1}
    return Source(name, _plain(node, (), lines, name), lines)


def _key(step: str) -> str:
    """A key as it may stand in a message."""
    return step if step.isidentifier() and step.isascii() else shorten(step)


def _plain(node: yaml.Node, place: Place, lines: dict[Place, int], name: str) -> object:
    """The node's value, its lines written into `lines`."""
    line = f"{name} line {node.start_mark.line + 1}"
    if isinstance(node, yaml.SequenceNode):
        items = []
        for position, item in enumerate(node.value):
            lines[*place, position] = item.start_mark.line + 1
            items.append(_plain(item, (*place, position), lines, name))
        return items
    if isinstance(node, yaml.MappingNode):
        return _plain_mapping(node, place, lines, name)
    try:
        return scalar(node)
    except ValueError as error:  # an integer too long
        raise ClusterError(f"{line}: {shorten(node.value)} cannot be read", mend="Write a plain value") from error


def _plain_mapping(node: yaml.MappingNode, place: Place, lines: dict[Place, int], name: str) -> dict[str, object]:
    result: dict[str, object] = {}
    for key_node, value_node in node.value:
        key_line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ClusterError(f"{name} line {key_line}: a key must be plain text", mend="Write key: value")
        key = str(key_node.value)
        if key in result:
            first = lines[*place, key]
            raise ClusterError(
                f"{name} line {key_line}: the key {shorten(key)} is given twice (first on line {first})",
                mend="Remove one of them",
            )
        lines[*place, key] = key_line
        result[key] = _plain(value_node, (*place, key), lines, name)
    return result
