"""What an input tells: plain facts, none of them guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The inside of one node.

    Attributes:
        devices: GPUs in it.
        nvlinks: links of two GPUs, by the smaller number first.
        switched: NVLinks of each GPU that lead to an NVSwitch.
        sockets: GPUs by socket (or another domain that only a slower bridge joins), in order.
        ports: network ports, and the rate of each where it is known.
        port_bytes_per_s: of one port.
        infiniband: whether the ports' names are those of InfiniBand adapters; None: not told.
    """

    devices: int
    nvlinks: Mapping[Pair, int]
    switched: int
    sockets: tuple[tuple[int, ...], ...]
    ports: int = 0
    port_bytes_per_s: float | None = None
    infiniband: bool | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one input: a node's inside, hosts with their numbers of devices (0: not told), or switches with their hosts.

    `switches` are the lowest ones first: each tier is the hosts of each of its switches.
    """

    kind: str
    node: NodeFacts | None = None
    hosts: tuple[tuple[str, int], ...] = ()
    switches: tuple[tuple[tuple[str, ...], ...], ...] = ()
    notes: tuple[str, ...] = field(default=())
