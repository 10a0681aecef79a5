"""The algebraic laws that ship with the program, one a line: ``written.laws`` and ``generated.laws``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ir.errors import UsageError
from pdv.rewrite.law import Law, parse_law
from pdv.rewrite.rule import Rule, rules_of

FILES = ("written.laws", "generated.laws")


def read_laws(path: Path) -> tuple[Law, ...]:
    """The laws of a file; empty lines and lines that start with ``#`` are for people.

    Raises:
        UsageError: naming the line that is no law.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return tuple(parse_law(line) for line in lines if line.strip() and not line.startswith("#"))


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
