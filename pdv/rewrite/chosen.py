"""Which algebraic rules a search may apply: those shipped, none, or the laws of files, proven before they are used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ir.errors import UsageError, VerificationError
from pdv.rewrite.algebra import RULES
from pdv.rewrite.law import Law, parse_law
from pdv.rewrite.rule import Rule, rules_of

NONE, SHIPPED = "none", "shipped"
Name = str | os.PathLike[str]


def chosen_rules(names: Name | Sequence[Name] | None) -> tuple[Rule, ...]:
    """The rules that one or several names stand for: ``"shipped"``, ``"none"`` or a file of laws (``pdv.rewrite.law``).

    Raises:
        UsageError: if a file cannot be read, a line is no law, a law is false, or two laws share a name.
    """
    if names is None:
        return RULES
    listed = [names] if isinstance(names, str | os.PathLike) else list(names)
    found: dict[str, Rule] = {}
    for name in listed:
        for rule in _name(name):
            known = found.setdefault(rule.name, rule)
            if str(known.law) != str(rule.law):
                what = f"{name}: a law of another file is called {rule.law.name}, and says something else"
                raise UsageError(what, "Names of which each is one law", "Rename one of them")
    return tuple(found.values())


def trusted_rules(laws: Sequence[str]) -> tuple[Rule, ...]:
    """The rules of laws that a plan names in full: shipped ones by their text, all others proved here.

    Raises:
        UsageError: if a line is no law.
        VerificationError: if a law is false.
    """
    from pdv.rewrite.check import check_law

    shipped = {rule.law.text for rule in RULES}
    found: list[Rule] = []
    for line in laws:
        law = parse_law(line)
        if law.text not in shipped:
            try:
                check_law(law)
            except VerificationError as error:
                raise VerificationError(f"plan.json: {error.what}", error.allowed, "Plan again without it") from error
        found += rules_of(law)
    return tuple(found)


def _name(name: Name) -> tuple[Rule, ...]:
    if name == NONE:
        return ()
    if name == SHIPPED:
        return RULES
    return tuple(rule for law in _laws(Path(name)) for rule in rules_of(law))


def _laws(path: Path) -> tuple[Law, ...]:
    """The laws of a file, every one proven."""
    from pdv.rewrite.check import check_law
    from pdv.rewrite.library import read_laws

    if not path.is_file():
        raise UsageError(
            f"{path} is no file of laws",
            f"Allowed: {SHIPPED}, {NONE}, or a file with a law on each line",
            "Check the path",
        )
    laws = read_laws(path)
    for law in laws:
        try:
            check_law(law)
        except VerificationError as error:
            allowed = error.allowed or "Laws whose sides are equal wherever both have a type"
            raise UsageError(f"{path}: {error.what}", allowed, "Correct the law, or take it out") from error
    return laws
