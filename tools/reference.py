"""docs/commands.md and docs/fields.md: every command and every field of a file, told by the code that reads them.

    python -m tools.reference [--check]

Commands are those of the typer application, with their own help. Fields are those of the pydantic models that files are
read into; what a field means is in its model's docstring (``Attributes:``). Entry point: ``pages``.
"""

from __future__ import annotations

import argparse
import inspect
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from typer.core import TyperCommand, TyperGroup, TyperOption

from learned_cost.devices.device import DeviceRecord
from pdv.cli.app import app
from pdv.cluster import schema
from pdv.cluster.fields import limits_of
from pdv.cluster.units import Quantity
from pdv.manual.configuration import ALIASES, Configuration
from pdv.pins.spec import ForbidPin, OperatorPin, PinsSpec, Selector
from pdv.problem.workload import Execution, Overlap

ROOT = Path(__file__).parent.parent
GENERATED = "Written by `python -m tools.reference` from {}; a test compares.\n"
CLUSTER = (
    schema.ClusterSpec, schema.NodeSpec, schema.DeviceSpec, schema.PartSpec, schema.LinkSpec, schema.NetworkSpec,
    schema.SwitchSpec, schema.WireSpec,
)  # fmt: skip
FILES: Sequence[tuple[str, str, Sequence[type[BaseModel]]]] = (
    (
        "A cluster file",
        "`--cluster FILE`; [clusters.md](clusters.md) has examples and says how numbers are used.",
        CLUSTER,
    ),
    (
        "A pins file",
        "`--pins FILE`; [pins.md](pins.md) describes roles, techniques, states and patterns.",
        (PinsSpec, OperatorPin, ForbidPin, Selector),
    ),
    (
        "A configuration",
        "`--manual KEY=VALUE,…`; [simulate.md](simulate.md). Also known: "
        + ", ".join(f"`{alias}` for `{name}`" for alias, name in ALIASES.items())
        + ".",
        (Configuration,),
    ),
    ("A device record", "`devices/NAME.yaml`; [new-hardware.md](new-hardware.md) makes one.", (DeviceRecord,)),
)
SIGNS = {"ge": "≥", "gt": ">", "le": "≤"}
ALSO: dict[type[BaseModel], Sequence[type]] = {Configuration: (Execution, Overlap)}
"""Whose docstrings tell of a model's other fields."""

PLAIN = {
    "int": "whole number",
    "str": "text",
    "float": "number",
    "bool": "true or false",
    "tuple": "list",
    "dict": "mapping",
}


def pages() -> dict[Path, str]:
    """The generated pages, as they have to be."""
    return {ROOT / "docs" / "commands.md": commands(), ROOT / "docs" / "fields.md": fields()}


def commands() -> str:
    """Every command with its arguments and options."""
    parts = [f"# Commands\n\n{GENERATED.format('the command line itself (`pdv COMMAND --help`)')}"]
    parts.append("Exit codes are in [errors.md](errors.md).\n")
    for name, command in _walk("pdv", typer.main.get_command(app)):
        usage = [_argument(each) for each in command.params if not isinstance(each, TyperOption)]
        parts.append(f"## {name}\n\n{' '.join((command.help or '').split())}\n")
        parts.append("    " + " ".join((name, *usage, "[OPTIONS]")) + "\n")
        rows = [_row(each) for each in command.params if not getattr(each, "hidden", False)]
        parts.append("\n".join(["| option | default | what it does |", "| --- | --- | --- |", *rows]) + "\n")
    return "\n".join(parts)


def fields() -> str:
    """Every field of every file that people write."""
    parts = [f"# Fields of files\n\n{GENERATED.format('the models that files are read into')}"]
    parts.append("A key that is not here is refused. plan.json is described in [plan-format.md](plan-format.md).\n")
    for title, about, models in FILES:
        parts.append(f"## {title}\n\n{about}\n")
        for model in models:
            parts.append(f"### {model.__name__}\n\n{_summary(model)}\n")
            meanings = _meanings(model)
            rows = [_field(name, field, meanings.get(name, "")) for name, field in model.model_fields.items()]
            parts.append(
                "\n".join(["| field | value | default | meaning |", "| --- | --- | --- | --- |", *rows]) + "\n"
            )
    return "\n".join(parts)


def _walk(name: str, command: Any) -> Iterator[tuple[str, TyperCommand]]:
    """All commands below one, which may be a group, by what is typed."""
    if not isinstance(command, TyperGroup):
        yield name, command
        return
    for each, below in command.commands.items():
        yield from _walk(f"{name} {each}", below)


def _argument(parameter: Any) -> str:
    word = (parameter.metavar or parameter.name or "").upper() + ("…" if parameter.nargs == -1 else "")
    return word if parameter.required else f"[{word}]"


def _row(parameter: Any) -> str:
    names = ", ".join(f"`{each}`" for each in (*parameter.opts, *parameter.secondary_opts) if each.startswith("-"))
    default = parameter.default
    shown = "required" if parameter.required else "" if default in (None, False, ()) else f"`{default}`"
    return f"| {names or f'`{_argument(parameter)}`'} | {shown} | {_cell(parameter.help or '')} |"


def _summary(model: type[BaseModel]) -> str:
    text = inspect.getdoc(model) or ""
    return " ".join(text.split("\n\nAttributes:")[0].replace("``", "`").split())


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """What the docstrings of a model and of those it extends say of each field; an entry may be of several."""
    found: dict[str, str] = {}
    for each in (*ALSO.get(model, ()), *reversed(model.__mro__)):
        text = inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")[2]
        for entry in re.split(r"\n(?=\w[\w, ]*: )", inspect.cleandoc(text)):
            names, _, meaning = entry.partition(": ")
            found |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
    return found


def _field(name: str, field: FieldInfo, meaning: str) -> str:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    shown = "required" if field.is_required() else "" if default in (None, (), {}, []) else f"`{default}`"
    value = _cell(_value(field.annotation, field.metadata))
    return f"| `{name}` | {value} | {shown} | {_cell(meaning.replace('``', '`'))} |"


def _value(kind: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words."""
    for each in metadata:
        quantity = getattr(each.func, "__self__", None) if isinstance(each, BeforeValidator) else None
        if isinstance(quantity, Quantity):
            return f"{quantity.name}: `{quantity.example}`"
    limits = [f"{SIGNS[name]} {value:g}" for each in metadata for name, value in limits_of(each)]
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _value(inside[0], (*inside[1:], *metadata))
    if origin is typing.Literal:
        return " or ".join(f"`{each}`" for each in inside)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_value(each, metadata) for each in inside if each is not type(None))
    if origin in (list, tuple):
        return "list of " + _value(inside[0])
    if origin is dict:
        return f"mapping from {_value(inside[0])} to {_value(inside[1])}"
    name = getattr(kind, "__name__", str(kind))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"[{name}](#{name.lower()})"
    return " ".join((PLAIN.get(name, name), ", ".join(limits))).strip()


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")


def main() -> None:
    """Write the pages that are not what they have to be."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where something would be")
    options = parser.parse_args()
    made = pages().items()
    stale = {path: text for path, text in made if not path.exists() or path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        print(path.name)
        if not options.check:
            path.write_text(text, encoding="utf-8")
    raise SystemExit(1 if stale and options.check else 0)


if __name__ == "__main__":
    main()
