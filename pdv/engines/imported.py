"""An engine's own configuration, priced: read as a configuration of `pdv.manual`, then simulated as any other.

Entry points: ``read_configuration``, ``on_plan``, ``imported_text``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ir.dims import divisors
from ir.errors import UsageError
from pdv.engines.beside import read_settings
from pdv.engines.engine import Engine, Found, Reading, Settings
from pdv.engines.formats.known import engine_of, named
from pdv.engines.scene import Scene
from pdv.manual.configuration import Configuration, complete
from pdv.report.simulated import seconds_text, simulated_document, simulated_text

Document = dict[str, Any]  # Any: JSON


@dataclass(frozen=True)
class Asked:
    """What a user says beside the file: settings in place of its own, the step's samples, the type of compute."""

    manual: str = ""
    batch: int | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Imported:
    """A file, and the configuration that it is with what was asked."""

    engine: Engine
    found: Found
    given: Configuration
    dtype: str | None
    fixed: frozenset[str]  # settings that somebody said


def read_configuration(path: Path, text: str, engine: str | None, reading: Reading, asked: Asked) -> Imported:
    """What a file says.

    Raises:
        UsageError: if it is no configuration, or not of so many devices, or what was asked contradicts it.
    """
    own = engine_of(path, text) if engine is None else named(engine)
    found = own.read(text, reading)
    settings: Settings = found.settings | read_settings(asked.manual)
    if asked.batch is not None and settings.setdefault("batch", asked.batch) != asked.batch:
        raise UsageError(
            f"{path.name} says a batch of {settings['batch']}, --batch {asked.batch}", mend="Leave one out"
        )
    if asked.dtype is not None and found.dtype not in (None, asked.dtype):
        raise UsageError(f"{path.name} computes in {found.dtype}, --dtype {asked.dtype}", mend="Leave --dtype out")
    given = complete(Configuration.model_validate(settings), reading.devices)
    return Imported(own, found, given, found.dtype or asked.dtype, frozenset(settings))


def on_plan(imported: Imported, scene: Scene) -> Document:
    """The step of a plan's model on its cluster under the configuration, beside the plan's own.

    Raises:
        UsageError: if it is none for this model.
    """
    given = imported.given
    if "batch" not in imported.fixed:
        given = given.model_copy(update={"batch": scene.batch})
    if "micro_batch" not in imported.fixed:
        rows, over = divmod(scene.batch if given.batch is None else given.batch, given.data)
        most = max(scene.rows // given.data, 1)
        size = 1 if over else max(size for size in divisors(rows) if size <= most)
        given = given.model_copy(update={"micro_batch": size})
    priced = scene.price(given, imported.dtype)
    document = simulated_document(priced.work, priced.simulation, priced.memory, priced.given.text())
    mine = scene.own.simulation.step_s
    return document | {"plan_step_s": mine, "ratio": priced.simulation.step_s / mine}


def about(imported: Imported) -> Document:
    """Which engine's file it is, and what of it no simulation knows."""
    return {
        "engine": imported.engine.name,
        "unpriced": list(imported.found.unpriced),
        "unread": list(imported.found.unread),
    }


def imported_text(document: Mapping[str, Any]) -> str:
    """The document as people read it."""
    lines = [f"engine    {document['engine']}", simulated_text(document)]
    if "plan_step_s" in document:
        beside = f"{seconds_text(document['plan_step_s'])}; this takes {document['ratio']:.3g} x as long"
        lines.insert(1, f"the plan  {beside}")
    for name, head in (("unpriced", "said, and not simulated"), ("unread", "said, and of no step's time")):
        if document[name]:
            lines += ["", f"{head}: {', '.join(document[name])}"]
    return "\n".join(lines)
