"""Packages changed on purpose: plan.json with a checksum that fits what was made of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdv.plan.seal import write_document

Document = dict[str, Any]  # Any: JSON


def document_of(folder: Path) -> Document:
    """plan.json as data, whatever it says."""
    found: Document = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    return found


def change_plan(folder: Path, change: Callable[[Document], object]) -> Path:
    """The folder, its plan.json changed in place and given a new checksum."""
    document = document_of(folder)
    change(document)
    write_document(folder, document)
    return folder
