"""What single values of a cluster file may be: names, counts, quantities with their unit, presets by name."""

from __future__ import annotations

import difflib
import keyword
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt
from pydantic.fields import FieldInfo

from ir.errors import did_you_mean
from pdv.cluster.names import preset_of
from pdv.cluster.units import Quantity, ValueProblem, shorten

MAX_NAMES = 6  # of presets in a message
MAX_COUNT = 2**16  # nodes of a kind, devices of a node
BOUNDS = {"ge": Ge, "gt": Gt, "le": Le}
DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.+-]{0,63}", re.ASCII)
AXIS_NAME = re.compile(r"[a-z][a-z0-9_]{0,15}", re.ASCII)


def name_of(value: object) -> str:
    """A name that may stand in messages and files."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueProblem(
            f"{shorten(value)} is no name", "Allowed: up to 64 letters, digits, spaces and any of _ . + -"
        )
    return value


def axis_name(value: object) -> str:
    """A name of a mesh axis, or of a level that may become one."""
    if not isinstance(value, str) or not AXIS_NAME.fullmatch(value) or keyword.iskeyword(value):
        raise ValueProblem(
            f"{shorten(value)} is no axis name",
            "Allowed: up to 16 lower-case letters, digits and _, no Python keyword, as the emitted program uses it",
        )
    return value


def axis_sizes(sizes: object) -> Mapping[str, int]:
    """Axes of a mesh, each with its size."""
    if not isinstance(sizes, Mapping) or not sizes:
        raise ValueProblem(f"{shorten(sizes)} is no mesh", "Allowed: names of axes with their sizes, slow to fast")
    for name, size in sizes.items():
        axis_name(name)
        if type(size) is not int or size < 1:
            raise ValueProblem(f"{shorten(size)} is no size of the axis {name}", "Allowed: whole numbers from 1")
    return sizes


def dtype(value: object) -> str:
    """A dtype that peaks are given for."""
    if value not in DTYPES:
        raise ValueProblem(
            f"{shorten(value)} is no dtype", f"Allowed: {', '.join(DTYPES)}", did_you_mean(str(value), DTYPES)
        )
    return str(value)


def quantity_of(quantity: Quantity) -> BeforeValidator:
    """A field that is read as this quantity."""
    return BeforeValidator(quantity.parse)


Name = Annotated[str, BeforeValidator(name_of)]
Count = Annotated[StrictInt, Field(ge=1, le=MAX_COUNT)]
AxisName = Annotated[str, BeforeValidator(axis_name)]


def limits_of(kind: Any) -> Iterator[tuple[str, float]]:  # Any: a field, a type, or what is annotated of one
    """Bounds of a number, said anywhere inside: (``ge``, ``gt`` or ``le``, which number)."""
    if isinstance(kind, FieldInfo):
        yield from (pair for part in (kind.annotation, *kind.metadata) for pair in limits_of(part))
    for name, bound in BOUNDS.items():
        if isinstance(kind, bound):
            yield name, getattr(kind, name)
    yield from (pair for part in typing.get_args(kind) for pair in limits_of(part))


class Spec(BaseModel):
    """Every mapping of the file: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def from_preset(value: object, presets: dict[str, Any], kind: str) -> object:
    """A preset's bare name as a mapping; unknown preset names are refused in both forms."""
    named = {"preset": value} if isinstance(value, str) else value
    if not isinstance(named, dict):
        raise ValueProblem(
            f"{shorten(value)} is no {kind}", f"Allowed: a preset's name or a mapping that describes the {kind}"
        )
    preset = named.get("preset")
    known = preset_of(preset, presets) if isinstance(preset, str) else None
    if known is not None:
        return named | {"preset": known}
    if preset is not None:
        names = sorted(presets)
        near = names if len(names) <= MAX_NAMES else difflib.get_close_matches(str(preset), names, MAX_NAMES, 0.4)
        allowed = f"Presets like it: {', '.join(sorted(near))}" if near else f"There are {len(names)}"
        longer = [name for name in names if name.startswith(str(preset).lower())]
        meant = f"Did you mean {' or '.join(map(repr, longer))}?" if preset and 0 < len(longer) <= MAX_NAMES else ""
        hint = meant or did_you_mean(str(preset), names) or "Describe it by a mapping instead"
        raise ValueProblem(
            f"there is no {kind} preset {shorten(preset)}", f"{allowed} (`pdv cluster devices` lists all)", hint
        )
    return named


def require(spec: BaseModel, fields: tuple[str, ...], kind: str) -> None:
    """Whether a description without preset is complete."""
    missing = [field for field in fields if getattr(spec, field) is None]
    if missing:
        raise ValueProblem(
            f"the {kind} lacks {', '.join(missing)}", mend="Add it, or start from a preset by `preset: NAME`"
        )


def first(own: float | None, base: float | None) -> float:
    """The own value, or the preset's."""
    value = own if own is not None else base
    assert value is not None, "a spec without preset is complete"
    return value
