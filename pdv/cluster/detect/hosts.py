"""Lists of hosts: DeepSpeed's hostfile, and Slurm's `node[01-16,20]`. Entry points: `hostfile`, `expand`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ir.errors import ClusterError
from pdv.cluster.detect.facts import Facts
from pdv.cluster.units import shorten

MAX_HOSTS = 2**16
LINE = re.compile(r"(\S+)(?:\s+slots\s*=\s*(\d{1,4}))?(?:\s+max[-_]slots\s*=\s*\d+)?", re.ASCII)
BRACKET = re.compile(r"\[([0-9,\-]*)\]", re.ASCII)
RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def hostfile(text: str, name: str) -> Facts:
    """`worker-1 slots=8`, a line a host.

    Raises:
        ClusterError: a line of another form, a host given twice, or none.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        plain = line.partition("#")[0].strip()
        found = LINE.fullmatch(plain) if plain else None
        if plain and (found is None or found[1] in hosts):
            what = f"the host {shorten(found[1])} is given twice" if found else f"{shorten(plain)} is no host"
            raise ClusterError(f"{name} line {number}: {what}", "Allowed: HOST slots=N, each host once")
        if found is not None:
            hosts[found[1]] = int(found[2] or 0)
    if not hosts:
        raise ClusterError(f"{name}: no host in it", "Allowed: HOST slots=N, a line a host")
    return Facts("DeepSpeed hostfile", hosts=tuple(hosts.items()))


def expand(text: str, where: str) -> tuple[str, ...]:
    """The hosts of a Slurm list: `a[1-3,07],b` is a1 a2 a3 a07 b.

    Raises:
        ClusterError: brackets that do not match, an empty or backward range, or far too many hosts.
    """
    found: list[str] = []
    for entry in _entries(text):
        for host in _expand_one(entry, where):
            found.append(host)
            if len(found) > MAX_HOSTS:
                raise ClusterError(f"{where}: more than {MAX_HOSTS} hosts")
    return tuple(found)


def _entries(text: str) -> Iterator[str]:
    """Split at commas outside brackets."""
    depth, start = 0, 0
    for place, char in enumerate(text):
        depth += {"[": 1, "]": -1}.get(char, 0)
        if char == "," and depth == 0:
            yield text[start:place].strip()
            start = place + 1
    yield text[start:].strip()


def _expand_one(entry: str, where: str) -> Iterator[str]:
    bracket = BRACKET.search(entry)
    if bracket is None:
        if not entry or set("[]") & set(entry):
            raise ClusterError(f"{where}: {shorten(entry)} is no list of hosts", "Allowed: node[01-16,20],other")
        yield entry
        return
    for part in bracket[1].split(","):
        found = RANGE.fullmatch(part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ClusterError(f"{where}: {shorten(part)} is no range", "Allowed: 3, or 01-16")
        first, last = int(found[1]), int(found[2] or found[1])
        if last - first > MAX_HOSTS:
            raise ClusterError(f"{where}: more than {MAX_HOSTS} hosts")
        for number in range(first, last + 1):
            middle = str(number).zfill(len(found[1]))
            yield from _expand_one(entry[: bracket.start()] + middle + entry[bracket.end() :], where)
