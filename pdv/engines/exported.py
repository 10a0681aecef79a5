"""A saved plan as an engine's file: the nearest configuration that the engine can say, and what that loses and costs.

The file is read back before it is given out: what an engine is told is what was priced. Entry point: ``export``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ir.dims import divisors
from ir.errors import UsageError
from ir.sharding import Shard, format_sharding
from pdv.cluster.units import MEMORY
from pdv.engines.engine import Engine, Lost, Reading, Target, narrow
from pdv.engines.nearest import count_layers, differences, nearest
from pdv.engines.scene import Priced, Scene
from pdv.engines.styles import styles
from pdv.manual.configuration import Configuration, complete
from pdv.manual.placement import place
from pdv.report.loaded import Loaded
from pdv.report.simulated import seconds_text

FREED: Mapping[str, Mapping[str, object]] = {
    "tp": {"sp": False},
    "pp": {"vp": 1, "schedule": "1f1b", "partition": None},
}
"""What goes with a degree."""


@dataclass(frozen=True)
class Exported:
    """What an engine is given of a plan; ``document`` says what that loses and costs."""

    text: str
    document: dict[str, Any]  # Any: JSON


def export(plan: Loaded, engine: Engine, file: str | None = None) -> Exported:
    """A plan for an engine; ``file`` is what its file is called, by default as the engine calls it.

    Raises:
        UsageError: if the plan is no training plan, or nothing near it is a configuration.
    """
    if plan.document["mode"] != "train":
        raise UsageError("the plan is for inference", "Allowed: plans of --mode train", "Plan again without --mode")
    scene = Scene.of_plan(plan)
    mine = scene.own
    given, lost = nearest(plan, scene.rows)
    whole, more = _price_nearest(scene, given)
    lost += [*more, *differences(scene.in_one_piece, whole, plan.document["derivation"])]
    target = _target(plan, scene, whole)
    narrowed, unsaid = narrow(engine, whole.given, target)
    best = whole if narrowed == whole.given else _best(scene, engine, narrowed, target)
    lost += [*unsaid, *_moved(narrowed, best.given)]
    text = engine.write(best.given, target)
    _check_text(engine, text, best.given, target)
    start = engine.start_line(target, file or engine.file)
    return Exported(text, _document(engine, target, lost, mine, best) | {"start": start})


def _price_nearest(scene: Scene, given: Configuration) -> tuple[Priced, list[Lost]]:
    """The configuration, or where the model does not admit it, with devices of a degree given to data parallelism."""
    try:
        return scene.price(given), []
    except UsageError as error:
        first = error
    for name in ("tp", "cp", "ep", "pp"):
        if getattr(given, name) > 1:
            without = given.model_copy(update={name: 1, **FREED.get(name, {})})
            for option in _spread(without, scene.work.cluster.num_devices):
                try:
                    return scene.price(option), [Lost(f"{name}={getattr(given, name)}", first.what)]
                except UsageError:
                    continue
    raise first


def _spread(given: Configuration, devices: int) -> Iterator[Configuration]:
    """Devices that no degree names any more, given to data parallelism, or else to tensor parallelism."""
    assert given.batch is not None, "a plan has a batch"
    free = devices // (given.tp * given.pp * given.cp * given.data)
    for name in ("dp", "tp") if free > 1 else ("dp",):
        option = given.model_copy(update={name: getattr(given, name) * free})
        rows, over = divmod(given.batch, option.data)
        if over:
            continue
        most = max(size for size in divisors(rows) if size <= given.micro_batch)
        try:
            yield complete(option.model_copy(update={"micro_batch": most}), devices)
        except UsageError:
            continue


def _best(scene: Scene, engine: Engine, given: Configuration, target: Target) -> Priced:
    """The fastest that fits of the ways to use all devices.

    Raises:
        UsageError: if there is none.
    """
    found = []
    for option in _spread(given, scene.work.cluster.num_devices):
        said, _ = narrow(engine, option, target)
        try:
            found.append(scene.price(said))
        except UsageError:
            continue
    if not found:
        raise UsageError(
            f"{engine.name} cannot say this plan, and nothing near it divides a batch of {given.batch}",
            "",
            "Plan with a batch that the number of devices divides",
        )
    return min(found, key=lambda one: (not one.memory.fits, one.simulation.step_s))


def _moved(narrowed: Configuration, final: Configuration) -> Iterator[Lost]:
    """Degrees that took what others left."""
    for name in ("dp", "tp", "micro_batch", "zero"):
        before, after = getattr(narrowed, name), getattr(final, name)
        if before != after:
            yield Lost(f"{name}={before} becomes {name}={after}", "all devices take part, and the batch stays")


def _target(plan: Loaded, scene: Scene, near: Priced) -> Target:
    """What a file says of this plan beside the configuration."""
    cluster, own = scene.work.cluster, near.given
    nodes = cluster.levels[0].size if len(cluster.levels) > 1 else 1
    axes = [axis.name for axis in own.mesh().axes]
    graph = near.work.problem.graph
    placed = place(graph, own.mesh(), own.uses(), resting=own.zero == 3)
    rests = {param.attr("name"): format_sharding(of.sharding) for param, of in placed.storage.items()}
    cut = {}
    for param, of in placed.storage.items():
        state = of.sharding[axes.index("tp")] if own.tp > 1 else None
        if isinstance(state, Shard):
            cut[param] = state.dim
    return Target(
        scene.dtype,
        nodes,
        cluster.num_devices // nodes,
        all(entry.device.kind == "gpu" for entry in cluster.classes),
        count_layers(plan),
        styles(graph, cut),
        rests,
    )


def _check_text(engine: Engine, text: str, given: Configuration, target: Target) -> None:
    """What the file says, read back, is what was priced."""
    found = engine.read(text, Reading(target.devices, target.layers)).settings
    back = Configuration.model_validate({"dp": given.dp, "batch": given.batch} | found)
    names = [name for name in Configuration.model_fields if getattr(back, name) != getattr(given, name)]
    said = {name: (getattr(given, name), getattr(back, name)) for name in names}
    assert not said, f"{engine.name}: written and read back differ: {said}"


def _document(
    engine: Engine, target: Target, lost: Sequence[Lost], mine: Priced, best: Priced
) -> dict[str, Any]:  # Any: JSON
    """What the export loses and costs."""
    return {
        "engine": engine.name,
        "configuration": best.given.text(),
        "dtype": target.dtype,
        "devices": target.devices,
        "lost": [{"what": one.what, "why": one.why} for one in lost],
        "in_script": dict(engine.in_script(best.given)),
        "plan": _price(mine),
        "exported": _price(best),
        "ratio": best.simulation.step_s / mine.simulation.step_s,
    }


def _price(one: Priced) -> dict[str, Any]:  # Any: JSON
    return {
        "step_s": one.simulation.step_s,
        "std_s": one.simulation.std_s,
        "peak_bytes": one.memory.worst.total_bytes,
        "fits": one.memory.fits,
    }


def exported_text(document: Mapping[str, Any], path: str) -> str:
    """The document as people read it."""
    mine, theirs = document["plan"], document["exported"]
    rows = {
        "file": path,
        "settings": f"{document['configuration'] or 'one device'} ({document['dtype']})",
        "step": f"{seconds_text(mine['step_s'])} by the plan, {seconds_text(theirs['step_s'])} so "
        f"({document['ratio']:.3g} x)",
        "memory": f"{_memory(mine)} by the plan, {_memory(theirs)} so",
        "start": document["start"],
    }
    lines = [f"{name:<{max(map(len, rows))}}  {value}" for name, value in rows.items()]
    for head, entries in (
        ("in the training script", [f"{name}: {how}" for name, how in document["in_script"].items()]),
        (f"what {document['engine']} does not do of the plan", [f"{e['what']}: {e['why']}" for e in document["lost"]]),
    ):
        lines += ["", head, *(f"  {entry}" for entry in entries)] if entries else []
    return "\n".join(lines if document["lost"] else [*lines, "", "nothing of the plan that has a name is lost"])


def _memory(price: Mapping[str, Any]) -> str:
    return MEMORY.format(price["peak_bytes"]) + ("" if price["fits"] else " (does not fit)")
