"""What an engine takes in the training script and not in its file: written into the file as a comment, read from there.

So that a file of `pdv export` says all that it was written for, and other files as much as they say. Entry points:
``beside_line``, ``read_beside``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ir.errors import UsageError
from pdv.engines.engine import Settings
from pdv.manual.configuration import Configuration, configuration

MARK = "in the script:"
LONGEST = 1000  # characters of the line


def beside(given: Configuration, names: Iterable[str]) -> str:
    """These settings as ``--manual`` takes them."""
    chosen = {name: getattr(given, name) for name in names}
    return Configuration.model_validate(chosen).text()


def beside_line(given: Configuration, names: Iterable[str], comment: str = "#") -> str:
    """A comment that says them; nothing where all are at their defaults."""
    text = beside(given, names)
    return f"{comment} {MARK} {text}\n" if text else ""


def read_beside(text: str, comment: str = "#") -> Settings:
    """The settings of such a comment; none without one."""
    match = re.search(rf"^{re.escape(comment)} {MARK} (.*)$", text[:LONGEST], re.MULTILINE)
    return {} if match is None else read_settings(match[1])


def read_settings(text: str) -> Settings:
    """Settings as ``--manual`` takes them.

    Raises:
        UsageError: if the text is none.
    """
    try:
        found = configuration(text.strip())
    except UsageError as error:
        raise UsageError(error.what.replace("--manual", f"the file, {MARK[:-1]}"), error.allowed, error.mend) from None
    return {name: getattr(found, name) for name in sorted(found.model_fields_set)}
