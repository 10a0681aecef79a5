"""Command lines: a script with an engine's flags, and flags read out of scripts as people have them.

Entry points: ``script``, ``read_flags``, ``read_world``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ir.errors import UsageError
from pdv.engines.engine import Target, take_int
from pdv.engines.parsing import UNKNOWN, parse_words

ARGUMENTS = ("$@", "$*")  # what the script itself is given
Flags = dict[str, str | None]  # by name without dashes, with _ for -; None where there is no value


def script(target: Target, program: str, lines: Sequence[str], head: str = "") -> str:
    """A shell script that starts a program under torchrun on each node."""
    nodes = [] if target.nodes == 1 else [f"--nnodes={target.nodes}"]
    start = " ".join(["torchrun", *nodes, f"--nproc-per-node={target.per_node}", program])
    return "#!/bin/sh\n" + head + " \\\n    ".join([start, *lines, '"$@"']) + "\n"


def read_flags(text: str, engine: str) -> tuple[Flags, list[str]]:
    """Flags with their values, and the other words.

    Raises:
        UsageError: if a flag is given twice with different values.
    """
    found: Flags = {}
    others: list[str] = []
    words = [word.strip(",;") for word in parse_words(text)]
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.startswith("--") or len(word) < 4:
            others.append(word)
            continue
        name, value = word[2:].replace("-", "_"), None
        if place < len(words) and not words[place].startswith(("--", *ARGUMENTS)):
            value = words[place]
            place += 1
        if name in found and found[name] != value:
            raise UsageError(
                f"{engine}'s script says --{word[2:]} twice: {found[name]} and {value}",
                "Scripts of one configuration",
                "Keep one of them",
            )
        found[name] = value
    return found, others


def take_flag(flags: Flags, name: str, least: int = 1) -> int:
    """A flag's whole number.

    Raises:
        UsageError: if it is none, or only a run of the script would tell.
    """
    value = flags[name]
    if value is None or UNKNOWN in value:
        raise UsageError(f"--{name}: the script does not say its number", "", "Write the number in place of it")
    return take_int(value, f"--{name}", least)


def read_world(flags: Mapping[str, str | None]) -> int | None:
    """How many devices torchrun is told of, where both numbers stand in the script."""
    numbers = []
    for name, otherwise in (("nproc_per_node", None), ("nnodes", "1")):
        value = flags.get(name, otherwise)
        if value is None or not value.isascii() or not value.isdigit():
            return None
        numbers.append(int(value))
    return numbers[0] * numbers[1]
