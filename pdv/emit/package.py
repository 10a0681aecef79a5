"""A directory that trains: the program, what it runs on, its weights and its plan. Entry point: ``write_package``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from ir.errors import ModelError
from ir.graph import Graph
from ir.mesh import Mesh
from ir.types import DType
from pdv.emit.analysis.open_sizes import NamedSizes
from pdv.emit.analysis.staged import ONCE, Running
from pdv.emit.emission import Emission
from pdv.emit.weights import Loader, describe, in_order, index_text, state_text, type_of, write_weights
from pdv.frontend.program import Weights
from pdv.plan.seal import write_document

WEIGHTS = "weights.safetensors"
INDEX = f"{WEIGHTS}.index.json"


def write_package(
    emission: Emission, document: Mapping[str, object], weights: Weights, directory: Path, *, link: bool = False
) -> None:
    """Write the package of a plan into an existing directory; equal plans give equal bytes.

    document: plan.json; weights: the values of the source's parameters; link: read these at build from the files that
    have them, where they are there in the program's type, instead of from a copy.

    Raises:
        ModelError: if a parameter has no values, two of them share some, or a name is taken.
    """
    state = cast("Mapping[str, Sequence[str]]", document.get("state") or {})
    tensors = emission.tensors(weights)
    for name in state.get("unread", ()):
        _check_free(name, tensors)
        tensors[name] = type_of(weights.unread[name]()), weights.unread[name]
    said = state_text(state, emission.computed)
    linked = _linked(tensors, weights) if link else {}
    own = {name: tensor for name, tensor in tensors.items() if name not in linked}
    written = write_weights(directory / WEIGHTS, own, said)
    if linked:
        weight_map = {name: str(linked.get(name, WEIGHTS)) for name in sorted(tensors)}
        (directory / INDEX).write_text(index_text(weight_map, said), encoding="utf-8")
        written |= {name: describe(load(), dtype) for name, (dtype, load) in tensors.items() if name in linked}
    stored = {name: written[name] for name in in_order({name: dtype for name, (dtype, _) in tensors.items()})}
    for name, text in emission.files(document, lambda tensor: stored[tensor].shape).items():
        (directory / name).write_text(text, encoding="utf-8", newline="\n")
    write_document(directory, {**document, "weights": {name: entry._asdict() for name, entry in stored.items()}})


def _check_free(name: str, tensors: Mapping[str, object]) -> None:
    """Whether a tensor that no line reads is not called like one of ours; those that are read never are.

    Raises:
        ModelError: naming it.
    """
    if name in tensors:
        raise ModelError(
            f"the model has a tensor {name!r} that nothing reads, and the package stores one of its own by that name",
            "Other names",
            "Rename it, or leave it out of the model",
        )


def _linked(tensors: Mapping[str, tuple[DType, Loader]], weights: Weights) -> dict[str, Path]:
    """The files of tensors that are there as the program reads them."""
    files = {name: path.resolve() for name, path in weights.files.items() if name in tensors}
    return {name: path for name, path in files.items() if type_of(weights.load(name)) is tensors[name][0]}


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
    cluster = cast("Mapping[str, object]", document.get("cluster") or {})
    places = cast("Sequence[int]", cluster.get("places") or ())
    running = replace(running, ranks=tuple(places))
    return Emission.of(pcg, mesh, train=train, sizes=sizes, running=running)
