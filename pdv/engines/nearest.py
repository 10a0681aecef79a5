"""A plan as the nearest configuration of `pdv.manual`, and by name what of it that leaves out.

Each mesh axis is taken for what most of the arithmetic along it is cut for, in the words of `pdv.pins.roles`; what the
two then do differently is found by comparing them, operator by operator. Entry points: ``nearest``, ``differences``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from ir.cost_model import forward_work
from ir.mesh import Mesh
from ir.sharding import Shard
from pdv.engines.engine import Lost
from pdv.engines.scene import Priced
from pdv.manual.configuration import Configuration
from pdv.manual.placement import Use
from pdv.pcg.techniques import techniques
from pdv.pins.roles import Role
from pdv.problem.workload import SEARCHED
from pdv.report.diff import diff_document
from pdv.report.loaded import Loaded
from pdv.report.simulated import simulated_document
from pdv.schedule.stages import units

KIND: Mapping[Role, Use] = {
    "data": "data",
    "tensor": "tensor",
    "expert": "expert",
    "context": "context",
    "sequence": "context",
}
ORDERS = (*SEARCHED, "interleaved")
NAMED = 4  # operators told of by name


def nearest(plan: Loaded, rows: int) -> tuple[Configuration, list[Lost]]:
    """The configuration whose axes are for what the plan's are for, and what about axes and schedule no word says.

    rows: of a micro-batch.
    """
    uses = {axis.name: _use(plan, place) for place, axis in enumerate(plan.problem.mesh.axes)}
    sizes = {axis.name: axis.size for axis in plan.problem.mesh.axes}
    degree = {kind: math.prod(sizes[axis] for axis, use in uses.items() if use == kind) for kind in KIND.values()}
    dp, lost = degree["data"] * degree["expert"], list[Lost]()
    zero, shard = _zero(plan, [axis for axis, use in uses.items() if use in ("data", "expert")], sizes)
    if plan.problem.products is not None:
        lost.append(Lost(f"products in {plan.problem.products.format.name}", "those of layers are as all else here"))
    if plan.problem.precision.on_host:
        lost.append(Lost("the optimizer in the host's memory", "its state is on the devices here"))
    if plan.execution.moments > 1:
        lost.append(Lost(f"{plan.execution.moments} slices in time", "micro-batches pass as a whole here"))
    stages, execution = plan.stages, plan.execution
    order, virtual, partition = execution.order, stages.virtual, stages.layers or None
    if stages.count == 1:
        order = "1f1b"
    elif order not in ORDERS:
        lost.append(Lost(f"the schedule {order}", "no configuration is priced with it; 1f1b or interleaved instead"))
        order = "interleaved" if virtual > 1 and execution.micro_batches % stages.count == 0 else "1f1b"
    if virtual > 1 and order != "interleaved":
        virtual, partition = 1, None
    if partition is not None and sum(partition) != units(plan.source.graph).count:
        lost.append(Lost(f"stages of {'-'.join(map(str, partition))} layers", "they are of several stacks of layers"))
        partition = None
    if partition is not None and len(set(partition)) == 1:
        partition = None
    given = Configuration(
        tp=degree["tensor"],
        cp=degree["context"],
        ep=degree["expert"],
        dp=dp,
        pp=stages.count,
        vp=virtual,
        schedule=order,
        partition=partition,
        zero=zero,
        shard=shard,
        recompute=execution.recompute,
        micro_batch=max(rows // dp, 1),
        batch=rows * execution.micro_batches,
        sp=any(_norms_are_cut(plan, place) for place, use in enumerate(uses.values()) if use == "tensor"),
        precision="mixed" if plan.problem.precision.master else "as-emitted",
    )
    return given, lost


def _use(plan: Loaded, place: int) -> Use:
    """What most of the arithmetic that is cut along an axis is cut for; of samples where none is."""
    work: Counter[Use] = Counter()
    for node in plan.operators:
        split = plan.assignment.splits[node][place]
        role = plan.role(node, split)
        if role is not None and node.op.kernel:
            types = [operand.type for operand in node.operands]
            work[KIND[role]] += int(forward_work(node.op, node.loops, types, node.type).flops) + node.op.is_dense
    if work["expert"] and work["data"]:
        return "expert"
    return max(work, key=lambda use: (work[use], use), default="data")


def _norms_are_cut(plan: Loaded, place: int) -> bool:
    """Whether norms over an axis are mostly cut along the sequence."""
    norms = [plan.assignment.splits[node][place] for node in plan.operators if node.op.is_row_norm]
    nodes = [node for node in plan.operators if node.op.is_row_norm]
    cut = sum(plan.role(node, split) == "sequence" for node, split in zip(nodes, norms, strict=True))
    return 2 * cut > len(norms)


def _zero(plan: Loaded, axes: list[str], sizes: Mapping[str, int]) -> tuple[Literal[0, 1, 2, 3], int | None]:
    """Which ZeRO stage most parameters have along data axes, and over how many ranks, if these are not all of them."""
    names = [axis.name for axis in plan.problem.mesh.axes]
    kept: Counter[tuple[bool, tuple[str, ...]]] = Counter()
    for param, storage in plan.assignment.storage.items():
        if param.needs_grad:
            cut = tuple(axis for axis in axes if isinstance(storage.sharding[names.index(axis)], Shard))
            kept[storage.regather, cut] += math.prod(param.type.shape)
    (again, cut), _ = max(kept.items(), key=lambda item: item[1], default=(((False, ()), 0)))
    if not cut:
        return 0, None
    hybrid = again and len(cut) < len(axes) and cut == tuple(axes[-len(cut) :])
    return (3 if again else 1 if plan.execution.several else 2), math.prod(
        sizes[axis] for axis in cut
    ) if hybrid else None


# ---- What the configuration leaves out ----


def differences(own: Priced, other: Priced, derivation: Sequence[Mapping[str, Any]]) -> Iterator[Lost]:
    """By name, what a plan does and a configuration of it does not; ``own`` is the plan, ``derivation`` its steps."""
    for step in derivation:
        if step["kind"] == "algebraic":
            yield Lost(f"the rewrite {step['rule']} ({len(step['sites'])} sites)", "engines run the model as written")
    yield from _techniques(own, other)
    yield from _operators(own, other)


def _techniques(own: Priced, other: Priced) -> Iterator[Lost]:
    """Named techniques along axes of the same place and size, or along any axis."""
    mine, theirs = (
        techniques(one.work.pcg, one.work.problem.mesh, several=one.work.execution.several) for one in (own, other)
    )
    known = {name for names in theirs.values() for name in names}
    for axis, names in mine.items():
        for name in names:
            if name not in known and name != f"ZeRO-{other.given.zero}":
                yield Lost(f"{name} along {axis}", "the configuration's words place it otherwise")


def _operators(own: Priced, other: Priced) -> Iterator[Lost]:
    """Operators that are cut otherwise, where axes of the two meshes can be laid side by side."""
    groups = _beside(own.work.problem.mesh, other.work.problem.mesh)
    if groups is None:
        names = [str(one.work.problem.mesh) or "one device" for one in (own, other)]
        yield Lost(f"the mesh {names[0]}", f"{names[1]} in its place")
        return
    documents = [simulated_document(one.work, one.simulation, one.memory) for one in (own, other)]
    differing = []
    for entry in diff_document(documents[0], documents[1])["operators"]:
        first = sorted({_joined(text, groups) for text in entry["first"]})
        if first and entry["second"] and first != sorted(entry["second"]):
            differing.append((f"{entry['op']} {entry['name']} {', '.join(first)}", ", ".join(entry["second"])))
    yield from _parameters(own, other, groups)
    if differing:
        more = f" and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
        told, instead = ("; ".join(text or "whole" for text in side) for side in zip(*differing[:NAMED], strict=True))
        yield Lost(f"operators cut as {told}{more}", f"they are {instead} in the configuration")


def _parameters(own: Priced, other: Priced, groups: Sequence[range]) -> Iterator[Lost]:
    """Parameters that rest otherwise; ZeRO-1 and 2 rest by the run's settings, not by the graph."""
    if other.given.zero in (1, 2):
        return
    mine, theirs = (
        {str(param.attr("name")): str(param.attr("stored") or "") for param in one.work.pcg.params}
        for one in (own, other)
    )
    differing = [name for name in mine if name in theirs and _rests(mine[name], groups) != theirs[name]]
    if differing:
        told = ", ".join(f"{name} {mine[name] or 'whole'}" for name in differing[:NAMED])
        more = f" and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
        instead = ", ".join(theirs[name] or "whole" for name in differing[:NAMED])
        yield Lost(f"parameters that rest as {told}{more}", f"they rest as {instead} in the configuration")


def _rests(text: str, groups: Sequence[range]) -> str:
    """A parameter's sharding with axes joined; whole is nothing."""
    return _joined(text, groups) if text else ""


def _beside(mine: Mesh, theirs: Mesh) -> list[range] | None:
    """For each axis of one mesh those of the other that it is made of; None where it is not so."""
    groups, start = [], 0
    for axis in theirs.axes:
        stop, size = start, 1
        while stop < len(mine.axes) and size < axis.size:
            size *= mine.axes[stop].size
            stop += 1
        if size != axis.size:
            return None
        groups.append(range(start, stop))
        start = stop
    return groups if all(axis.size == 1 for axis in mine.axes[start:]) else None


def _joined(text: str, groups: Sequence[range]) -> str:
    """A sharding with axes joined: their state, where all have it."""
    states = text.split(",") if text else []
    found = [dict.fromkeys(states[place] for place in group) for group in groups]
    return ",".join("+".join(of) for of in found)


def count_layers(plan: Loaded) -> int:
    """Repeated layers of the model; 0 where it has none."""
    found = units(plan.source.graph)
    return found.count if found.layers else 0
