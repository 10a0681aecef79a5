"""What collectives take by physics: steps of latency, bytes over links, and the bound that nothing beats.

t = a + b + c sqrt(a b): ``a`` latency (a start, and steps), ``b`` bytes on the wire at the rate that the link sustains;
the last term is the ramp between (protocols that trade latency for bandwidth). Some 80 parameters, by library, link and
collective, are fitted by ``learned_cost.collectives.fit``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learned_cost.collectives.rows import (
    COLLECTIVES,
    EXPERTS,
    LIBRARIES,
    LINKS,
    Cases,
    Floats,
    Ints,
    blocks_used,
    distinct,
    library_class,
    link_facts,
)

L, K, C = len(LIBRARIES), len(LINKS), len(COLLECTIVES)
# Where the fit starts, and what it is pulled to; logs of seconds, logits of efficiency.
START: Mapping[str, tuple[float, ...]] = {
    "start": (-12.4, -11.6, -10.3, -12.7, -12.7, -9.9, -11.5, -10.4, -11.7, -9.0),  # of a call, by library
    "step": (-14.0, -13.4, -12.2, -11.5),  # by link
    "step_library": (0.0,) * L,
    "step_power": (0.8,) * L,
    "efficiency": (1.0, 0.3, -0.5, -1.0),  # by link
    "efficiency_collective": (0.0,) * C,
    "efficiency_library": (0.0,) * L,
    "efficiency_devices": (0.0,) * K,
    "in_switch": (0.4,),
    "blocks": (0.0,),
    "nodes": (0.0,),
    "ramp": (-1.0,) * L,
    "ramp_link": (0.0,) * K,
    "ramp_collective": (0.0,) * C,
}
EXPERTS_OF_A_TOKEN = 8  # DeepSeek's, which DeepEP was written for
COPIED = 16.0  # bytes that an SM moves in a cycle, about (28 GB/s at 1.8 GHz)
NO_STEP, NEVER = 1e-9, -50.0  # in place of none, and of its log
BETWEEN = LINKS.index("between")
PARAMETERS = sum(len(values) for values in START.values())


@dataclass(frozen=True)
class Facts:
    """Numbers of cases that physics and the learned correction read; arrays of one length.

    Attributes:
        library, link, collective: classes, as indices.
        wire: log seconds of the bytes on the wire at the link's nominal rate; bound: log of the least seconds.
        inner: class of the link within a node; steps: log of the ring's steps over it; hops: over links between nodes.
        copy: log seconds that the SMs which copy take, where their number is known.
        others: by name, for the correction.
    """

    library: Ints
    link: Ints
    inner: Ints
    collective: Ints
    wire: Floats
    bound: Floats
    steps: Floats
    hops: Floats
    devices: Floats
    nodes: Floats
    in_switch: Floats
    blocks: Floats
    copy: Floats
    size: Floats
    rate: Floats
    clock: Floats


def _spread_levels(values: list[Any], codes: Ints, dtype: type) -> NDArray[Any]:
    return np.array(values, dtype=dtype)[codes]


def facts_of(cases: Cases) -> Facts:
    """All that follows from names and counts. Names never seen count as their nearest class."""
    first, codes = distinct(
        cases.gpu, cases.interconnect, cases.n, cases.nodes, cases.library, cases.collective, cases.dtype
    )
    heads = cases.take(first)
    links = [
        link_facts(gpu, name, n, nodes)
        for gpu, name, n, nodes in zip(heads.gpu, heads.interconnect, heads.n, heads.nodes, strict=True)
    ]
    names = [COLLECTIVES.index(name) if name in COLLECTIVES else _nearest(name) for name in heads.collective]
    n = np.maximum(cases.n, 2.0)
    collective = _spread_levels(names, codes, int)
    library = _spread_levels([library_class(name) for name in heads.library], codes, int)
    apart = _spread_levels([link.kind != link.inner for link in links], codes, bool)
    ports = _spread_levels([link.ports for link in links], codes, float)
    rate = _spread_levels([link.rate for link in links], codes, float)
    clock = _spread_levels([link.clock for link in links], codes, float)
    blocks = _spread_levels([blocks_used(name) for name in heads.library], codes, float)
    traffic = _traffic(collective, library, n, np.where(apart, np.maximum(cases.nodes, 2.0), 1.0), ports)
    switched = _spread_levels([link.switched for link in links], codes, bool)
    # NVLink 4's switches can add (but not integers, in NCCL), which halves the bytes of an all-reduce.
    adds = switched & (collective == COLLECTIVES.index("all_reduce")) & (rate >= 400e9)
    integer = _spread_levels([name == "int8" for name in heads.dtype], codes, bool)
    least = np.where(adds, np.minimum(traffic.least, 1.0), traffic.least)
    copying = traffic.copied * cases.bytes / (np.maximum(blocks, 1.0) * COPIED * clock)
    return Facts(
        library,
        _spread_levels([link.kind for link in links], codes, int),
        _spread_levels([link.inner for link in links], codes, int),
        collective,
        np.log(traffic.share * cases.bytes / rate),
        np.log(least * cases.bytes / rate),
        np.log(np.maximum(traffic.steps, NO_STEP)),
        traffic.hops,
        np.log2(n),
        np.log2(cases.nodes),
        np.where(adds & (n >= 8) & ~integer, 1.0, 0.0),
        np.log(np.maximum(blocks, 1.0) / 20.0) * (blocks > 0),
        np.where(blocks > 0, np.log(copying), NEVER),
        np.log2(cases.bytes),
        np.log2(rate),
        np.log2(clock),
    )


@dataclass(frozen=True)
class _Traffic:
    """Of each case: parts of its bytes that a device sends over the link, at least, and copies; steps and hops."""

    share: Floats
    least: Floats
    copied: Floats
    steps: Floats
    hops: Floats


def _traffic(collective: Ints, library: Ints, n: Floats, nodes: Floats, ports: Floats) -> _Traffic:
    """``nodes``: 1 where all devices share one link. A ring passes every device of a node before it leaves by all its
    ports; libraries go from node to node by a tree. Experts' bytes count a token once for each of its experts; DeepEP's
    kernels for throughput send it once to every node, or device of a node, that has one of them.
    """
    direct = np.isin(collective, [COLLECTIVES.index(name) for name in ("send_recv", "all_to_all", *EXPERTS)])
    sends = collective == COLLECTIVES.index("send_recv")
    experts = np.isin(collective, [COLLECTIVES.index(name) for name in EXPERTS])
    passes = np.where(collective == COLLECTIVES.index("all_reduce"), 2.0, 1.0)
    apart = nodes > 1
    groups = np.where(apart, nodes, n)
    part = np.where(apart & ~direct, (n - 1) / n, (groups - 1) / groups)
    part = np.where(experts & (library == LIBRARIES.index("deepep")), part * _once(groups), part)
    share = np.where(sends, 1.0, passes * part / np.where(direct, 1.0, ports))
    steps = np.where(direct, np.where(apart, 0.0, 1.0), passes * (np.where(apart, np.ceil(n / nodes), n) - 1))
    # At least: eight experts of a token on one device hear of it at once.
    least = np.where(experts, (groups - 1) / groups / EXPERTS_OF_A_TOKEN, share)
    copied = np.where(experts, _once(n) * np.where(apart, 2.0, 1.0), share)  # what comes from a node is handed on in it
    return _Traffic(share, least, copied, steps, np.where(apart, passes * np.log2(nodes), 0.0))


def _once(groups: Floats) -> Floats:
    """The share left of bytes to a token's experts, drawn alike, if each of the groups is sent the token once."""
    reached: Floats = -np.expm1(EXPERTS_OF_A_TOKEN * np.log1p(-1 / groups)) * groups
    return reached / EXPERTS_OF_A_TOKEN


def _nearest(name: str) -> int:
    """A collective of another name: by what it contains, else as an all-gather (everyone hears from everyone)."""
    lower = name.lower()
    signs = {
        "reduce_scatter": "reduce_scatter",
        "reduce": "all_reduce",
        "alltoall": "all_to_all",
        "to_all": "all_to_all",
        "send": "send_recv",
        "p2p": "send_recv",
        "dispatch": "ep_dispatch",
        "combine": "ep_combine",
    }
    return COLLECTIVES.index(next((kind for sign, kind in signs.items() if sign in lower), "all_gather"))


def unpack(numbers: Floats) -> dict[str, Floats]:
    """Parameters by name, from one vector."""
    ends = np.cumsum([len(values) for values in START.values()])
    return dict(zip(START, np.split(numbers, ends[:-1]), strict=True))


def start() -> Floats:
    """The vector where the fit starts."""
    return np.concatenate([np.array(values, dtype=np.float64) for values in START.values()])


def physics(numbers: Floats, facts: Facts) -> tuple[Floats, Floats]:
    """(log seconds, the share of them that is latency). Monotone in bytes, for ``c`` is never negative."""
    p = unpack(numbers)
    lib, link, coll = facts.library, facts.link, facts.collective
    power = np.clip(p["step_power"], 0.1, 1.2)[lib]
    step = np.exp(p["step"][facts.inner] + power * facts.steps) + np.exp(p["step"][BETWEEN]) * facts.hops
    latency = np.exp(p["start"][lib]) + np.exp(p["step_library"][lib]) * step
    logit = (
        p["efficiency"][link]
        + p["efficiency_collective"][coll]
        + p["efficiency_library"][lib]
        + p["efficiency_devices"][link] * (facts.devices - 1.0)
    )
    efficiency = -np.logaddexp(0.0, -logit) + p["in_switch"][0] * facts.in_switch + p["nodes"][0] * facts.nodes
    moving = np.exp(np.maximum(facts.wire - efficiency, facts.copy - p["blocks"][0]))
    between = np.exp(p["ramp"][lib] + p["ramp_link"][link] + p["ramp_collective"][coll]) * np.sqrt(latency * moving)
    total = latency + moving + between
    return np.log(total), (latency + 0.5 * between) / total
