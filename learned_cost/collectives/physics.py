"""What collectives take by physics: steps of latency, bytes over links, and the bound that nothing beats.

t = a + b + c sqrt(a b): ``a`` latency (a start, and steps), ``b`` bytes on the wire at the rate that the link sustains;
the last term is the ramp between (protocols that trade latency for bandwidth). Some 60 parameters, by library, link and
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
PARAMETERS = sum(len(values) for values in START.values())


@dataclass(frozen=True)
class Facts:
    """Numbers of cases that physics and the learned correction read; arrays of one length.

    Attributes:
        library, link, collective: classes, as indices.
        wire: log seconds of the bytes on the wire at the link's nominal rate; bound: log of the least seconds.
        steps: log of the ring's steps.
        others: by name, for the correction.
    """

    library: Ints
    link: Ints
    collective: Ints
    wire: Floats
    bound: Floats
    steps: Floats
    devices: Floats
    nodes: Floats
    in_switch: Floats
    blocks: Floats
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
    reduces = collective == COLLECTIVES.index("all_reduce")
    direct = np.isin(collective, [COLLECTIVES.index(name) for name in ("send_recv", "all_to_all", *EXPERTS)])
    sends = collective == COLLECTIVES.index("send_recv")
    experts = np.isin(collective, [COLLECTIVES.index(name) for name in EXPERTS])
    share = np.where(reduces, 2.0, 1.0) * np.where(sends, 1.0, (n - 1) / n)
    steps = np.where(direct, 1.0, np.where(reduces, 2.0, 1.0) * (n - 1))
    rate, kind = (
        _spread_levels([link.rate for link in links], codes, float),
        _spread_levels([k.kind for k in links], codes, int),
    )
    switched = _spread_levels([link.switched for link in links], codes, bool)
    adds = switched & reduces & (rate >= 400e9)  # NVLink 4's switches can add
    integer = _spread_levels([name == "int8" for name in heads.dtype], codes, bool)  # but not integers, in NCCL
    wire = np.log(share * cases.bytes / rate)
    # Bytes that each device sends at least: an adding switch halves an all-reduce; a token for several experts of one
    # device is sent once, eight experts at most.
    least = np.where(adds, np.minimum(share, 1.0), np.where(experts, share / 8.0, share))
    return Facts(
        _spread_levels([library_class(name) for name in heads.library], codes, int),
        kind,
        collective,
        wire,
        np.log(least * cases.bytes / rate),
        np.log(steps),
        np.log2(n),
        np.log2(cases.nodes),
        np.where(adds & (n >= 8) & ~integer, 1.0, 0.0),
        np.log(np.maximum(_spread_levels([blocks_used(name) for name in heads.library], codes, float), 1.0) / 20.0)
        * _spread_levels([blocks_used(name) > 0 for name in heads.library], codes, float),
        np.log2(cases.bytes),
        np.log2(rate),
        np.log2(_spread_levels([link.clock for link in links], codes, float)),
    )


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
    latency = np.exp(p["start"][lib]) + np.exp(p["step"][link] + p["step_library"][lib] + power * facts.steps)
    logit = (
        p["efficiency"][link]
        + p["efficiency_collective"][coll]
        + p["efficiency_library"][lib]
        + p["efficiency_devices"][link] * (facts.devices - 1.0)
        + p["blocks"][0] * facts.blocks
    )
    efficiency = -np.logaddexp(0.0, -logit) + p["in_switch"][0] * facts.in_switch + p["nodes"][0] * facts.nodes
    moving = np.exp(facts.wire - efficiency)
    between = np.exp(p["ramp"][lib] + p["ramp_link"][link] + p["ramp_collective"][coll]) * np.sqrt(latency * moving)
    total = latency + moving + between
    return np.log(total), (latency + 0.5 * between) / total
