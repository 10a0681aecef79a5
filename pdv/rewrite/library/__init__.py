"""The algebraic laws that ship with the program, one a line: ``written.laws`` and ``generated.laws``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ir.errors import UsageError
from ir.files.reading import FileKind, read_text
from pdv.rewrite.law import Law, parse_law
from pdv.rewrite.rule import Rule, rules_of
from pdv.rewrite.wellformed import check_form

FILES = ("written.laws", "generated.laws")
LAWS = FileKind(1 << 20, UsageError, "Give a text file with a law on each line", "UTF-8 text, a law on each line")


def read_laws(path: Path) -> tuple[Law, ...]:
    """The laws of a file; empty lines and lines that start with ``#`` are for people.

    Raises:
        UsageError: naming file and line of what is no law, or uses what does not exist; or if there is no law at all.
    """
    lines = read_text(path, LAWS).splitlines()
    found: dict[str, Law] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            law = check_form(parse_law(line))
        except UsageError as error:
            raise UsageError(f"{path} line {number}: {error.what}", error.allowed, error.mend) from error
        if law.name in found:
            what = f"{path} line {number}: a law above is called {law.name} too"
            raise UsageError(what, "Names of which each is there once", "Rename one of them")
        found[law.name] = law
    if not found:
        raise UsageError(
            f"{path} holds no law", "A law on each line, as docs/rules.md says", "Write one, or leave it out"
        )
    return tuple(found.values())


def written_laws() -> tuple[Law, ...]:
    """The laws that people wrote."""
    return read_laws(Path(__file__).parent / FILES[0])


@cache
def laws() -> tuple[Law, ...]:
    """All laws, the written ones first; a law of the same name or text is taken once."""
    found: dict[str, Law] = {}
    texts: set[str] = set()
    for file in FILES:
        for law in read_laws(Path(__file__).parent / file):
            text = str(law).partition(": ")[2].partition(" #")[0]
            if law.name in found:
                raise UsageError(f"two laws are called {law.name}")
            if text not in texts:
                found[law.name] = law
                texts.add(text)
    return tuple(found.values())


@cache
def all_rules() -> tuple[Rule, ...]:
    """Both directions of every law, where a direction tells all that it needs."""
    return tuple(rule for law in laws() for rule in rules_of(law))
