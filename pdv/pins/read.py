"""Reading a pins file: the same strict YAML as cluster files, one error with its line and a mend."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ir.errors import ClusterError, PinsError
from pdv.cluster.source import Place, Source, common_mistake, read_yaml
from pdv.cluster.units import shorten
from pdv.pins.spec import ForbidPin, OperatorPin, PinsSpec

# what pydantic's kinds of errors want, in the words of docs/pins.md
WANTED = {
    "dict_type": "a mapping, `key: value`",
    "list_type": "a list, `- entry`",
    "string_type": "a text",
    "int_type": "a whole number",
    "greater_than_equal": "1 or more",
    "model_type": "a mapping, `key: value`",
    "model_attributes_type": "a mapping, `key: value`",
}


def read_spec(pins: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[PinsSpec, Source]:  # Any: plain data
    """What a file, or a mapping of the same content, says, and where it says it.

    Raises:
        PinsError: naming the file, the line and the mend.
    """
    source = Source("pins", dict(pins), {}) if isinstance(pins, Mapping) else _read(Path(pins))
    if not isinstance(source.data, dict):
        raise PinsError(f"{source.name}: pins are a mapping", mend="Start with `tensors:`, or another key of docs/pins")
    try:
        return PinsSpec.model_validate(source.data), source
    except ValidationError as error:
        raise _one_error(error, source) from None


def _read(path: Path) -> Source:
    try:
        return read_yaml(path)
    except ClusterError as error:  # the reader is the clusters'
        mend = error.mend
        if "examples/clusters" in mend:
            mend = "Write pins, or leave the file out" if path.is_file() else "Give the path of a YAML file"
        raise PinsError(error.what, error.allowed, mend) from None


def _one_error(error: ValidationError, source: Source) -> PinsError:
    """The first problem by line; the others are counted."""
    (place, first), *others = source.by_line(error)
    what, allowed, mend = common_mistake(first, place, _known_keys) or _explain(first)
    more = f" (and {len(others)} more problems)" if others else ""
    return PinsError(f"{source.where(place)}: {what}{more}", allowed, mend)


def _explain(problem: dict[str, Any]) -> tuple[str, str, str]:  # Any: pydantic's details
    """What, allowed and mend for one error of pydantic."""
    value = problem["input"]
    shown = "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else shorten(value)
    allowed = WANTED.get(problem["type"], str(problem["msg"]))
    return f"{shown} is not allowed here", f"Allowed: {allowed}" if problem["type"] in WANTED else allowed, ""


def _known_keys(place: Place) -> list[str]:
    """The keys that the mapping at ``place`` may have."""
    models: dict[object, type[BaseModel]] = {"operators": OperatorPin, "forbid": ForbidPin}
    return list(models.get(place[0] if place else None, PinsSpec).model_fields)
