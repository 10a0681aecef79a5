"""No engine: the configuration itself as JSON, with how parameters rest, for programs of one's own."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pydantic import ValidationError

from ir.errors import UsageError
from pdv.engines.engine import Change, Engine, Found, Reading, Target, check_names, take_dtype, take_mapping
from pdv.engines.parsing import parse_json_object
from pdv.manual.configuration import Configuration

VERSION = 1
NAMES = frozenset(("configuration_version", "configuration", "dtype", "devices", "layers", "parameters", "tp_plan"))


class Plain(Engine):
    """Every word of `pdv simulate --manual`."""

    name = "json"
    file = "configuration.json"
    start = "pdv simulate --manual …, or a program of your own"

    def limits(self, given: Configuration, target: Target) -> Iterator[Change]:
        """None."""
        del given, target
        yield from ()

    def write(self, given: Configuration, target: Target) -> str:
        """All settings, defaults too."""
        said = {
            "configuration_version": VERSION,
            "configuration": given.model_dump(mode="json"),
            "dtype": target.dtype,
            "devices": target.devices,
            "layers": target.layers,
            "parameters": dict(target.parameters),
            "tp_plan": dict(target.styles),
        }
        return json.dumps(said, indent=2) + "\n"

    def read(self, text: str, reading: Reading) -> Found:
        """The same back."""
        del reading
        said = parse_json_object(text, self.name)
        if said.get("configuration_version") != VERSION:
            raise UsageError(
                f"configuration_version is {said.get('configuration_version')!r}", f"Allowed: {VERSION}", "Export again"
            )
        check_names(said, NAMES, "the file")
        given = take_mapping(said.get("configuration"), "configuration")
        check_names(given, frozenset(Configuration.model_fields), "configuration")
        try:
            found = Configuration.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            raise UsageError(f"configuration.{first['loc'][0]} is {first['input']!r}: {first['msg']}") from None
        return Found({name: getattr(found, name) for name in given}, take_dtype(said.get("dtype")))
