"""A directory that trains: the program, what it runs on, its weights and its plan. Entry point: ``write_package``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from ir.graph import Graph
from ir.mesh import Mesh
from pdv.emit.analysis.open_sizes import NamedSizes
from pdv.emit.analysis.staged import ONCE, Running
from pdv.emit.emission import Emission
from pdv.emit.weights import write_weights
from pdv.frontend.program import Weights
from pdv.plan.seal import write_document

WEIGHTS = "weights.safetensors"


def write_package(emission: Emission, document: Mapping[str, object], weights: Weights, directory: Path) -> None:
    """Write the package of a plan into an existing directory; equal plans give equal bytes.

    document: plan.json; weights: the values of the source's parameters.

    Raises:
        ModelError: if a parameter has no values, or two of them share some.
    """
    stored = write_weights(directory / WEIGHTS, emission.tensors(weights))
    for name, text in emission.files(document, lambda tensor: stored[tensor].shape).items():
        (directory / name).write_text(text, encoding="utf-8", newline="\n")
    write_document(directory, {**document, "weights": {name: entry._asdict() for name, entry in stored.items()}})


def emit_package(pcg: Graph, mesh: Mesh, document: Mapping[str, object], weights: Weights, directory: Path) -> None:
    """The same of a parallel computation graph of ``mesh``.

    Raises:
        ModelError: as ``write_package``.
        ShardingError: if ``pcg`` is not legal on ``mesh``.
    """
    write_package(emission_of(pcg, mesh, document), document, weights, directory)


def emission_of(pcg: Graph, mesh: Mesh, document: Mapping[str, object], running: Running = ONCE) -> Emission:
    """What is written of a PCG, for what plan.json says that it is for; ``running`` speaks of its nodes."""
    train = document.get("mode") != "infer"
    sizes = cast("NamedSizes", document.get("sizes") or {})
    return Emission.of(pcg, mesh, train=train, sizes=sizes, running=running)
