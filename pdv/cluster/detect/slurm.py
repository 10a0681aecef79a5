"""Slurm's switches: topology.yaml (trees and blocks) and topology.conf. Entry points: `topology_yaml`, `topology_conf`.

Formats: slurm.schedmd.com/topology.yaml.html and topology.conf.html.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ir.errors import ClusterError
from pdv.cluster.detect.facts import Facts
from pdv.cluster.detect.hosts import expand
from pdv.cluster.source import parse_yaml
from pdv.cluster.units import shorten

PAIR = re.compile(r"(\w+)=(\S+)", re.ASCII)
MAX_TIERS = 8


@dataclass(frozen=True, slots=True)
class _Switch:
    """Its hosts, or the names of the switches below it."""

    hosts: tuple[str, ...]
    below: tuple[str, ...]


def topology_yaml(text: str, name: str) -> Facts:
    """The first topology of the file (the default one where that is said).

    Raises:
        ClusterError: no tree or block in it, or one that does not hang together.
    """
    data = parse_yaml(text, name).data
    entries = [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else [data]
    plain = [entry for entry in entries if isinstance(entry, dict)]
    chosen = next((entry for entry in plain if entry.get("cluster_default") is True), plain[0] if plain else {})
    tree, block = chosen.get("tree"), chosen.get("block")
    if isinstance(tree, dict) and isinstance(tree.get("switches"), list):
        return _tiers(_yaml_switches(tree["switches"], name), name, "Slurm topology.yaml")
    if isinstance(block, dict) and isinstance(block.get("blocks"), list):
        blocks = {
            _text(entry, "block", name): _Switch(expand(_text(entry, "nodes", name), name), ())
            for entry in block["blocks"]
        }
        return _tiers(blocks, name, "Slurm topology.yaml")
    raise ClusterError(
        f"{name}: no switches in it",
        "Allowed: `tree: {switches: [...]}` or `block: {blocks: [...]}`, as Slurm reads it",
    )


def topology_conf(text: str, name: str) -> Facts:
    """`SwitchName=s1 Nodes=n[1-4]`, `SwitchName=top Switches=s[1-2]`, `BlockName=b1 Nodes=...`.

    Raises:
        ClusterError: a line of another form, or a tree that does not hang together.
    """
    switches: dict[str, _Switch] = {}
    for number, line in enumerate(text.splitlines(), 1):
        plain = line.partition("#")[0].strip()
        pairs = {key.lower(): value for key, value in PAIR.findall(plain)}
        where = f"{name} line {number}"
        label = pairs.get("switchname") or pairs.get("blockname")
        if not plain or (label is None and "blocksizes" in pairs):
            continue
        if label is None or label in switches:
            what = "a switch given twice" if label else f"{shorten(plain)} is no switch"
            raise ClusterError(f"{where}: {what}", "Allowed: SwitchName=NAME Nodes=LIST or Switches=LIST")
        hosts = expand(pairs["nodes"], where) if "nodes" in pairs else ()
        below = expand(pairs["switches"], where) if "switches" in pairs else ()
        switches[label] = _Switch(hosts, below)
    return _tiers(switches, name, "Slurm topology.conf")


def _yaml_switches(entries: Sequence[Any], name: str) -> dict[str, _Switch]:  # Any: YAML
    switches: dict[str, _Switch] = {}
    for entry in entries:
        label = _text(entry, "switch", name)
        hosts = expand(_text(entry, "nodes", name), name) if "nodes" in entry else ()
        below = expand(_text(entry, "children", name), name) if "children" in entry else ()
        switches[label] = _Switch(hosts, below)
    return switches


def _text(entry: Any, key: str, name: str) -> str:  # Any: YAML
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ClusterError(f"{name}: {key} is missing or no text in {shorten(entry)}")
    return str(value)


def _tiers(switches: Mapping[str, _Switch], name: str, kind: str) -> Facts:
    """Switches by height over the hosts, lowest first; hosts in the order of the tree."""
    if not switches:
        raise ClusterError(f"{name}: no switches in it")
    children = {child for switch in switches.values() for child in switch.below}
    unknown = sorted(children - set(switches))
    if unknown:
        raise ClusterError(
            f"{name}: there is no switch {shorten(unknown[0])}", f"Switches: {', '.join(switches)}"[:300]
        )
    roots = [label for label in switches if label not in children]
    found: dict[int, list[tuple[str, ...]]] = {}
    order: list[str] = []

    def walk(label: str, path: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
        if label in path or len(path) > MAX_TIERS:
            raise ClusterError(f"{name}: the switch {shorten(label)} is below itself, or the tree is too deep")
        switch = switches[label]
        below = [walk(child, (*path, label)) for child in switch.below]
        order.extend(switch.hosts)
        hosts = tuple(host for _, some in below for host in some) + switch.hosts
        height = 1 + max((height for height, _ in below), default=-1)
        found.setdefault(height, []).append(hosts)
        return height, hosts

    for root in roots:
        walk(root, ())
    if not roots or not order:
        raise ClusterError(f"{name}: no switch with nodes that is not below itself")
    if len(set(order)) != len(order):
        twice = next(host for host in order if order.count(host) > 1)
        raise ClusterError(f"{name}: the node {shorten(twice)} is below two switches", mend="Leave one of them")
    tiers = tuple(tuple(found[height]) for height in sorted(found))
    return Facts(kind, hosts=tuple((host, 0) for host in order), switches=tiers)
