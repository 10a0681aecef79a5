"""A directory that trains: the program, what it runs on, its weights and its plan. Entry point: ``emit_package``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ir.graph import Constant, Graph
from ir.mesh import Mesh
from ir.types import DType
from pdv.emit.constants import STORED, constant_names
from pdv.emit.fold import folded
from pdv.emit.leaves import Reading
from pdv.emit.lower import lower
from pdv.emit.program import helpers_used, write_program
from pdv.emit.views import stored_views
from pdv.emit.weights import Loader, write_weights
from pdv.frontend.program import Weights

_HERE = Path(__file__).parent
_INIT = '''"""The sharded model: ``build()`` makes it."""

from .model import Model, build

__all__ = ["Model", "build"]
'''


def emit_package(pcg: Graph, mesh: Mesh, document: Mapping[str, object], weights: Weights, directory: Path) -> None:
    """Write the package of a plan into an existing directory; equal plans give equal bytes.

    pcg: a parallel computation graph of ``mesh``; document: plan.json; weights: the values of its parameters.

    Raises:
        ModelError: if a parameter has no values, or two of them share some.
        ShardingError: if ``pcg`` is not legal on ``mesh``.
    """
    if document.get("mode") == "infer":
        pcg, weights = folded(pcg, mesh, weights)
    graph, named = lower(pcg, mesh)
    shapes = write_weights(directory / "weights.safetensors", _tensors(graph, weights))
    text = write_program(graph, named, document, shapes)
    _write(directory / "model.py", text)
    _write(directory / "__init__.py", _INIT)
    for name in ("parallel.py", "runtime.py", *(["operators.py"] if helpers_used(text) else [])):
        _write(directory / name, (_HERE / name).read_text(encoding="utf-8"))
    _write(directory / "plan.json", json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _tensors(graph: Graph, weights: Weights) -> dict[str, tuple[DType, Loader]]:
    """Every stored tensor that the program reads, in the type it computes in, and its constants."""
    found: dict[str, tuple[DType, Loader]] = {}
    for source, params in stored_views(graph).items():
        found[source] = params[0].type.dtype, _loader(weights, source)
    for node, name in constant_names(Reading(graph)).items():
        value = node.attr("value")
        assert isinstance(value, Constant)
        found[STORED + name] = node.type.dtype, _constant(value)
    return found


def _loader(weights: Weights, source: str) -> Loader:
    return lambda: weights.load(source)


def _constant(value: Constant) -> Loader:
    return lambda: value.array
