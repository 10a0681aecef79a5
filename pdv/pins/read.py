"""Reading a pins file: the same strict YAML as cluster files, one error with its line and a mend."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ir.errors import PinsError
from pdv.cluster.source import Place, Source, explain_first, read_yaml_as
from pdv.pins.spec import ForbidPin, OperatorPin, PinsSpec

NONE = "Write pins, or leave the file out"


def read_spec(pins: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[PinsSpec, Source]:  # Any: plain data
    """What a file, or a mapping of the same content, says, and where it says it.

    Raises:
        PinsError: naming the file, the line and the mend.
    """
    source = Source("pins", dict(pins), {}) if isinstance(pins, Mapping) else read_yaml_as(Path(pins), PinsError, NONE)
    if not isinstance(source.data, dict):
        raise PinsError(f"{source.name}: pins are a mapping", mend="Start with `tensors:`, or another key of docs/pins")
    try:
        return PinsSpec.model_validate(source.data), source
    except ValidationError as error:
        raise PinsError(*explain_first(error, source, _known_keys)) from None


def _known_keys(place: Place) -> list[str]:
    """The keys that the mapping at ``place`` may have."""
    models: dict[object, type[BaseModel]] = {"operators": OperatorPin, "forbid": ForbidPin}
    return list(models.get(place[0] if place else None, PinsSpec).model_fields)
