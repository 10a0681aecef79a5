"""plan.json as a file: written in one way, and read back only if nothing in it was changed since.

The checksum finds accidents, in the fields too that nothing else repeats. Who changes a plan on purpose can write a new
checksum; what follows from the plan is therefore worked out again (``pdv.verification``), and not believed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ir.errors import PdvError, UsageError, VerificationError
from ir.files.reading import FileKind, parse_json

FORMAT_VERSION = 2
DOCUMENT = "plan.json"
PLAN = FileKind(1 << 27, VerificationError, wanted="Plan again")
CHECKSUM = "checksum"
Document = dict[str, Any]  # Any: JSON


def finite(value: float) -> float | None:
    """A number as JSON, which has no infinity (an axis of size one has a link without a bandwidth): then None."""
    return None if value == float("inf") else value


def write_document(directory: Path, document: Mapping[str, Any]) -> None:
    """plan.json with its checksum."""
    whole = {**document, CHECKSUM: checksum(document)}
    text = json.dumps(whole, indent=2, ensure_ascii=True, allow_nan=False) + "\n"
    (directory / DOCUMENT).write_text(text, encoding="utf-8", newline="\n")


def checksum(document: Mapping[str, Any]) -> str:
    """Of a document's content: without the checksum itself, its keys sorted, no spaces."""
    content = {name: value for name, value in document.items() if name != CHECKSUM}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def parse_document(text: str) -> Document:
    """The document of plan.json's text.

    Raises:
        VerificationError: if it is no JSON object, of another version, or not as it was written.
    """
    try:
        document = parse_json(text, _once_each)
    except ValueError as error:
        raise damage_error(error) from error
    if not isinstance(document, dict):
        raise damage_error("it is no JSON object")
    check_version(document)
    try:
        found = checksum(document)
    except (ValueError, RecursionError) as error:  # a number that is infinite
        raise damage_error(error) from error
    if document.get(CHECKSUM) != found:
        raise VerificationError(
            f"{DOCUMENT} was changed after it was written: its checksum is of another content",
            "The file that `pdv optimize` wrote",
            "Restore it, or plan again",
        )
    return document


def check_version(document: Mapping[str, Any]) -> None:
    """Whether this program wrote documents like this one.

    Raises:
        VerificationError: if it is of another version.
    """
    version = document.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        what = f"{DOCUMENT} has format_version {version!r}"
        raise VerificationError(what, f"Allowed: {FORMAT_VERSION}, which this pdv writes", "Plan again")


def damage_error(error: object) -> VerificationError:
    """The error of a plan.json that says what no plan says."""
    said = repr(error) if isinstance(error, Exception) else str(error)
    return VerificationError(f"{DOCUMENT} is damaged: {said}", "The file that `pdv optimize` wrote", "Plan again")


@contextmanager
def refusing() -> Iterator[None]:
    """Whatever a plan.json says that nothing can be made of is damage.

    Raises:
        VerificationError: in place of what is raised by who works with it.
    """
    try:
        yield
    except (UsageError, VerificationError):
        raise
    except (PdvError, ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise damage_error(error) from error


def _once_each(pairs: list[tuple[str, Any]]) -> Document:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a name stands twice: {sorted(name for name, _ in pairs)}")
    return found
