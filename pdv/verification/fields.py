"""plan.json, worked out again from its derivation, cluster and mode, and compared field by field.

Numbers are compared to ``CLOSE``, for sums may be taken in another order on another machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ir.errors import VerificationError
from pdv import config
from pdv.cluster import Cluster, candidate_meshes
from pdv.cost.comm import AxisLink
from pdv.memory import step_memory
from pdv.pins import PinSet, load_pins
from pdv.plan.certificate import statement
from pdv.plan.document import describe_step, facts_document
from pdv.plan.seal import CHECKSUM
from pdv.prices import priced_axes, slowest_axes, stage_axes
from pdv.problem import Problem
from pdv.problem.recomputation import HOSTED, WHOLE
from pdv.report.loaded import Loaded, workload_of_plan
from pdv.report.simulated import step_facts
from pdv.search.strategies import STRATEGIES
from pdv.simulate.step import simulate
from pdv.verification.weights import view_shape

CLOSE = 1e-9  # relative
PRICES = ("cost_model", "predicted", "simulated")
UNCHECKED = (
    CHECKSUM,
    "files",
    "proof",
    "run",
    "command",
    "weights",
    "sizes",
    "part",
    "reading",
    "state",
)  # elsewhere, or claimed
RUN = "what a run of the emitted text showed (--run runs it again)"
_SIZES = (
    "that the model is the same program at other sizes of its inputs, where plan.json says that it takes them (sizes)"
)
_SEARCH = "the bound of the search, what it spent, and the rules that it was allowed"
CLAIMED: Mapping[str, str] = {
    "part": "which devices alone take less, by a search of their own (part)",
    "reading": "what a run of the module against its reading showed (reading)",
    "state.": "further names of the source's tensors (state)",
    "cluster.": "the cluster's figures",
    "sizes.": _SIZES,
    "search.states": _SEARCH,
    "search.certificate.space.rules": _SEARCH,
    "search.certificate.space.memory_limit_bytes": _SEARCH,
    "command": "the command",
    "run.": RUN,
}
"""Places of plan.json that are believed, by how they begin, and what ``pdv verify`` says of them."""

SEARCH = ("strategy", "seconds", "states", "meshes", "cost", "lower_bound", "gap", "certificate")
CERTIFICATE = ("statement", "lower_bound", "gap", "of", "complete", "space")
SPACE = ("meshes", "meshes_left_out", "rules", "variants", "mode", "memory_limit_bytes", "pins")


def check_fields(plan: Loaded, *, priced: bool) -> None:
    """Whether plan.json says what its derivation gives; prices only where they can be had again (``priced``).

    Raises:
        VerificationError: naming the first field that differs, is missing or unknown.
    """
    document = plan.document
    cluster = Cluster.from_dict(document["cluster"])
    wrong = _axes(plan, cluster, priced=priced)
    if wrong:
        raise VerificationError(f"plan.json: {wrong}", "What follows from the cluster", "Plan again")
    expected = _expect(plan, cluster, priced=priced)
    found = {name: value for name, value in document.items() if name not in UNCHECKED}
    if not priced:
        expected, found = _without_prices(expected), _without_prices(found)
    _check_types(document)
    wrong = difference(json.loads(json.dumps(expected)), found)
    if wrong:
        raise VerificationError(f"plan.json: {wrong}", "What follows from the plan", "Plan again")


def _expect(plan: Loaded, cluster: Cluster, *, priced: bool) -> dict[str, Any]:
    steps = [
        describe_step({name: step[name] for name in ("rule", "bindings", "sites")}, plan.source)
        for step in plan.document["derivation"]
    ]
    step = _simulate(plan) if priced else None
    facts = facts_document(
        plan.source, plan.graph, plan.assignment, plan.derived, plan.cost, steps, step,
        cluster=cluster, several=plan.execution.several,
    )  # fmt: skip
    simulated = {} if step is None else {"simulated": step}
    cost = plan.document["search"]["cost"]
    if step is not None:
        cost = step["step_s"] if _is_of_step(plan) else plan.cost.seconds
    return {**facts, "derivation": steps, **simulated, "search": _search(plan, cluster, cost)}


def _simulate(plan: Loaded) -> dict[str, Any]:
    """A step, simulated again."""
    workload = workload_of_plan(plan)
    return step_facts(simulate(workload), step_memory(workload))


def _search(plan: Loaded, cluster: Cluster, cost: float) -> dict[str, Any]:
    """What of a search follows from the rest: its cost, its gap, the meshes that there are, and its sentence."""
    said = plan.document["search"]
    certificate, bound = said["certificate"], said["lower_bound"]
    gap = None if bound is None else max(0.0, (cost - bound) / cost) if cost > 0 else 0.0
    space = {name: certificate["space"][name] for name in SPACE}
    if running := certificate["space"].get("running"):
        space["running"] = _pinned(plan, running)
    if _is_of_step(plan) and plan.stages.virtual == 1:
        space["virtual_stages"] = 1
    staged = space.get("running", {}).get("stages", 1) > 1  # pins are of a stage's mesh then, not of the cluster's
    pins = None if space["pins"] is None or staged else load_pins(json.loads(space["pins"]))
    listed = [*space["meshes"], *space["meshes_left_out"]]
    meshes, count = _meshes(cluster, pins, len(listed)), len(space["meshes"])
    space |= {"meshes": meshes[:count], "meshes_left_out": meshes[count:], "mode": plan.problem.mode}
    told = {**{name: certificate[name] for name in CERTIFICATE}, "space": space, "lower_bound": bound, "gap": gap}
    told["of"] = "step" if _is_of_step(plan) else "price"
    same = {name: said[name] for name in ("strategy", "states", "lower_bound")}
    return {
        **same,
        "seconds": None,
        "meshes": count,
        "cost": cost,
        "gap": gap,
        "certificate": {**told, "statement": statement(told)},
    }


def _is_of_step(plan: Loaded) -> bool:
    """Whether bound and gap are of a simulated step: of a whole batch they may be of its price, too."""
    return not plan.is_whole or plan.document["search"]["certificate"]["of"] == "step"


def _pinned(plan: Loaded, said: Mapping[str, Any]) -> dict[str, Any]:
    """What was pinned of how a step runs, as the plan has it: the derivation keeps what it was to keep."""
    sizes = {axis.name: axis.size for axis in plan.problem.mesh.axes}
    run = plan.execution
    kept: dict[str, Any] = {"stages": plan.stages.count, "micro_batches": run.micro_batches, "schedule": run.order,
            "recompute": run.recompute, "mesh": sizes, "virtual_stages": plan.stages.virtual}  # fmt: skip
    kept["slices"] = run.moments
    if run.recompute in HOSTED:
        kept |= {"recompute": "full" if run.recompute in WHOLE else "none", "activations": "host"}
    if plan.stages.count == 1:  # of one stage there is no order
        kept |= {name: said.get(name) for name in ("schedule", "virtual_stages")}
    return {name: kept[name] for name in kept if name in said}


def _meshes(cluster: Cluster, pins: PinSet | None, count: int) -> list[str]:
    """Those that were searched; of plans that say of more, both of those that differ in the order of axes alone."""
    one_each, all_of_them = (
        [entry.mesh for entry in candidate_meshes(cluster, config.MAX_MESH_AXES, mirrored=mirrored)]
        for mirrored in (False, True)
    )
    meshes = one_each if pins is None and count <= len(one_each) else all_of_them
    spoken = meshes if pins is None else [mesh for mesh in meshes if pins.speaks_of(mesh)] or meshes[-1:]
    return [str(mesh) for mesh in spoken]


def _axes(plan: Loaded, cluster: Cluster, *, priced: bool) -> str:
    """How the axes differ from those that the cluster gives."""
    problem = plan.problem
    if plan.stages.count > 1:
        if plan.num_devices != cluster.num_devices:
            return (
                f"mesh is {plan.stages.count} stages of {problem.mesh}, the cluster has {cluster.num_devices} devices"
            )
        links = slowest_axes(stage_axes(problem.compute, cluster, problem.mesh, plan.stages.count))
        return _differing(problem, links, priced=priced)
    found = [entry for entry in candidate_meshes(cluster, config.MAX_MESH_AXES) if entry.mesh == problem.mesh]
    if not found:
        return f"mesh is {problem.mesh}, which is none of the cluster's"
    return _differing(problem, priced_axes(cluster, problem.compute, found[0]), priced=priced)


def _differing(problem: Problem, axes: tuple[AxisLink, ...], *, priced: bool) -> str:
    pairs = zip(problem.mesh.axes, axes, problem.axes, strict=True)
    wrong = [axis.name for axis, one, other in pairs if one != (other if priced else replace(other, curves=one.curves))]
    return f"mesh: the link of {wrong[0]} is not the cluster's" if wrong else ""


def _check_types(document: Mapping[str, Any]) -> None:
    """The fields that nothing else repeats are at least possible.

    Raises:
        VerificationError: naming one that is not.
    """
    search, command = document["search"], document.get("command", "")
    bound, space = search["lower_bound"], search["certificate"]["space"]
    possible = {
        "search.strategy": search["strategy"] in STRATEGIES,
        "search.states": _whole(search["states"]),
        "search.lower_bound": bound is None or 0 <= bound <= search["cost"] * (1 + CLOSE),
        "search.certificate.complete": isinstance(search["certificate"]["complete"], bool),
        "search.certificate.space.variants": _whole(space["variants"]),
        "search.certificate.space.rules": set(space["rules"]) == {"count", "digest"},
        "search.certificate.space.rules.digest": isinstance(space["rules"]["digest"], str),
        "search.certificate.space.rules.count": _whole(space["rules"]["count"]),
        "command": isinstance(command, str),
        "run": set(document["run"]) == {"statement", "ranks"} and isinstance(document["run"]["statement"], str),
        "run.ranks": _whole(document["run"]["ranks"]),
        "sizes": all(map(_is_size, document["sizes"].values())),
        "part": isinstance(document.get("part", {}), dict),
        "reading": isinstance(document.get("reading", ""), str),
        "state": _is_state(document),
    }
    for name, holds in possible.items():
        if not holds:
            raise VerificationError(f"plan.json: {name} says what cannot be", "", "Plan again")
    known = {*SPACE, "running", "virtual_stages"}
    unknown = set(search) - set(SEARCH) or set(search["certificate"]) - set(CERTIFICATE) or set(space) - known
    if unknown:
        raise VerificationError(f"plan.json: search has unknown fields {sorted(unknown)}", "", "Plan again")


def _is_size(entry: Mapping[str, Any]) -> bool:
    most = entry.get("most")
    said = set(entry) == {"inputs", "fixed_by", "most"} and isinstance(entry["fixed_by"], str)
    return (
        said
        and (most is None or _whole(most))
        and all(len(place) == 2 and _whole(place[1]) for place in entry["inputs"])
    )


def _is_state(document: Mapping[str, Any]) -> bool:
    """Whether further names are of stored tensors, of which there is such a view."""
    state, weights = document.get("state", {}), document.get("weights")
    if not set(state) <= {"names", "unread", "joint", "frozen"}:
        return False
    if weights is None:  # a plan alone does not say what is stored
        return True
    if not all(name in weights for name in state.get("unread", ())):
        return False
    of = {name: source for name, (source, _) in state.get("names", {}).items()}
    if not {*state.get("frozen", ())} <= {*weights, *of}:
        return False
    views = [
        view_shape(tuple(weights[source]["shape"]), tuple((step[0], *map(_tuple, step[1:])) for step in view))
        for source, view in state.get("names", {}).values()
        if source in weights
    ]
    read = {*of.values(), *state.get("joint", ())}
    computed = document.get("mode") == "infer"  # of what is computed of others, these need not be stored
    return None not in views and not set(of) & set(weights) and (computed or read <= {*weights})


def _tuple(value: Any) -> Any:  # Any: JSON
    return tuple(value) if isinstance(value, list) else value


def _whole(value: object) -> bool:
    return type(value) is int and value >= 0


def _without_prices(document: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in document.items() if name not in PRICES}
    rest["operators"] = [{**entry, "time_s": None, "source": None} for entry in rest["operators"]]
    if "opaque_operators" in rest:
        rest["opaque_operators"] = [{**entry, "time_s": None} for entry in rest["opaque_operators"]]
    rest["mesh"] = [{**axis, "link": {**axis["link"], "curves": None}} for axis in rest["mesh"]]
    return rest


def difference(expected: Any, found: Any, path: str = "") -> str:  # Any: JSON
    """Where and how two JSON values differ, or nothing."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for name in [*expected, *found]:
            at = f"{path}.{name}" if path else name
            if name not in expected:
                return f"the field {at} is unknown"
            if name not in found:
                return f"the field {at} is missing"
            if wrong := difference(expected[name], found[name], at):
                return wrong
        return ""
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return next(filter(None, map(difference, expected, found, (f"{path}[{i}]" for i in range(len(found))))), "")
    if _number(expected) and _number(found) and isinstance(expected, float):
        same = math.isclose(expected, found, rel_tol=CLOSE)
    else:
        same = type(expected) is type(found) and expected == found
    return "" if same else f"{path} is {_short(found)}, the plan gives {_short(expected)}"


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
