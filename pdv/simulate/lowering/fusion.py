"""Element-wise operators of a PCG that run as one kernel, each with its share of the group's time; one launch.

Entry point: ``fusion``; which operators those are, ``pdv.pcg.fused`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ir.graph import Node
from pdv.pcg.fused import groups_of, kernels_of, remaining
from pdv.simulate.lowering.entries import Nodes

Fusion = tuple[tuple[float, bool], ...]
"""For each node of a run: its share of time, and whether it is launched."""

ALONE = (1.0, True)


def fusion(run: Sequence[Node], nodes: Nodes) -> Fusion:
    """The groups of a run.

    A move of a value ends what is seen through views. Nothing in a run makes a parameter: however it comes, by data
    parallelism or gathered, it is at hand.
    """
    inside = frozenset(run)
    sources = partial(kernels_of, ends=lambda value: value not in inside or nodes.base[value].is_leaf)
    found = dict.fromkeys(run, ALONE)
    for group in groups_of(run, sources):
        if len(group) > 1:
            share = remaining(group, lambda node: nodes.of[node].bytes, nodes.pcg.users.__getitem__)
            found |= {node: (share, node is group[0]) for node in group}
    return tuple(found.values())
