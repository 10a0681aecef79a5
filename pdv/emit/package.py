"""A directory that trains: the program, what it runs on, its weights and its plan.

Entry points: ``emit_package`` writes it; ``emitted`` says what is in it, to hold a directory against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from pdv.emit.weights import Array, Loader, write_weights
from pdv.frontend.program import Weights
from pdv.seal import write_document

WEIGHTS = "weights.safetensors"
_HERE = Path(__file__).parent
_INIT = '''"""The sharded model: ``build()`` makes it."""

from .model import Model, build

__all__ = ["Model", "build"]
'''


@dataclass(frozen=True)
class Emitted:
    """What a plan is written as.

    Attributes:
        graph: the PCG as the program says it, weights folded for inference.
        mesh: the axes that it names.
        tensors: every stored tensor that the program reads, in the type it computes in, and its constants.
        constants: those among them that the plan itself knows.
    """

    graph: Graph
    mesh: Mesh
    tensors: Mapping[str, tuple[DType, Loader]]
    constants: Mapping[str, tuple[DType, Array]]

    def files(self, document: Mapping[str, object], shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """The Python files, by name; ``document``: plan.json, ``shapes``: of each stored tensor."""
        return module_texts(write_program(self.graph, self.mesh, document, shapes))


def module_texts(model: str) -> dict[str, str]:
    """The Python files of a package, by name; model: the text of model.py."""
    beside = ("parallel.py", "runtime.py", "losses.py", *(["operators.py"] if helpers_used(model) else []))
    return {
        "model.py": model,
        "__init__.py": _INIT,
        **{name: (_HERE / name).read_text(encoding="utf-8") for name in beside},
    }


def emit_package(pcg: Graph, mesh: Mesh, document: Mapping[str, object], weights: Weights, directory: Path) -> None:
    """Write the package of a plan into an existing directory; equal plans give equal bytes.

    pcg: a parallel computation graph of ``mesh``; document: plan.json; weights: the values of its parameters.

    Raises:
        ModelError: if a parameter has no values, or two of them share some.
        ShardingError: if ``pcg`` is not legal on ``mesh``.
    """
    program = emitted(pcg, mesh, document, weights)
    stored = write_weights(directory / WEIGHTS, program.tensors)
    for name, text in program.files(document, {name: entry.shape for name, entry in stored.items()}).items():
        (directory / name).write_text(text, encoding="utf-8", newline="\n")
    write_document(directory, {**document, "weights": {name: entry._asdict() for name, entry in stored.items()}})


def emitted(pcg: Graph, mesh: Mesh, document: Mapping[str, object], weights: Weights | None = None) -> Emitted:
    """What a plan is written as; without ``weights`` their values cannot be loaded.

    Raises:
        ModelError, ShardingError: as ``emit_package``.
    """
    weights = weights or Weights()
    graph, named = lower(pcg, mesh)
    if document.get("mode") == "infer":
        graph, weights = folded(graph, named, weights)
    constants = _constants(graph)
    tensors: dict[str, tuple[DType, Loader]] = {}
    for source, params in stored_views(graph).items():
        tensors[source] = params[0].type.dtype, _loader(weights, source)
    for name, (dtype, array) in constants.items():
        tensors[name] = dtype, _given(array)
    return Emitted(graph, named, tensors, constants)


def _constants(graph: Graph) -> dict[str, tuple[DType, Array]]:
    found: dict[str, tuple[DType, Array]] = {}
    for node, name in constant_names(Reading(graph)).items():
        value = node.attr("value")
        assert isinstance(value, Constant)
        found[STORED + name] = node.type.dtype, value.array
    return found


def _loader(weights: Weights, source: str) -> Loader:
    return lambda: weights.load(source)


def _given(array: Array) -> Loader:
    return lambda: array
