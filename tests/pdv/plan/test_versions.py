"""The format of plan.json has a version: what is read of others. That no field changes without one: test_recorded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ir.errors import VerificationError
from pdv.plan.package import read_document
from pdv.plan.seal import FORMAT_MINOR, FORMAT_VERSION, check_minor, version_fields, write_document

COMMAND = "pdv optimize gpt2.onnx --cluster cluster.yaml"


def read(folder: Path, **fields: Any) -> dict[str, Any]:
    write_document(folder, {"format_version": FORMAT_VERSION, **fields})
    return read_document(folder)


def test_other_minor_versions_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, format_minor=FORMAT_MINOR + 3, new=1)["new"] == 1
    assert check_minor(read(tmp_path)) is None
    with pytest.raises(VerificationError, match=r"format 2\.9, of a newer pdv: this one can read it, not verify it\."):
        check_minor(read(tmp_path, format_minor=9))
    assert version_fields()["format_version"] == FORMAT_VERSION


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"format_version": 1}, "format 1.0, of an older pdv. Allowed: 2.x, which this pdv writes. Plan again."),
        ({"format_version": 1, "command": COMMAND}, f"which this pdv writes. Plan again: {COMMAND}."),
        ({"format_version": 3}, "has format 3.0, of a newer pdv. Allowed: 2.x, which this pdv writes. Update"),
        ({"format_version": 3, "format_minor": 4, "command": COMMAND}, f"Update pdv, or plan again: {COMMAND}."),
        ({"format_version": 3, "command": "rm -rf /"}, "Update pdv, or plan again."),
        ({"format_version": 3, "command": "pdv \x1b[2J"}, "Update pdv, or plan again."),
        ({"format_version": True}, "format_version is True"),
        ({"format_version": "2"}, "format_version is '2'"),
        ({"format_version": None}, "format_version is None"),
        ({"format_version": 2.0}, "format_version is 2.0"),
        ({"format_version": -1}, "format_version is -1"),
        ({"format_minor": "x"}, "format_minor 'x'"),
        ({"format_minor": None}, "format_minor None"),
    ],
)  # fmt: skip
def test_what_is_refused_says_what_to_do(fields: Mapping[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(VerificationError) as error:
        read(tmp_path, **fields)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
