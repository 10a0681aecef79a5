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
from typing import Any, TypeGuard

from ir.errors import PdvError, UsageError, VerificationError
from ir.files.reading import FileKind, parse_json

FORMAT_VERSION = 2  # major: raised when a field changes its meaning or vanishes, or a new one is needed
FORMAT_MINOR = 2  # raised with fields that a reader may leave aside; written as `format_minor` from 1 on
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


def version_fields() -> Document:
    """What a document says of its own format."""
    return {"format_version": FORMAT_VERSION, **({"format_minor": FORMAT_MINOR} if FORMAT_MINOR else {})}


def check_version(document: Mapping[str, Any]) -> None:
    """Whether this program reads documents like this one: of its own major version, whatever the minor one.

    Raises:
        VerificationError: if it is of another version.
    """
    major, minor = document.get("format_version"), document.get("format_minor", 0)
    if not (_is_count(major) and _is_count(minor)):
        raise damage_error(f"format_version is {major!r}, format_minor {minor!r}")
    if major == FORMAT_VERSION:
        return
    mend = f"Plan again{_by_command(document)}"
    if major > FORMAT_VERSION:
        mend = f"Update pdv, or {mend[0].lower()}{mend[1:]}"
    which = "a newer" if major > FORMAT_VERSION else "an older"
    what = f"{DOCUMENT} has format {major}.{minor}, of {which} pdv"
    raise VerificationError(what, f"Allowed: {FORMAT_VERSION}.x, which this pdv writes", mend)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_minor(document: Mapping[str, Any]) -> None:
    """Whether every field may be known: who believes nothing cannot leave fields aside.

    Raises:
        VerificationError: if the document is of a newer minor version.
    """
    minor = document.get("format_minor", 0)
    if minor > FORMAT_MINOR:
        what = f"{DOCUMENT} has format {FORMAT_VERSION}.{minor}, of a newer pdv: this one can read it, not verify it"
        raise VerificationError(what, f"Allowed: up to {FORMAT_VERSION}.{FORMAT_MINOR}", "Update pdv")


def _by_command(document: Mapping[str, Any]) -> str:
    """The command that made a plan, if it is one that may be shown."""
    command = document.get("command")
    shown = isinstance(command, str) and command.isprintable() and command.startswith("pdv ") and len(command) <= 400
    return f": {command}" if shown else ""


def damage_error(error: object) -> VerificationError:
    """The error of a plan.json that says what no plan says."""
    said = repr(error) if isinstance(error, Exception) else str(error)
    what = f"{DOCUMENT} is damaged, or of another version of pdv: {said}"
    return VerificationError(what, "The file that this `pdv optimize` wrote", "Plan again")


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
