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
BESIDE = (
    "stages", "micro_batches", "schedule", "recompute", "virtual_stages", "slices", "offload", "precision", "dtype"
)  # fmt: skip
"""What users look for among pins, and is an option of its own: pins are of the inside of a stage."""


def read_spec(pins: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[PinsSpec, Source]:  # Any: plain data
    """What a file, or a mapping of the same content, says, and where it says it.

    Raises:
        PinsError: naming the file, the line and the mend.
    """
    source = Source("pins", dict(pins), {}) if isinstance(pins, Mapping) else read_yaml_as(Path(pins), PinsError, NONE)
    if not isinstance(source.data, dict):
        raise PinsError(f"{source.name}: pins are a mapping", mend="Start with `tensors:`, or another key of docs/pins")
    for key in (key for key in source.data if key in BESIDE):
        raise PinsError(
            f"{source.where((key,))}: {key} is no pin, but an option of its own",
            mend=f"Leave it out, and write `pdv optimize --{key.replace('_', '-')} …`, or optimize({key}=…)",
        )
    try:
        return PinsSpec.model_validate(source.data), source
    except ValidationError as error:
        raise PinsError(*explain_first(error, source, _known_keys)) from None


def _known_keys(place: Place) -> list[str]:
    """The keys that the mapping at ``place`` may have."""
    models: dict[object, type[BaseModel]] = {"operators": OperatorPin, "forbid": ForbidPin}
    return list(models.get(place[0] if place else None, PinsSpec).model_fields)
