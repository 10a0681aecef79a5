"""YAML that is plain data, and reads as it looks: the one place where YAML is read and written.

Values are those of YAML 1.2's core schema (yaml.org/spec/1.2.2, 10.3.2). PyYAML alone reads YAML 1.1, where 1:30 is 90,
010 is 8, and yes, no, on and off are truth values. What else YAML could smuggle in is refused before anything is built.
Entry points: ``check_plain``, ``load_yaml``, ``compose_yaml`` with ``scalar``, and ``dump_yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from ir.errors import PdvError

MAX_DEPTH = 16
_BASES = {"0o": 8, "0x": 16}
_FORMS = (  # tag, form, and the characters that it may begin with
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("bool", r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", tuple("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        tuple("-+.0123456789"),
    ),
)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """By first character: tags of plain scalars, and the forms that they have."""
    found: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for kind, form, starts in _FORMS:
        for start in starts:
            found.setdefault(start, []).append((f"tag:yaml.org,2002:{kind}", re.compile(rf"(?:{form})\Z", re.ASCII)))
    return found


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml is ten times as fast
    yaml_implicit_resolvers = _resolvers()

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        found: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable) or key in found:
                what = "is given twice" if isinstance(key, Hashable) else "is no plain value"
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r:.60} {what}", key_node.start_mark)
            found[key] = self.construct_object(value_node, deep=deep)
        return found


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(node.value)
    return int(text, _BASES.get(text[:2], 10))


_Loader.add_constructor("tag:yaml.org,2002:int", _whole)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that YAML 1.1 or YAML 1.2 reads as something else."""


for _start, _forms in _resolvers().items():
    for _tag, _form in _forms:
        _Dumper.add_implicit_resolver(_tag, _form, [_start])


def load_yaml(text: str) -> Any:  # Any: YAML
    """The value of a text.

    Raises:
        yaml.YAMLError: if it is no YAML, has tags that are none of plain data, or says a key twice.
        ValueError: of a number too long to be read.
    """
    return yaml.load(text, Loader=_Loader)  # noqa: S506  # a safe loader


def compose_yaml(text: str) -> yaml.Node | None:
    """The nodes of a text, with their lines; nothing of an empty one.

    Raises:
        yaml.YAMLError: if it is no YAML.
    """
    node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    return node


def scalar(node: yaml.Node) -> str | int | float | bool | None:
    """The value of a node of ``compose_yaml`` that is neither a list nor a mapping.

    Raises:
        yaml.YAMLError, ValueError: as ``load_yaml``.
    """
    value: str | int | float | bool | None = _Loader("").construct_object(node)
    return value


def dump_yaml(data: Mapping[str, Any], **options: Any) -> str:  # Any: YAML, and what PyYAML takes
    """Data as text, in the order that it has, that readers of YAML 1.1 and of YAML 1.2 take for the same."""
    return str(yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, **options))


def check_plain(text: str, name: str, error: type[PdvError], wanted: str) -> None:
    """Refuse tags, anchors, aliases (and with them entity bombs) and what is nested deep.

    Looks at the events alone, so that nothing is built yet when an alias would multiply it.

    Args:
        text: what to look at.
        name: of its file.
        error: what to raise.
        wanted: what to do in place of nesting.

    Raises:
        PdvError: ``error``, naming the line.
        yaml.YAMLError: if it is no YAML.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        place = f"{name} line {event.start_mark.line + 1}" if event.start_mark else name
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise error(f"{place}: anchors and aliases (& and *) are not allowed", mend="Write the values out")
        tag = getattr(event, "tag", None)
        if tag:
            raise error(f"{place}: tags ({ascii(tag)[:60]}) are not allowed", mend="Remove the tag")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise error(f"{place}: nested more than {MAX_DEPTH} deep", mend=wanted)
